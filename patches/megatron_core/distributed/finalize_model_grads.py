"""Tied output projection: its gradient joins the embedding's once per step (contract section 4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_tpi.errors import LayoutError
from mindspeed_tpi.patches.megatron_core.support import UNTIL, VERSIONS, by_version, served
from mindspeed_tpi.patches.megatron_core.tensor_parallel.layers import HEAD_GRAD, add_head_gradients
from mindspeed_tpi.patching import Patch


def finalize_model_grads(original: Callable[..., None]) -> Callable[..., None]:
    """Completes the tied weights' `main_grad`, then does what upstream does."""

    def finalize(model: list[Any], *args: Any, **kwargs: Any) -> None:
        from megatron.core import parallel_state

        for chunk in model:
            if any(hasattr(parameter, HEAD_GRAD) for parameter in chunk.parameters()):
                ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
                if ranks > 1:
                    raise LayoutError(f"tied embeddings over {ranks} data-parallel ranks are not served; use 1")
                add_head_gradients(chunk)
        original(model, *args, **kwargs)

    return finalize


def allreduce_non_tensor_model_parallel_grads(original: Callable[..., None]) -> Callable[..., None]:
    """Nothing: norms, biases and routers have exchanged their gradients micro-batch by micro-batch (contract section 9)."""

    def allreduce(model: list[Any], config: Any, *args: Any, **kwargs: Any) -> None:
        if not served(config):
            original(model, config, *args, **kwargs)

    return allreduce


PATCHES: tuple[Patch, ...] = (
    Patch(
        target="megatron.core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads",
        factory=allreduce_non_tensor_model_parallel_grads,
        reason="a library sum over tensor-parallel ranks, which also counts replicated heads twice",
        versions="megatron-core>=0.13,<0.17",
        parameters=by_version(("0.16", ("model", "config", "tp_group")), ("0.13", ("model", "config"))),
        until=UNTIL,
    ),
    Patch(
        target="megatron.core.distributed:finalize_model_grads",
        factory=finalize_model_grads,
        reason="head and embedding gradients of a tied weight would otherwise interleave by micro-batch",
        versions=VERSIONS,
        parameters=by_version(
            ("0.16", ("model", "num_tokens", "pg_collection", "force_all_reduce")),
            ("0.15", ("model", "num_tokens", "pg_collection")),
            ("0.14", ("model", "num_tokens", "grad_finalize_pgs")),
            ("0.12", ("model", "num_tokens")),
        ),
        until=UNTIL,
        kind="wrap",
    ),
)
