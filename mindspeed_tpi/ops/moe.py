"""Routing, expert products and combination of a mixture of experts (contract section 5)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi import contract
from mindspeed_tpi.contract import Leaves
from mindspeed_tpi.ops import schemas
from mindspeed_tpi.ops._autograd import needs_grad


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

    The weights have a gradient for the logits; the choice has none, and neither has `expert_bias`.

    Raises:
        BackendError: a NaN logit, or sizes outside the schema.
    """
    options = (expert_bias, topk, score, renormalize, groups, topk_groups, scaling, eps)
    if needs_grad(logits):
        pair: tuple[Tensor, Tensor] = _Route.apply(logits, *options)
        return pair
    return schemas.moe_route(logits, *options)


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    leaves: Leaves | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Rows offsets[e]…offsets[e+1] of x [P, K] times weight[e]ᵀ; weight [E, N, K] → [P, N]."""
    cut = leaves or contract.current().leaves(weight.shape[2], "whole")
    return schemas.grouped_linear(x, weight, offsets, cut.size, cut.count, out_dtype)


def grouped_linear_dx(
    dy: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    leaves: Leaves | None = None,
    paired: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Rows offsets[e]…offsets[e+1] of dy [P, N] times weight[e]; weight [E, N, K] → [P, K]. Options: `ops.linear_dx`."""
    cut = leaves or contract.current().leaves(weight.shape[1] // (2 if paired else 1), "whole")
    return schemas.grouped_linear_dx(dy, weight, offsets, cut.size, cut.count, out_dtype, paired)


def expert_weight_backward(
    g: Tensor, a: Tensor, weights: Tensor, *, leaves: Leaves | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients where an expert's down-projection is weighted: (dweights f32 [P], da [P, F] in a's dtype).

    Args:
        g: f32 [P, F], the *unweighted* output gradient through the down-projection. a: [P, F], its input.
        weights: f32 [P], the routing weight of each row.
        leaves: cut of F (default: the contract's; an expert-tensor-parallel rank passes its shard's, and dweights is its
            subtree's root).
    """
    cut = leaves or contract.current().leaves(g.shape[1], "expert")
    return schemas.expert_weight_backward(g, a, weights, cut.size, cut.count)


def moe_combine(y: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of expert outputs y [P, H] per token, in expert-id order; slots int64 [T, k] → [T, H]."""
    return schemas.moe_combine(y, slots, weights)


def sigmoid_gate(y: Tensor, logits: Tensor) -> Tensor:
    """The shared expert's output y [*, H] times the sigmoid of logits f32 [*, 1], rounded once → [*, H]."""
    if needs_grad(y, logits):
        out: Tensor = _SigmoidGate.apply(y, logits)
        return out
    return schemas.sigmoid_gate(y, logits)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output: tuple[Tensor, Tensor] = schemas.moe_route(*inputs)
        _setup_route(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _backward_route(ctx, *grads)


def _setup_route(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, _, _, score, renormalize, _, _, scaling, eps = inputs
    ctx.save_for_backward(logits, output[1])
    ctx.options = (score, renormalize, scaling, eps)
    ctx.mark_non_differentiable(output[1])


def _backward_route(ctx: Any, dweights: Tensor, dids: Tensor | None) -> tuple[Any, ...]:
    return schemas.moe_route_backward(dweights, *ctx.saved_tensors, *ctx.options), *[None] * 8


class _SigmoidGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, logits: Tensor) -> Tensor:
        ctx.save_for_backward(y, logits)
        return schemas.sigmoid_gate(y, logits)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _backward_gate(ctx, grads[0])


def _setup_gate(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward_gate(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
    return schemas.sigmoid_gate_backward(dout, *ctx.saved_tensors)


schemas.register_autograd("moe_route", _backward_route, _setup_route)
schemas.register_autograd("sigmoid_gate", _backward_gate, _setup_gate)
