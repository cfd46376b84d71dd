"""Matrix products of which every rank owns a part (contract sections 2 and 9)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi import contract, ops
from mindspeed_tpi.contract import Leaves
from mindspeed_tpi.ops import schemas
from mindspeed_tpi.ops._autograd import needs_grad, parameter_gradient, spans
from mindspeed_tpi.parallel import tree, zigzag

_EXCHANGED = "tpi_exchanged"  # attribute of a parameter


@dataclass(frozen=True)
class _Plan:
    """Everything about a product that is not a tensor.

    Attributes:
        group: the ranks that share the product.
        split: `columns` (of the output) or `rows` (of the weight's K).
        sequence_parallel: each rank holds S / ranks rows of the tensor outside the product.
        leaves, dx_leaves: this rank's cut of K, and of N in the backward pass.
        paired: the weight is [gate; up].
        used: leading rows of the weight that exist; the others are padding.
        out_dtype: None rounds to x's dtype.
        batch: B of an [S, B, …] activation.
        row_group: ranks that hold the rest of each row of the weight's gradient, in zigzag order; None: rows are whole here.
    """

    group: Any
    split: str
    sequence_parallel: bool
    leaves: Leaves
    dx_leaves: Leaves
    paired: bool
    used: int
    out_dtype: torch.dtype | None
    batch: int
    row_group: Any


def column_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: Any,
    sequence_parallel: bool = False,
    dx_leaves: Leaves | None = None,
    paired: bool = False,
    used: int | None = None,
    out_dtype: torch.dtype | None = None,
    batch: int = 1,
    row_group: Any = None,
) -> Tensor:
    """This rank's columns of y = x Wᵀ + b; the gradient of x is one tree over all ranks' columns.

    Args:
        x: [S, …, K], the same on every rank; or its own [S / ranks, …, K] with `sequence_parallel`.
        weight: [N / ranks, K]. bias: [N / ranks] or None.
        group: ranks in the order of their columns; None: this process alone.
        dx_leaves: cut of the whole N (default: the contract's for ranks that share it).
        paired: the weight is [gate shard; up shard]; N counts both.
        used: leading rows of this rank's weight that exist (default: all).
        out_dtype: None rounds to x's dtype; float32 leaves the f32 sum.
        batch: B when the tokens are laid out [S, B].
        row_group: context-parallel ranks whose parts of each row are gathered for the weight's gradient, in zigzag order; each
            computes a slice of it. None: it is this rank's part of the row.

    Returns:
        [S, …, used].

    Raises:
        LayoutError: the cut of N cannot be split over the ranks.
    """
    ranks = tree.size(group)
    n = weight.shape[0] // 2 if paired else weight.shape[0]
    cut = dx_leaves or contract.current().leaves(n * ranks, "tensor")
    used = weight.shape[0] if used is None else used
    leaves = contract.current().leaves(x.shape[-1], "whole")
    plan = _Plan(
        group, "columns", sequence_parallel, leaves, cut.shard(ranks), paired, used, out_dtype, batch, row_group
    )
    return _apply(x, weight, bias, plan)


def row_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: Any,
    sequence_parallel: bool = False,
    batch: int = 1,
    row_group: Any = None,
) -> Tensor:
    """y = x Wᵀ + b where each rank holds a part of K: one tree over all of K, then the bias, then the only rounding.

    Args:
        x: [S, …, K / ranks]. weight: [N, K / ranks]. bias: [N] or None, added once.
        group: ranks in the order of their parts of K; None: this process alone.
        sequence_parallel: return this rank's S / ranks rows.
        batch, row_group: as of `column_parallel_linear`.

    Raises:
        LayoutError: the cut of K cannot be split over the ranks.
    """
    ranks = tree.size(group)
    cut = contract.current().leaves(x.shape[-1] * ranks, "tensor").shard(ranks)
    n = weight.shape[0]
    dx_cut = contract.current().leaves(n, "whole")
    plan = _Plan(group, "rows", sequence_parallel, cut, dx_cut, False, n, None, batch, row_group)
    return _apply(x, weight, bias, plan)


def row_sum(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, group: Any, leaves: Leaves, scatter: bool = False
) -> Tensor:
    """The forward pass of `row_parallel_linear` with this rank's `leaves` of K."""
    if tree.size(group) == 1:
        return ops.linear(x, weight, bias, leaves=leaves)
    partial = ops.linear(x, weight, leaves=leaves, out_dtype=torch.float32)
    return tree.tree_reduce(partial, group, bias=bias, out_dtype=x.dtype, scatter=scatter)


def exchanged(parameter: Tensor) -> bool:
    """Whether this package's operators give a parameter's gradient complete on every tensor-parallel rank, so that no
    framework may sum it over them again."""
    return getattr(parameter, _EXCHANGED, False)


def mark_exchanged(parameter: Tensor, group: Any) -> None:
    """Say so, where a gradient is computed over the ranks of `group`."""
    if tree.size(group) > 1:
        setattr(parameter, _EXCHANGED, True)


def _apply(x: Tensor, weight: Tensor, bias: Tensor | None, plan: _Plan) -> Tensor:
    if needs_grad(x, weight, bias):
        y: Tensor = _ParallelLinear.apply(x, weight, bias, plan)
        return y
    return _forward(x, weight, bias, plan)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, plan: _Plan) -> Tensor:
    used = weight[: plan.used]
    if plan.split == "columns":
        whole = tree.gather_rows(x, plan.group) if plan.sequence_parallel else x
        bias = None if bias is None else bias[: plan.used]
        return ops.linear(whole, used, bias, leaves=plan.leaves, out_dtype=plan.out_dtype)
    return row_sum(x, used, bias, group=plan.group, leaves=plan.leaves, scatter=plan.sequence_parallel)


class _ParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: _Plan) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.plan = plan
        return _forward(x, weight, bias, plan)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, bias = ctx.saved_tensors
        plan: _Plan = ctx.plan
        columns = plan.split == "columns"
        dy = grads[0].to(x.dtype)  # an f32 output's gradient is an activation gradient too: rounded once
        if plan.sequence_parallel and not columns:
            dy = tree.gather_rows(dy, plan.group)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            shared = columns and tree.size(plan.group) > 1
            dx = ops.linear_dx(
                dy,
                weight[: plan.used],
                leaves=plan.dx_leaves,
                paired=plan.paired,
                out_dtype=torch.float32 if shared else x.dtype,
            )
            if shared:
                dx = tree.tree_reduce(dx, plan.group, out_dtype=x.dtype, scatter=plan.sequence_parallel)
        if ctx.needs_input_grad[1]:
            whole = tree.gather_rows(x, plan.group) if plan.sequence_parallel and columns else x
            mark_exchanged(weight, plan.group)
            dw = parameter_gradient(weight, lambda g: _add_dw(dy, whole, g[: plan.used], plan), plan.batch)
        if bias is not None and ctx.needs_input_grad[2]:
            mark_exchanged(bias, plan.group)
            row = zigzag.gather(dy, plan.row_group)

            def add(grad: Tensor) -> None:
                ops.linear_db(row, grad[: plan.used], batch=plan.batch, spans=spans())

            db = zigzag.row_gradient(bias, add, plan.batch, plan.row_group)
        return dx, dw, db, None


