"""Matrix products: leaves of f32 fma chains combined by a balanced tree (contract section 2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi import contract
from mindspeed_tpi.contract import Leaves
from mindspeed_tpi.ops import schemas
from mindspeed_tpi.ops._autograd import needs_grad, parameter_gradient, spans


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    leaves: Leaves | None = None,
    dx_leaves: Leaves | None = None,
    paired: bool = False,
    out_dtype: torch.dtype | None = None,
    batch: int = 1,
    row_offsets: Tensor | None = None,
) -> Tensor:
    """y = x weightᵀ + bias.

    Args:
        x: [*, K]. weight: [N, K], row-major, of x's dtype. bias: [N] or None.
        leaves: cut of K (default: that of a reduction which no layout cuts; a rank that owns part of K passes its shard's).
        dx_leaves: cut of N in the backward pass, of N/2 if paired (default: likewise).
        paired: the weight is [gate; up]: dx sums leaf i of gate and of up in one chain.
        out_dtype: None rounds to x's dtype; float32 leaves the f32 sum.
        batch, row_offsets: rows of the weight gradient (docs/op-schemas.md).

    Returns:
        [*, N].

    Raises:
        BackendError: dtypes, devices or shapes outside the schema.
    """
    cut = leaves or contract.current().leaves(weight.shape[1], "whole")
    if needs_grad(x, weight, bias):
        result: Tensor = _Linear.apply(x, weight, bias, cut, out_dtype, (dx_leaves, paired, batch, row_offsets))
        return result
    return schemas.linear(x, weight, bias, cut.size, cut.count, out_dtype)


def linear_dx(
    dy: Tensor,
    weight: Tensor,
    *,
    leaves: Leaves | None = None,
    paired: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """dx = dy weight; dy [*, N], weight [N, K] → [*, K].

    Args:
        leaves: cut of N (default: that of a reduction which no layout cuts; a rank that owns part of N passes its shard's).
        paired: the weight is [gate; up] of N/2 rows each, which `leaves` cuts; leaf i of up continues that of gate.
        out_dtype: None rounds to dy's dtype; float32 leaves the f32 sum.

    Raises:
        BackendError: dtypes, devices or shapes outside the schema.
    """
    cut = leaves or contract.current().leaves(weight.shape[0] // (2 if paired else 1), "whole")
    return schemas.linear_dx(dy, weight, cut.size, cut.count, out_dtype, paired)


def linear_dw(
    dy: Tensor,
    x: Tensor,
    grad: Tensor,
    *,
    batch: int = 1,
    row_offsets: Tensor | None = None,
    spans: int = 1,
    carry: bool = False,
) -> None:
    """Add dyᵀ x to the f32 `grad` [N, K], one chain a row (contract section 9).

    Args:
        carry: `grad` is the chain of one row so far, and these are the row's next tokens (a multiple of 16 unless the last).
    """
    schemas.linear_dw(dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]), grad, batch, row_offsets, spans, carry)


def linear_db(dy: Tensor, grad: Tensor, *, batch: int = 1, row_offsets: Tensor | None = None, spans: int = 1) -> None:
    """Add the column sums of dy to the f32 `grad` [N], one chain a span of a row."""
    schemas.linear_db(dy.reshape(-1, dy.shape[-1]), grad, batch, row_offsets, spans)


def _gradients(
    ctx: Any, dy: Tensor, dx_leaves: Leaves | None, paired: bool, batch: int, row_offsets: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x, weight, bias = ctx.saved_tensors
    dy = dy.to(x.dtype)  # an f32 output's gradient is an activation gradient too: rounded once
    dx = linear_dx(dy, weight, leaves=dx_leaves, paired=paired) if ctx.needs_input_grad[0] else None
    dw = db = None
    rows = batch if row_offsets is None else row_offsets.numel() - 1
    if ctx.needs_input_grad[1]:
        dw = parameter_gradient(weight, lambda g: linear_dw(dy, x, g, batch=batch, row_offsets=row_offsets), rows)
    if bias is not None and ctx.needs_input_grad[2]:

        def add(grad: Tensor) -> None:
            linear_db(dy, grad, batch=batch, row_offsets=row_offsets, spans=spans())

        db = parameter_gradient(bias, add, rows)
    return dx, dw, db


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cut: Leaves,
        out_dtype: torch.dtype | None,
        options: tuple[Leaves | None, bool, int, Tensor | None],
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.options = options
        return schemas.linear(x, weight, bias, cut.size, cut.count, out_dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (*_gradients(ctx, grads[0], *ctx.options), None, None, None)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return (*_gradients(ctx, dy, None, False, 1, None), None, None, None)


schemas.register_autograd("linear", _backward, _setup)
