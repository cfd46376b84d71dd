"""The order in which context-parallel ranks hold a sequence (Megatron-core's zigzag): of 2 · ranks chunks, rank r has chunks r
and 2 · ranks − 1 − r, so that causal attention costs every rank the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi.errors import LayoutError
from mindspeed_tpi.ops._autograd import parameter_gradient
from mindspeed_tpi.parallel import tree


def chunks(rank: int, ranks: int) -> tuple[int, int]:
    """Which of the 2 · ranks chunks a rank holds, in its order."""
    return rank, 2 * ranks - 1 - rank


def positions(length: int, group: Any) -> Tensor:
    """Absolute positions int64 [length] of this rank's tokens, of sequences of length · ranks tokens.

    Raises:
        LayoutError: tokens that are not two chunks.
    """
    ranks, mine = tree.size(group), tree.rank(group)
    if ranks == 1:
        return torch.arange(length)
    if length % 2:
        raise LayoutError(
            f"{length} tokens per context-parallel rank are not two chunks; pad to a multiple of {2 * ranks}"
        )
    chunk = length // 2
    return torch.cat([torch.arange(c * chunk, (c + 1) * chunk) for c in chunks(mine, ranks)])


def gather(x: Tensor, group: Any) -> Tensor:
    """[S, …] in position order from every rank's [S / ranks, …]."""
    return x if tree.size(group) == 1 else in_order(tree.gather(x, group))


def own(x: Tensor, group: Any) -> Tensor:
    """This rank's [S / ranks, …] of [S, …] in position order."""
    ranks = tree.size(group)
    return x if ranks == 1 else by_rank(x, ranks)[tree.rank(group)]


def in_order(parts: Tensor) -> Tensor:
    """[ranks, S / ranks, …] → [S, …] in position order."""
    ranks, pairs = parts.shape[0], parts.unflatten(1, (2, -1))
    return torch.cat([pairs[c, 0] if c < ranks else pairs[2 * ranks - 1 - c, 1] for c in range(2 * ranks)])


def by_rank(x: Tensor, ranks: int) -> Tensor:
    """The inverse of `in_order`."""
    parts = x.chunk(2 * ranks)
    return torch.stack([torch.cat([parts[c] for c in chunks(r, ranks)]) for r in range(ranks)])


def row_gradient(parameter: Tensor, add: Callable[[Tensor], None], rows: int, group: Any) -> Tensor:
    """`parameter_gradient` from whole rows, which all ranks of `group` have gathered: the first adds them, the others nothing."""
    return parameter_gradient(parameter, add if tree.rank(group) == 0 else _nothing, rows)


def _nothing(grad: Tensor) -> None: ...