def _add_dw(dy: Tensor, x: Tensor, grad: Tensor, plan: _Plan) -> None:
    ranks, mine = tree.size(plan.row_group), tree.rank(plan.row_group)
    if ranks > 1:  # this rank's slice of the gradient from all of the row
        width = -(-grad.shape[0] // ranks)
        padded = torch.nn.functional.pad(dy, (0, width * ranks - grad.shape[0]))
        parts = tree.all_to_all(torch.stack(padded.chunk(ranks, dim=-1)), plan.row_group)
        grad = grad[width * mine : width * (mine + 1)]
        dy, x = zigzag.in_order(parts)[..., : grad.shape[0]].contiguous(), zigzag.gather(x, plan.row_group)
    if grad.numel():
        ops.linear_dw(dy, x, grad, batch=plan.batch)


def replicated_linear(
    x: Tensor,
    weight: Tensor,
    *,
    group: Any,
    sequence_parallel: bool = False,
    out_dtype: torch.dtype | None = None,
    batch: int = 1,
    row_group: Any = None,
) -> Tensor:
    """y = x Wᵀ with a weight that every rank holds whole (a router, a gate); its gradient is a tree over spans of each row.

    Args:
        x: [S, B, K], the same on every rank; or its own [S / ranks, B, K] with `sequence_parallel`.
        weight: [N, K].
        row_group: context-parallel ranks whose parts of each row are gathered for the weight's gradient, which the first of
            them computes.

    Raises:
        LayoutError: the spans of a row cannot be split over the ranks.
    """
    if needs_grad(x, weight):
        y: Tensor = _Replicated.apply(x, weight, group if sequence_parallel else None, out_dtype, batch, row_group)
        return y
    return ops.linear(x, weight, out_dtype=out_dtype)


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, group: Any, out_dtype: torch.dtype | None, batch: int, row_group: Any
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options = (group, batch, row_group)
        return ops.linear(x, weight, out_dtype=out_dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        group, batch, row_group = ctx.options
        dy = grads[0].to(x.dtype)
        dx = ops.linear_dx(dy, weight) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:

            def add(row: slice, grad: Tensor, spans: int, dy: Tensor, x: Tensor) -> None:
                ops.linear_dw(dy[row], x[row], grad, spans=spans)

            operands = (dy.reshape(-1, batch, dy.shape[-1]), x.reshape(-1, batch, x.shape[-1]))
            dw = span_gradient(weight, group, row_group, add, *operands)
        return dx, dw, None, None, None, None


def span_gradient(weight: Tensor, group: Any, row_group: Any, add: Callable[..., None], *operands: Tensor) -> Tensor:
    """The gradient of a weight whose chains run over spans of each row (contract section 9).

    Args:
        weight: the parameter.
        group: ranks that own whole spans of this rank's part of a row, in order; None: this process owns them.
        row_group: context-parallel ranks that hold the other parts, which are gathered; None: the part counts as a row.
        add: add(row, grad, spans, *operands) adds the root over `spans` spans of the tokens in the slice `row` to the f32
            `grad`.
        operands: [S, B, …], given to `add` as [S · B, …].
    """
    mark_exchanged(weight, group)
    batch = operands[0].shape[1]
    if row_group is not None:
        operands = tuple(zigzag.gather(tree.gather_rows(x, group), row_group) for x in operands)
        group = None
    flat = [x.flatten(0, 1) for x in operands]
    own = Leaves(1, spans()).shard(tree.size(group)).count

    def accumulate(grad: Tensor) -> None:
        roots = grad.new_zeros(batch, *grad.shape)
        for b in range(batch):
            add(slice(b, None, batch), roots[b], own, *flat)
        for root in tree.tree_reduce(roots, group):
            grad.copy_(schemas.tree_sum(torch.stack((grad, root)), None, torch.float32))

    return zigzag.row_gradient(weight, accumulate, batch, row_group)
