"""Log-probabilities over a vocabulary of which every rank owns whole leaves, alone and fused with the output projection
(contract section 6)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi import contract, ops
from mindspeed_tpi.contract import Leaves
from mindspeed_tpi.errors import LayoutError
from mindspeed_tpi.ops import schemas
from mindspeed_tpi.ops._autograd import needs_grad, parameter_gradient
from mindspeed_tpi.ops.logprob import logits_gradient, per_row
from mindspeed_tpi.parallel import tree, zigzag

CHUNK_ELEMENTS = 1 << 24  # logits held at once by the fused form: 64 MiB of f32
CHUNK_STEP = (
    16  # tokens of a chunk are a multiple: a row's weight gradient goes on from chunk to chunk (docs/op-schemas.md)
)


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
    columns = tree.gather(torch.tensor([logits.shape[1]], device=logits.device), group).flatten().tolist()
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
    return *_over_ranks(logits, tokens, temperature, group, entropy, mine, start), start


def _over_ranks(
    logits: Tensor, tokens: Tensor, temperature: Tensor | None, group: Any, entropy: bool, mine: Leaves, start: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logprob, entropy, max, sum) from this rank's columns, `mine` of the vocabulary's leaves, the first of them `start`."""
    if tree.size(group) == 1:
        return schemas.token_logprob(logits, tokens, temperature, mine.size, mine.count, entropy)  # type: ignore[no-any-return]
    largest = tree.gather(schemas.vocab_max(logits, temperature), group).amax(0)
    sums, products = schemas.vocab_sums(logits, largest, temperature, mine.size, mine.count, entropy)
    parts = tree.gather(torch.stack((sums, products)) if entropy else sums.unsqueeze(0), group)
    roots = schemas.tree_sum(parts, None, torch.float32)
    total, product = roots[0], roots[1] if entropy else products
    logprob, ent = schemas.vocab_logprob(logits, tokens, largest, total, product, temperature, start)
    return tree.owned_sum(logprob, group), ent, largest, total


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


