"""Log-probabilities over a vocabulary of which every rank owns whole leaves (contract section 6)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi import contract, ops
from mindspeed_tpi.contract import Leaves
from mindspeed_tpi.errors import LayoutError
from mindspeed_tpi.ops import schemas
from mindspeed_tpi.ops._autograd import needs_grad
from mindspeed_tpi.ops.logprob import logits_gradient, per_row
from mindspeed_tpi.parallel import tree


def token_logprob(
    logits: Tensor, tokens: Tensor, temperature: Tensor | None = None, *, group: Any, entropy: bool = False
) -> Any:
    """`ops.token_logprob` where rank r of `group` holds the columns that follow rank r − 1's.

    Args:
        logits: f32 [T, columns of this rank], existing columns only. tokens: int64 [T], the same on every rank.
        temperature: f32 [T], [1] or None.
        group: ranks in the order of their columns; None: this process alone.

    Returns:
        f32 [T], or (logprob, entropy), the same bits on every rank.
    """
    if tree.size(group) == 1:
        return ops.token_logprob(logits, tokens, temperature, entropy=entropy)
    temperature = per_row(temperature, tokens.numel())
    if needs_grad(logits):
        logprob, ent = _VocabParallel.apply(logits, tokens, temperature, group, entropy)
    else:
        logprob, ent, *_ = _forward(logits, tokens, temperature, group, entropy)
    return (logprob, ent) if entropy else logprob


def _forward(
    logits: Tensor, tokens: Tensor, temperature: Tensor | None, group: Any, entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """(logprob, entropy, max, sum, first column of this rank)."""
    columns = tree.gather(torch.tensor([logits.shape[1]]), group).flatten().tolist()
    start = sum(columns[: tree.rank(group)])
    cut: Leaves = contract.current().vocab_leaves(sum(columns))
    mine = cut.shard(tree.size(group))
    expected = [
        max(0, min(sum(columns) - r * mine.size * mine.count, mine.size * mine.count)) for r in range(len(columns))
    ]
    if columns != expected:
        raise LayoutError(
            f"vocabulary shards of {columns} columns cut leaves of {cut.size}; the contract's shards are {expected}: pad "
            f"the vocabulary to {cut.size * cut.count} rows"
        )
    largest = tree.gather(schemas.vocab_max(logits, temperature), group).amax(0)
    sums, products = schemas.vocab_sums(logits, largest, temperature, mine.size, mine.count, entropy)
    parts = tree.gather(torch.stack((sums, products)) if entropy else sums.unsqueeze(0), group)
    roots = schemas.tree_sum(parts, None, torch.float32)
    total, product = roots[0], roots[1] if entropy else products
    logprob, ent = schemas.vocab_logprob(logits, tokens, largest, total, product, temperature, start)
    return tree.owned_sum(logprob, group), ent, largest, total, start


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, tokens: Tensor, temperature: Tensor | None, group: Any, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        logprob, ent, largest, total, start = _forward(logits, tokens, temperature, group, entropy)
        ctx.save_for_backward(logits, tokens, temperature, ent, largest, total)
        ctx.start = start
        return logprob, ent

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return logits_gradient(ctx.saved_tensors, grads, ctx.start), None, None, None, None
