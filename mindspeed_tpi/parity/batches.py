"""A rollout's sequences as the micro-batches of one data-parallel rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mindspeed_tpi import contract
from mindspeed_tpi.ops import gradient_groups
from mindspeed_tpi.parallel.layout import Layout

TOKENS = 8192  # padded tokens of one micro-batch of a recompute
LOGITS = 1 << 29  # f32 logits of one micro-batch: 2 GiB


@dataclass(frozen=True)
class Batch:
    """Sequences of a rollout, right-padded; padding follows every real token, so causal attention never sees it.

    Attributes:
        rows: indices of the sequences. lengths: their lengths.
        tokens, labels: int64 [b, s]; label t is token t + 1, and 0 where there is none. Lines beyond `rows` are padding.
    """

    rows: list[int]
    lengths: list[int]
    tokens: Tensor
    labels: Tensor

    @classmethod
    def of(cls, sequences: Sequence[Tensor], rows: list[int], length: int, lines: int | None = None) -> Batch:
        tokens = torch.zeros(len(rows) if lines is None else lines, length, dtype=torch.int64)
        for line, row in zip(tokens, rows, strict=False):
            line[: len(sequences[row])] = sequences[row]
        labels = torch.zeros_like(tokens)
        labels[:, :-1] = tokens[:, 1:]
        return cls(rows, [len(sequences[row]) for row in rows], tokens, labels)

    def padded(self, lines: int, length: int) -> Batch:
        """The same sequences in [lines, length]."""
        more = (0, length - self.tokens.shape[1], 0, lines - self.tokens.shape[0])
        tokens, labels = (torch.nn.functional.pad(x, more) for x in (self.tokens, self.labels))
        return replace(self, tokens=tokens, labels=labels)


def row_length(layout: Layout, longest: int) -> int:
    """Padded length of rows of up to `longest` tokens; under gradient groups one that every layout can split, since it
    decides spans."""
    multiple = 2 * contract.current().max_tp ** 2 if gradient_groups.count() else layout.row_multiple
    return -(-longest // multiple) * multiple


def longest_first(
    sequences: Sequence[Tensor], rows: list[int], layout: Layout, rank: int, vocab: int, micro_batch: int | None
) -> Iterator[Batch]:
    """Micro-batches of sequences of like length, longest first; as many and as large on every data-parallel rank.

    Args:
        rows: the sequences that all ranks share. rank: this data-parallel rank.
        micro_batch: sequences at a time; None: as many as fit `TOKENS` and, for a vocabulary of `vocab`, `LOGITS`.
    """
    budget = min(TOKENS, LOGITS // vocab)
    rows = sorted(rows, key=lambda row: -len(sequences[row]))
    while rows:
        length = row_length(layout, len(sequences[rows[0]]))
        count = layout.dp * (micro_batch or max(1, budget // length))
        step, rows = rows[:count], rows[count:]
        lines = -(-len(step) // layout.dp)
        yield Batch.of(sequences, step[rank * lines : (rank + 1) * lines], length, lines)


def in_order(sequences: Sequence[Tensor], ranks: int, rank: int, length: int, micro_batch: int) -> Iterator[Batch]:
    """The rank-th contiguous run of rows, all of one length, in micro-batches; as many lines on every data-parallel rank."""
    lines = -(-len(sequences) // ranks)
    start = rank * lines
    rows = range(start, min(start + lines, len(sequences)))
    for first in range(0, lines, micro_batch):
        last = min(first + micro_batch, lines)
        yield Batch.of(sequences, list(rows[first:last]), length, last - first)
