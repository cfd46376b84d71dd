"""RMSNorm where ranks own spans of each row or heads of each token (contract sections 4 and 9)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi import ops
from mindspeed_tpi.ops import _schemas as schemas
from mindspeed_tpi.ops._autograd import needs_grad, parameter_gradient, spans
from mindspeed_tpi.parallel import tree
from mindspeed_tpi.parallel.linear import span_gradient


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    group: Any,
    sequence_parallel: bool = False,
    per_head: bool = False,
    copies: int = 1,
    batch: int = 1,
) -> Tensor:
    """`ops.rms_norm` on a rank's part of the activation.

    Args:
        x: [S, B, H]; its own [S / ranks, B, H] with `sequence_parallel`; or its own heads [S·B, heads / ranks, H] with
            `per_head`.
        weight: [H], the same on every rank.
        group: ranks in the order of their spans or heads; None: this process alone.
        copies: neighbouring ranks that hold the same heads, each with its part of their gradient already exchanged.
        batch: B.
    """
    shared = tree.size(group) > 1 and (sequence_parallel or per_head)
    if not (shared and needs_grad(x, weight)):
        return ops.rms_norm(x, weight, eps, batch=batch, per_head=per_head)
    y: Tensor = _RMSNorm.apply(x, weight, eps, group, per_head, copies, batch)
    return y


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, group: Any, per_head: bool, copies: int, batch: int
    ) -> Tensor:
        y, rstd = schemas.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.options = (group, per_head, copies, batch)
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, rstd = ctx.saved_tensors
        group, per_head, copies, batch = ctx.options
        dy = grads[0]
        dw = None
        if ctx.needs_input_grad[1]:
            dw = (
                _heads(dy, x, weight, rstd, group, copies, batch)
                if per_head
                else _spans(dy, x, weight, rstd, group, batch)
            )
        dx = schemas.rms_norm_backward(dy, x, weight, rstd, None)
        return dx, dw, None, None, None, None, None


def _spans(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, group: Any, batch: int) -> Tensor:
    dy, x, rstd = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]), rstd.reshape(-1)
    return span_gradient(
        weight,
        group,
        batch,
        lambda row, grad, spans: schemas.rms_norm_dw(dy[row], x[row], rstd[row], grad, 1, None, spans),
    )


def _heads(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, group: Any, copies: int, batch: int) -> Tensor:
    terms = tree.gather(schemas.head_terms(dy, x, rstd), group)[::copies]
    whole = schemas.tree_sum(terms.contiguous(), None, torch.float32)
    return parameter_gradient(weight, lambda g: ops.linear_db(whole, g, batch=batch, spans=spans()))
