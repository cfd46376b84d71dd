"""The gradient norm against exact rational arithmetic, however the gradient is spread."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mindspeed_tpi.parallel.norm_bins import grad_norm
from tests.parallel.ranks import Mesh, Ranks


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40), st.integers(1, 5))
def test_exact(values: list[float], parts: int) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    exact = sum((Fraction(v) ** 2 for v in x.tolist()), Fraction(0))
    assert grad_norm(x.tensor_split(parts)) == math.sqrt(exact)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_not_finite(value: float) -> None:
    assert math.isnan(grad_norm([torch.tensor([1.0, value])]))


def test_nothing() -> None:
    assert grad_norm([]) == 0.0


def _spread(mesh: Mesh, x: Tensor) -> float:
    return grad_norm([x.chunk(mesh.size)[mesh.rank]], mesh.group() if mesh.size > 1 else None)


def test_ranks(ranks: Ranks) -> None:
    x = torch.randn(10_001, generator=torch.Generator().manual_seed(0)) * 1e-3
    found = {norm for size in (1, 2, 4) for norm in ranks(size, _spread, x)}
    assert found == {grad_norm([x.flip(0)])}