@dataclass(frozen=True)
class _Head:
    """Everything about a fused head that is not a tensor.

    Attributes:
        group: ranks in the order of their rows of the weight. sequence_parallel, entropy, batch, row_group: as of `linear_logprob`.
        used, start: existing rows of this rank's weight, and the id of the first.
        leaves, dx_leaves: this rank's cut of the vocabulary's sums, and of N in dX.
        step: tokens of a chunk.
    """

    group: Any
    sequence_parallel: bool
    entropy: bool
    batch: int
    row_group: Any
    used: int
    start: int
    leaves: Leaves
    dx_leaves: Leaves
    step: int


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    temperature: Tensor | None = None,
    entropy: bool = False,
    group: Any = None,
    sequence_parallel: bool = False,
    vocab: int | None = None,
    batch: int = 1,
    row_group: Any = None,
    chunk: int | None = None,
) -> Any:
    """`token_logprob` of the output projection's f32 logits, which never exist as [tokens, vocabulary]: the same bits, and those
    of its gradients.

    The gradient of the weight goes on from chunk to chunk of a row's tokens in one further f32 copy of the weight; the logits of
    a chunk are made again for it.

    Args:
        hidden: [T, H], tokens laid out [S, batch], the same on every rank; or its own S / ranks rows with `sequence_parallel`.
        weight: [rows of this rank, H], the output projection.
        tokens: int64 [T], the same on every rank. temperature: f32 [T], [1] or None.
        entropy: also return the entropy of each token's distribution.
        group: ranks in the order of their rows of the weight; None: this process alone.
        vocab: existing rows of the whole weight; the others are padding (default: all exist).
        batch: rows of the weight gradient (contract section 9).
        row_group: context-parallel ranks that hold the rest of each row, in zigzag order: each computes a slice of the weight's
            gradient. None: a row is what is here.
        chunk: tokens whose logits are held at once (default: as many as fit `CHUNK_ELEMENTS`), rounded up to `CHUNK_STEP`.

    Returns:
        f32 [T], or (logprob, entropy), the same bits on every rank.

    Raises:
        LayoutError: shards of the weight that cut the vocabulary's leaves.
    """
    ranks, mine, rows = tree.size(group), tree.rank(group), weight.shape[0]
    vocab = rows * ranks if vocab is None else vocab
    cut = contract.current().vocab_leaves(vocab)
    if ranks > 1 and cut.size * cut.count != rows * ranks:
        raise LayoutError(
            f"an output projection of {rows * ranks} rows for {vocab} tokens over {ranks} ranks cuts the vocabulary's leaves of "
            f"{cut.size}; pad it to {cut.size * cut.count} rows"
        )
    used = max(0, min(vocab - rows * mine, rows))
    dx_leaves = contract.current().head_leaves(vocab).shard(ranks)
    step = -(-(chunk or max(CHUNK_ELEMENTS // rows, 1)) // CHUNK_STEP) * CHUNK_STEP
    head = _Head(
        group, sequence_parallel, entropy, batch, row_group, used, rows * mine, cut.shard(ranks), dx_leaves, step
    )
    temperature = per_row(temperature, tokens.numel())
    if needs_grad(hidden, weight):
        logprob, ent = _LinearLogprob.apply(hidden, weight, tokens, temperature, head)
    else:
        logprob, ent, *_ = _chunked(_whole(hidden, head), weight, tokens, temperature, head)
    return (logprob, ent) if entropy else logprob


def _whole(hidden: Tensor, head: _Head) -> Tensor:
    return tree.gather_rows(hidden, head.group) if head.sequence_parallel else hidden


def _chunks(tokens: int, batch: int, step: int) -> Iterator[Iterator[slice]]:
    """For each row of [S, batch], its tokens in chunks."""
    for row in range(batch):
        yield (slice(i, min(i + step * batch, tokens), batch) for i in range(row, max(tokens, 1), step * batch))


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    return ops.linear(hidden, weight, out_dtype=torch.float32)


def _chunked(hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: Tensor | None, head: _Head) -> list[Tensor]:
    """(logprob, entropy, max, sum), each f32 [T] (entropy: [0] if not wanted)."""
    results = [hidden.new_empty(tokens.numel(), dtype=torch.float32) for _ in range(4)]
    for row in _chunks(tokens.numel(), head.batch, head.step):
        for part in row:
            logits = _logits(hidden[part], weight[: head.used])
            scale = None if temperature is None else temperature[part].contiguous()
            found = _over_ranks(logits, tokens[part], scale, head.group, head.entropy, head.leaves, head.start)
            for result, value in zip(results, found, strict=True):
                if value.numel():
                    result[part] = value
    if not head.entropy:
        results[1] = results[1][:0]
    return results


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: Tensor | None, head: _Head
    ) -> tuple[Tensor, Tensor]:
        logprob, ent, largest, total = _chunked(_whole(hidden, head), weight, tokens, temperature, head)
        ctx.save_for_backward(hidden, weight, tokens, temperature, ent, largest, total)
        ctx.head = head
        return logprob, ent

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden, weight, *saved = ctx.saved_tensors
        head: _Head = ctx.head
        whole = _whole(hidden, head)
        vectors = [*saved, grads[0], grads[1] if head.entropy else None]
        shared = tree.size(head.group) > 1
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(whole, dtype=torch.float32 if shared else whole.dtype)
        dweight = None
        if ctx.needs_input_grad[1]:

            def add(grad: Tensor) -> None:
                if tree.size(head.row_group) == 1:
                    _backward(head, whole, weight, vectors, dx, grad, slice(0, head.used))
                    return
                hidden_rows, *others = (x if x is None or not x.numel() else _row(x, head) for x in (whole, *vectors))
                width = -(-head.used // tree.size(head.row_group))
                first = min(width * tree.rank(head.row_group), head.used)
                own = slice(first, min(first + width, head.used))
                _backward(head, hidden_rows, weight, others, None, grad, own)

            dweight = parameter_gradient(weight, add, head.batch)
        if dx is not None and (dweight is None or tree.size(head.row_group) > 1):
            _backward(head, whole, weight, vectors, dx, None, slice(0, head.used))
        if dx is not None and shared:
            columns = dx.unflatten(0, (-1, head.batch))  # scattered by positions
            dx = tree.tree_reduce(columns, head.group, out_dtype=hidden.dtype, scatter=head.sequence_parallel).flatten(
                0, 1
            )
        return dx, dweight, None, None, None


def _row(x: Tensor, head: _Head) -> Tensor:
    """All of each row from the context-parallel ranks' parts [T, …]."""
    return zigzag.gather(x.unflatten(0, (-1, head.batch)), head.row_group).flatten(0, 1)


def _backward(
    head: _Head, hidden: Tensor, weight: Tensor, vectors: list[Any], dx: Tensor | None, grad: Tensor | None, rows: slice
) -> None:
    """Chunk by chunk of tokens: writes dX, or this rank's roots of it, to `dx`, and adds the gradient of `rows` of the weight
    to the f32 `grad`.

    Args:
        vectors: tokens, temperature, entropy, maximum, sum, and the gradients of logprob and entropy, one value a token.
    """
    part_of_weight = weight[rows]
    for row in _chunks(len(hidden), head.batch, head.step):
        carry = None if grad is None else torch.zeros_like(part_of_weight, dtype=torch.float32)
        for part in row:
            tokens, scale, ent, largest, total, g, g_entropy = (
                x if x is None or not x.numel() else x[part].contiguous() for x in vectors
            )
            h = hidden[part]
            dlogits = schemas.vocab_logprob_backward(
                _logits(h, part_of_weight),
                tokens,
                largest,
                total,
                ent,
                g,
                g_entropy,
                scale,
                head.start + rows.start,
                h.dtype,
            )
            if dx is not None:
                dx[part] = ops.linear_dx(dlogits, part_of_weight, leaves=head.dx_leaves, out_dtype=dx.dtype)
            if carry is not None:
                ops.linear_dw(dlogits, h, carry, carry=True)
        if grad is not None and carry is not None:
            for target, value in zip(grad[rows].split(1024), carry.split(1024), strict=True):
                target.copy_(schemas.residual_add(target, value))
