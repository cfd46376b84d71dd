"""Token embedding whose rows are spread over ranks (contract section 4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi import ops
from mindspeed_tpi.ops import schemas
from mindspeed_tpi.ops._autograd import needs_grad
from mindspeed_tpi.parallel import tree, zigzag


def vocab_parallel_embedding(
    weight: Tensor,
    ids: Tensor,
    *,
    group: Any,
    vocab_start: int,
    vocab_size: int,
    sequence_parallel: bool = False,
    row_group: Any = None,
) -> Tensor:
    """Rows of a table of which each rank holds `weight` [rows, H], from id `vocab_start` on.

    Args:
        ids: int64 [B, S], the same on every rank. vocab_size: ids must lie below it.
        sequence_parallel: return this rank's rows of [S, B, H].
        row_group: context-parallel ranks whose parts of each row are gathered for the table's gradient, which the first of
            them computes.

    Returns:
        [B, S, H], the owner's bits on every rank; or [S / ranks, B, H].
    """
    if not needs_grad(weight):
        return _forward(weight, ids, group, vocab_start, vocab_size, sequence_parallel)
    options = (group, vocab_start, vocab_size, sequence_parallel, row_group)
    y: Tensor = _VocabParallelEmbedding.apply(weight, ids, options)
    return y


def _forward(
    weight: Tensor, ids: Tensor, group: Any, vocab_start: int, vocab_size: int, sequence_parallel: bool
) -> Tensor:
    found = tree.owned_sum(ops.embedding(weight.detach(), ids, vocab_start=vocab_start, vocab_size=vocab_size), group)
    return tree.own_rows(found.transpose(0, 1), group).contiguous() if sequence_parallel else found


class _VocabParallelEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, options: tuple[Any, int, int, bool, Any]) -> Tensor:
        ctx.save_for_backward(weight, ids)
        ctx.options = options
        return _forward(weight, ids, *options[:4])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        weight, ids = ctx.saved_tensors
        group, vocab_start, _, sequence_parallel, row_group = ctx.options
        dy = tree.gather_rows(grads[0], group) if sequence_parallel else grads[0].transpose(0, 1)
        rows = zigzag.gather(dy, row_group).transpose(0, 1).flatten(0, 1)
        row_ids = zigzag.gather(ids.t(), row_group).t().reshape(-1)

        def add(grad: Tensor) -> None:
            schemas.embedding_dw(rows, row_ids, grad, vocab_start, 1, None)

        return zigzag.row_gradient(weight, add, ids.shape[0], row_group), None, None
