"""Which gradients a step begins with and which ranks sum them (contract section 9)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_tpi.ops import gradient_groups
from mindspeed_tpi.patches.megatron_core.support import UNTIL, VERSIONS, served
from mindspeed_tpi.patches.megatron_core.tensor_parallel.layers import drop_head_gradient, mark_shards
from mindspeed_tpi.patching import Patch


def init(original: Callable[..., None]) -> Callable[..., None]:
    """`DistributedDataParallel.__init__`: every parameter first says what of it this rank holds and who else holds it."""
    signature = inspect.signature(original)

    def ddp_init(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs).arguments
        if served(bound["config"]):
            mark_shards(bound["module"])
            _mark_experts(bound["module"])
        original(*args, **kwargs)

    return ddp_init


def _mark_experts(model: torch.nn.Module) -> None:
    """Have experts' gradients summed over the ranks that hold copies of them.

    Upstream marks expert weights by expert-parallel size alone, and sums them over the dense layers' data-parallel ranks
    where it is 1; with another tensor-parallel size inside experts these are not the ranks that hold copies
    (Megatron-LM#5916).
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_layer import MoELayer

    experts = [module.experts for module in model.modules() if isinstance(module, MoELayer)]
    if not experts:
        return
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    copies = parallel_state.get_expert_data_parallel_group()
    if dist.get_process_group_ranks(dense) != dist.get_process_group_ranks(copies):
        for module in experts:
            for parameter in module.parameters():
                parameter.allreduce = False


def zero_grad_buffer(original: Callable[..., None]) -> Callable[..., None]:
    """`DistributedDataParallel.zero_grad_buffer`: also what no buffer holds, a tied output projection's gradient; then say
    how many rows the step will bring, where Megatron-core knows it."""

    def zero(self: Any) -> None:
        original(self)
        for parameter in self.module.parameters():
            drop_head_gradient(parameter)
        from megatron.core import num_microbatches_calculator as calculator
        from megatron.core import parallel_state

        if gradient_groups.count() and calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is not None:
            rows = calculator.get_num_microbatches() * calculator.get_micro_batch_size()
            gradient_groups.begin_step(rows, parallel_state.get_data_parallel_world_size())

    return zero


_CLASS = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"
PATCHES: tuple[Patch, ...] = (
    Patch(
        target=f"{_CLASS}.__init__",
        factory=init,
        reason="experts are summed over the wrong ranks where ETP is not TP, and shards of uninitialised models are missing from "
        "the gradient norm",
        versions=VERSIONS,
        parameters=None,  # only passed through
        until="Megatron-core marks both itself (Megatron-LM#5916, #6470)",
        kind="wrap",
    ),
    Patch(
        target=f"{_CLASS}.zero_grad_buffer",
        factory=zero_grad_buffer,
        reason="gradient groups need to know a step's rows before its first backward pass; a tied output projection's gradient "
        "lies outside the buffers",
        versions=VERSIONS,
        parameters=("self",),
        until=UNTIL,
        kind="wrap",
    ),
)
