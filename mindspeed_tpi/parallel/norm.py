"""RMSNorm where ranks own spans of each row or heads of each token (contract sections 4 and 9)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi import ops
from mindspeed_tpi.ops import schemas
from mindspeed_tpi.ops._autograd import needs_grad, spans
from mindspeed_tpi.parallel import tree, zigzag
from mindspeed_tpi.parallel.linear import mark_exchanged, span_gradient


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
    row_group: Any = None,
) -> Tensor:
    """`ops.rms_norm` on a rank's part of the activation.

    Args:
        x: [S, B, H]; its own [S / ranks, B, H] with `sequence_parallel`; or its own heads [S·B, heads / ranks, H] with
            `per_head`.
        weight: [H], the same on every rank.
        group: ranks in the order of their spans or heads; None: this process alone.
        copies: neighbouring ranks that hold the same heads, each with its part of their gradient already exchanged.
        batch: B.
        row_group: context-parallel ranks whose parts of each row are gathered for the weight's gradient, which the first of
            them computes.
    """
    group = group if sequence_parallel or per_head else None
    shared = tree.size(group) > 1 or row_group is not None
    if not (shared and needs_grad(x, weight)):
        return ops.rms_norm(x, weight, eps, batch=batch, per_head=per_head)
    y: Tensor = _RMSNorm.apply(x, weight, eps, (group, per_head, copies, batch, row_group))
    return y


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, options: tuple[Any, bool, int, int, Any]) -> Tensor:
        y, rstd = schemas.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.options = options
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, rstd = ctx.saved_tensors
        group, per_head, copies, batch, row_group = ctx.options
        dy = grads[0]
        dw = None
        if ctx.needs_input_grad[1]:
            dw = (
                _heads(dy, x, weight, rstd, group, copies, batch, row_group)
                if per_head
                else _spans(dy, x, weight, rstd, group, batch, row_group)
            )
        dx = schemas.rms_norm_backward(dy, x, weight, rstd, None)
        return dx, dw, None, None


def _spans(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, group: Any, batch: int, row_group: Any) -> Tensor:
    def add(row: slice, grad: Tensor, spans: int, dy: Tensor, x: Tensor, rstd: Tensor) -> None:
        schemas.rms_norm_dw(dy[row], x[row], rstd[row], grad, 1, None, spans)

    rows = (-1, batch)
    operands = (dy.reshape(*rows, dy.shape[-1]), x.reshape(*rows, x.shape[-1]), rstd.reshape(rows))
    return span_gradient(weight, group, row_group, add, *operands)


def _heads(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, group: Any, copies: int, batch: int, row_group: Any
) -> Tensor:
    mark_exchanged(weight, group)
    terms = tree.gather(schemas.head_terms(dy, x, rstd), group)[::copies]
    whole = schemas.tree_sum(terms.contiguous(), None, torch.float32)
    whole = zigzag.gather(whole.unflatten(0, (-1, batch)), row_group)
    return zigzag.row_gradient(weight, lambda g: ops.linear_db(whole, g, batch=batch, spans=spans()), batch, row_group)
