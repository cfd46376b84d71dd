"""The 2-norm of gradients through exact integers: no order of summation, no library and no layout decides its bits
(contract section 9)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK = 1 << 22  # elements at once
_HALF = 24  # a square of a 24-bit mantissa is kept as two halves of this many bits: 2^39 of them fit an int64
_LOWEST, _BINS = -160, 300  # exponents of f32, subnormals included
_NOT_FINITE = 2 * _BINS


def grad_norm(grads: Iterable[Tensor], group: Any = None) -> float:
    """sqrt(Σ g²) over all elements of `grads` and all ranks of `group`, correctly rounded twice (sum, then root) in float64.

    Args:
        grads: f32 tensors; every element of the model's gradient on exactly one rank.
        group: a process group of any size; None: this process alone.

    Returns:
        A finite float, or NaN when an element is not finite.
    """
    return root(squares(grads, group))


def squares(grads: Iterable[Tensor], group: Any = None) -> Tensor:
    """Σ g², as of `grad_norm`, in integer bins int64 [2 · exponents + 1]."""
    bins = torch.zeros(2 * _BINS + 1, dtype=torch.int64)
    for grad in grads:
        for part in grad.detach().reshape(-1).split(CHUNK):
            _add_squares(part.float(), bins)
    if group is not None:
        dist.all_reduce(bins, group=group)
    return bins


def root(*parts: Tensor) -> float:
    """The norm of a gradient whose parts have these `squares`."""
    counts = torch.stack(parts).sum(dim=0).tolist() if parts else [0] * (2 * _BINS + 1)
    if counts[_NOT_FINITE]:
        return math.nan
    total = 0  # in units of 2^(2·_LOWEST)
    for index in range(_BINS):
        total += (counts[index] + (counts[_BINS + index] << _HALF)) << (2 * index)
    return math.sqrt(total / (1 << -2 * (_LOWEST - _HALF)))


def _add_squares(x: Tensor, bins: Tensor) -> None:
    finite = torch.isfinite(x)
    bins[_NOT_FINITE] += int((~finite).sum())
    mantissa, exponent = torch.frexp(torch.where(finite, x, 0))
    whole = (mantissa.abs() * (1 << _HALF)).long()
    square = whole * whole
    place = exponent.long() - _LOWEST
    bins.index_add_(0, place, square & ((1 << _HALF) - 1))
    bins.index_add_(0, place + _BINS, square >> _HALF)
