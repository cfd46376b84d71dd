"""What Megatron-core exchanges over tensor-parallel ranks after the data-parallel sum (contract section 9)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mindspeed_tpi.parallel import tree
from mindspeed_tpi.parallel.linear import exchanged
from mindspeed_tpi.patches.megatron_core.support import (
    UNTIL,
    VERSIONS,
    by_version,
    outside,
    served,
    tensor_parallel_group,
)
from mindspeed_tpi.patching import Patch


def allreduce_non_tensor_model_parallel_grads(original: Callable[..., None]) -> Callable[..., None]:
    """The tree over tensor-parallel ranks of every gradient that upstream sums or averages there, except those which this
    package's operators have exchanged already, micro-batch by micro-batch: its norms, biases and routers."""

    def allreduce(model: list[Any], config: Any, tp_group: Any = None) -> None:
        if not served(config) or _megatron_fsdp(model):
            original(model, config, *(() if tp_group is None else (tp_group,)))
            return
        group = tensor_parallel_group() if tp_group is None else tp_group
        if tree.size(group) == 1:
            return
        for chunk in model:
            for name, parameter in chunk.named_parameters():
                if not parameter.requires_grad or exchanged(parameter):
                    continue
                averaged = getattr(parameter, "average_gradients_across_tp_domain", False)
                summed = (config.sequence_parallel and getattr(parameter, "sequence_parallel", False)) or (
                    config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
                )
                gradient = getattr(parameter, "main_grad", parameter.grad)
                if (averaged or summed) and gradient is not None:
                    total: Tensor = tree.tree_reduce(gradient.float().view(1, -1), group).view_as(gradient)
                    gradient.copy_(total / tree.size(group) if averaged else total)

    return allreduce


def _megatron_fsdp(model: list[Any]) -> bool:
    used = any(getattr(chunk.ddp_config, "use_megatron_fsdp", False) for chunk in model)
    if used:
        outside("gradients in the buffers of Megatron-FSDP (served: DistributedDataParallel)")
    return used


PATCHES: tuple[Patch, ...] = (
    Patch(
        target="megatron.core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads",
        factory=allreduce_non_tensor_model_parallel_grads,
        reason="a library's sum over tensor-parallel ranks, which also counts again what the contract's operators have exchanged",
        versions=VERSIONS,
        parameters=by_version(("0.14", ("model", "config", "tp_group")), ("0.13", ("model", "config"))),
        until=UNTIL,
    ),
)
