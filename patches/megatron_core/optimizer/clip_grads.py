"""Gradient norm by exact integers (contract section 9)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mindspeed_tpi.parallel import norm_bins
from mindspeed_tpi.patches.megatron_core.support import UNTIL, VERSIONS, outside
from mindspeed_tpi.patching import Patch


def get_grad_norm_fp32(original: Callable[..., float]) -> Callable[..., float]:
    """2-norm over the ranks of `grad_stats_parallel_group` (None: all); other norms go to upstream."""

    def norm(
        grads_for_norm: list[Tensor] | Tensor, norm_type: float = 2, grad_stats_parallel_group: Any = None
    ) -> float:
        if float(norm_type) != 2.0:
            outside(f"a gradient norm of type {norm_type} (served: 2)")
            return original(grads_for_norm, norm_type, grad_stats_parallel_group)
        grads = [grads_for_norm] if isinstance(grads_for_norm, Tensor) else grads_for_norm
        return norm_bins.grad_norm(grads, grad_stats_parallel_group or dist.group.WORLD)

    return norm


PATCHES: tuple[Patch, ...] = (
    Patch(
        target="megatron.core.optimizer.clip_grads:get_grad_norm_fp32",
        factory=get_grad_norm_fp32,
        reason="the sum of squares depends on layout, library and the number of ranks, and scales every gradient",
        versions=VERSIONS,
        parameters=("grads_for_norm", "norm_type", "grad_stats_parallel_group"),
        until=UNTIL,
    ),
)
