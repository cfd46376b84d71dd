"""Bit equality of tensors: the only comparison that parity tests use."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> Tensor:
    """The integer view of a tensor."""
    return x.detach().contiguous().view(_INTEGERS[x.element_size()])


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Whether dtype, shape and every bit agree."""
    return (
        actual.dtype == expected.dtype and actual.shape == expected.shape and torch.equal(bits(actual), bits(expected))
    )


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "result") -> None:
    """Fail with the first differing element and how many differ."""
    if same_bits(actual, expected):
        return
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), (
        f"{what}: {actual.dtype} {tuple(actual.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    )
    a, b = bits(actual), bits(expected)
    differing = (a != b).nonzero()
    index = tuple(differing[0].tolist())
    mask = (1 << 8 * actual.element_size()) - 1
    raise AssertionError(
        f"{what}: {len(differing)} of {a.numel()} elements differ, first at {index}: "
        f"{actual[index].item()!r} ({a[index].item() & mask:#x}) instead of "
        f"{expected[index].item()!r} ({b[index].item() & mask:#x})"
    )
