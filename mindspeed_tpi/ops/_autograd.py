"""Shared pieces of the autograd formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi import envs
from mindspeed_tpi.errors import ParityError
from mindspeed_tpi.ops import gradient_groups


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd must record an operator on these operands."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def parameter_gradient(parameter: Tensor, accumulate: Callable[..., None], rows: int, peers: int = 1) -> Tensor:
    """The gradient of a parameter, kept in f32 where the framework has a place for it.

    A parameter with a `main_grad` (Megatron's f32 gradient buffer) is accumulated there directly; what autograd then
    gets is a zero that Megatron's hooks discard because `grad_added_to_main_grad` is set. Any other parameter gets the
    f32 sum, rounded once to its dtype, as torch requires.

    Args:
        parameter: the leaf tensor.
        accumulate: adds this micro-batch's gradient into an f32 tensor of the parameter's shape; with `peers`, takes as
            many tensors and adds each data-parallel rank's rows to its own.
        rows: rows of the micro-batch (contract section 9), of each of these ranks.
        peers: data-parallel ranks whose rows are summed here, if `MINDSPEED_TPI_GRADIENT_GROUPS` tells them apart.

    Raises:
        ParityError: gradient groups, and a parameter without `main_grad`, or rows that do not fit them.
    """
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is not None:
        gradient_groups.accumulate(main_grad, accumulate, rows, peers)
        parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return parameter.new_zeros(()).expand(parameter.shape)
    if gradient_groups.count():
        raise ParityError(
            f"{envs.GRADIENT_GROUPS.name} needs Megatron-core's f32 gradient buffers: wrap the model in DistributedDataParallel"
        )
    grad = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
    accumulate(grad)
    return grad.to(parameter.dtype)


def spans() -> int:
    """Spans of a norm-weight or bias gradient chain: the largest tensor-parallel size promised (contract section 9)."""
    from mindspeed_tpi import contract

    return contract.current().max_tp


Context = Any
