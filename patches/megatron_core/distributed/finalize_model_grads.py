"""What Megatron-core exchanges after the data-parallel sum (contract sections 4 and 9)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_tpi.patches.megatron_core.support import UNTIL, VERSIONS, by_version, served
from mindspeed_tpi.patches.megatron_core.tensor_parallel.layers import add_head_gradients
from mindspeed_tpi.patching import Patch


def allreduce_non_tensor_model_parallel_grads(original: Callable[..., None]) -> Callable[..., None]:
    """A tied output projection's gradient joins its embedding's. Nothing else: norms, biases and routers have exchanged theirs
    micro-batch by micro-batch."""

    def allreduce(model: list[Any], config: Any, *args: Any, **kwargs: Any) -> None:
        if not served(config):
            original(model, config, *args, **kwargs)
            return
        for chunk in model:
            add_head_gradients(chunk)

    return allreduce


PATCHES: tuple[Patch, ...] = (
    Patch(
        target="megatron.core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads",
        factory=allreduce_non_tensor_model_parallel_grads,
        reason="a library sum over tensor-parallel ranks, which also counts replicated heads twice; and head and embedding "
        "gradients of a tied weight are added once",
        versions=VERSIONS,
        parameters=by_version(("0.14", ("model", "config", "tp_group")), ("0.13", ("model", "config"))),
        until=UNTIL,
    ),
)
