"""Routing, expert products and combination of a mixture of experts (contract section 5)."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_tpi import contract
from mindspeed_tpi.contract import Leaves
from mindspeed_tpi.ops import _schemas as schemas


def moe_route(
    logits: Tensor,
    topk: int,
    *,
    expert_bias: Tensor | None = None,
    score: str = "softmax",
    renormalize: bool = True,
    groups: int = 1,
    topk_groups: int = 1,
    scaling: float = 1.0,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(weights f32 [T, topk], ids int32 [T, topk]) in ascending expert id; logits f32 [T, E].

    Raises:
        BackendError: a NaN logit, or sizes outside the schema.
    """
    return schemas.moe_route(logits, expert_bias, topk, score, renormalize, groups, topk_groups, scaling, eps)


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    leaves: Leaves | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Rows offsets[e]…offsets[e+1] of x [P, K] times weight[e]ᵀ; weight [E, N, K] → [P, N]."""
    cut = leaves or contract.current().leaves(weight.shape[2])
    return schemas.grouped_linear(x, weight, offsets, cut.size, cut.count, out_dtype)


def moe_combine(y: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of expert outputs y [P, H] per token, in expert-id order; slots int64 [T, k] → [T, H]."""
    return schemas.moe_combine(y, slots, weights)
