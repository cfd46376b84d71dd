"""Where an optimizer step begins (contract section 9, gradient groups)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_tpi.ops import gradient_groups
from mindspeed_tpi.patches.megatron_core.support import UNTIL, VERSIONS
from mindspeed_tpi.patching import Patch


def zero_grad_buffer(original: Callable[..., None]) -> Callable[..., None]:
    """`DistributedDataParallel.zero_grad_buffer`: then say how many rows the step will bring, where Megatron-core knows it."""

    def zero(self: Any) -> None:
        original(self)
        from megatron.core import num_microbatches_calculator as calculator
        from megatron.core import parallel_state

        if gradient_groups.count() and calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is not None:
            rows = calculator.get_num_microbatches() * calculator.get_micro_batch_size()
            gradient_groups.begin_step(rows, parallel_state.get_data_parallel_world_size())

    return zero


PATCHES: tuple[Patch, ...] = (
    Patch(
        target="megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.zero_grad_buffer",
        factory=zero_grad_buffer,
        reason="gradient groups need to know a step's rows before its first backward pass",
        versions=VERSIONS,
        parameters=("self",),
        until=UNTIL,
        kind="wrap",
    ),
)
