"""Distance from a float64 result, for the only tests that have a tolerance."""

from __future__ import annotations

import torch
from torch import Tensor

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # unit roundoff


def assert_near(actual: Tensor, exact: Tensor, scale: Tensor | float, f32_roundings: float) -> None:
    """|actual − exact| <= scale · f32_roundings · 2^-24 + one rounding to the storage dtype.

    Args:
        actual: result of an operator. exact: the same in float64.
        scale: magnitude that the float32 errors are relative to (the sum of the absolute terms, for a sum).
        f32_roundings: number of float32 roundings on the longest path to a result, to first order.
    """
    scale = torch.as_tensor(scale, dtype=torch.float64)
    bound = 1.01 * f32_roundings * UNIT[torch.float32] * scale
    if actual.dtype != torch.float32:
        bound = bound + 1.01 * UNIT[actual.dtype] * (exact.abs() + bound) + torch.finfo(actual.dtype).tiny
    error = (actual.double() - exact).abs()
    worst = (error / bound.clamp(min=1e-300)).max() if error.numel() else torch.zeros(())
    assert bool((error <= bound).all()), f"error is {float(worst):.3g} times the bound"
