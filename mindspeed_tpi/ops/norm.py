"""RMSNorm, alone and after a residual add; the residual add (contract section 4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi.ops import schemas
from mindspeed_tpi.ops._autograd import needs_grad, parameter_gradient, spans


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, batch: int = 1, per_head: bool = False) -> Tensor:
    """RMSNorm over the last dimension, rounded before and after the weight (as Hugging Face and vLLM round).

    Args:
        x: [*, H], or a strided [T, heads, H] view for query/key norms. weight: [H] of x's dtype.
        batch: B when the tokens are laid out [S, B] (rows of the weight gradient).
        per_head: x is [T, heads, H]; the weight gradient sums a token's heads first.
    """
    if needs_grad(x, weight):
        y: Tensor = _RMSNorm.apply(x, weight, eps, batch, per_head)
        return y
    result: Tensor = schemas.rms_norm(x, weight, eps)[0]
    return result


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, batch: int = 1) -> tuple[Tensor, Tensor]:
    """(norm of the rounded x + residual, that sum). x, residual: [*, H]."""
    if needs_grad(x, residual, weight):
        pair: tuple[Tensor, Tensor] = _AddRMSNorm.apply(x, residual, weight, eps, batch)
        return pair
    y, total, _ = schemas.add_rms_norm(x, residual, weight, eps)
    return y, total


def rms_norm_dw(dy: Tensor, x: Tensor, rstd: Tensor, grad: Tensor, *, batch: int = 1, per_head: bool = False) -> None:
    """Add the weight gradient to the f32 `grad` [H]; dy, x [*, H], or `per_head` [T, heads, H]."""
    if not per_head:
        dy, x, rstd = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]), rstd.reshape(-1)
    schemas.rms_norm_dw(dy, x, rstd, grad, batch, None, spans())


def head_terms(dy: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
    """Each token's weight gradient of a query/key norm, summed over heads: what tensor-parallel ranks exchange.

    `linear_db` of the tree continued over the ranks' terms gives the bits of `rms_norm_dw(..., per_head=True)`.

    Args:
        dy, x: [T, heads, D]. rstd: f32 [T, heads].

    Returns:
        f32 [T, D].
    """
    return schemas.head_terms(dy, x, rstd)


def residual_add(x: Tensor, y: Tensor) -> Tensor:
    """x + y, rounded once; both [*] of one shape and dtype. The gradient of either is the output's, unchanged."""
    if needs_grad(x, y):
        out: Tensor = _ResidualAdd.apply(x, y)
        return out
    return schemas.residual_add(x, y)


class _ResidualAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return schemas.residual_add(x, y)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], grads[0]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, batch: int, per_head: bool) -> Tensor:
        y, rstd = schemas.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.rows = (batch, per_head)
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (*_gradients(ctx, grads[0], None, *ctx.rows), None, None, None)


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float, batch: int) -> tuple[Tensor, Tensor]:
        y, total, rstd = schemas.add_rms_norm(x, residual, weight, eps)
        ctx.save_for_backward(total, weight, rstd)
        ctx.batch = batch
        return y, total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dx, dw = _gradients(ctx, grads[0], grads[1], ctx.batch, False)
        return dx, dx, dw, None, None


def _gradients(ctx: Any, dy: Tensor, dskip: Tensor | None, batch: int, per_head: bool) -> tuple[Tensor, Tensor | None]:
    x, weight, rstd = ctx.saved_tensors
    dw = None
    if weight.requires_grad:
        dw = parameter_gradient(weight, lambda g: rms_norm_dw(dy, x, rstd, g, batch=batch, per_head=per_head), batch)
    return schemas.rms_norm_backward(dy, x, weight, rstd, dskip), dw


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dy: Tensor, drstd: Tensor) -> tuple[Any, ...]:
    return (*_gradients(ctx, dy, None, 1, False), None)


def _setup_add(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], inputs[2], output[2])
    ctx.mark_non_differentiable(output[2])


def _backward_add(ctx: Any, dy: Tensor, dtotal: Tensor, drstd: Tensor) -> tuple[Any, ...]:
    dx, dw = _gradients(ctx, dy, dtotal, 1, False)
    return dx, dx, dw, None


schemas.register_autograd("residual_add", lambda ctx, dout: (dout, dout))
schemas.register_autograd("rms_norm", _backward, _setup)
schemas.register_autograd("add_rms_norm", _backward_add, _setup_add)
