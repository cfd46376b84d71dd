"""The only place where partial sums cross ranks: the reduction tree of one rank, continued over ranks (contract sections 1
and 9).

Libraries move bytes here and never add numbers, so that neither the backend (gloo, HCCL) nor its algorithm decides bits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_tpi.errors import LayoutError
from mindspeed_tpi.ops import schemas

GATHER_ROWS = 32  # up to here one all_gather is faster than two collectives
PIECE = 1 << 21  # elements of a gradient buffer summed at once: what is held beside the buffer does not grow with it
WIDTH = 1024  # of the rows a piece is seen as


def size(group: Any) -> int:
    """Ranks of a process group; None is this process alone."""
    return 1 if group is None else dist.get_world_size(group)


def rank(group: Any) -> int:
    """This process's rank in a group; None is this process alone."""
    return 0 if group is None else dist.get_rank(group)


def tree_reduce(
    partial: Tensor,
    group: Any,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    scatter: bool = False,
) -> Tensor:
    """The sum over ranks of subtree roots, by the tree over ranks in rank order; then + bias in f32, then rounded.

    Args:
        partial: f32 [S, …, N], this rank's root of the aligned part of the reduction that it owns.
        group: a process group whose size is a power of two; None: this process alone.
        bias: [N] or None.
        scatter: keep only this rank's S / ranks rows (sequence parallelism).

    Returns:
        `out_dtype` [S, …, N], or [S / ranks, …, N] with `scatter`; the same bits on every rank.

    Raises:
        LayoutError: a group whose size is no power of two, or rows that cannot be scattered evenly.
    """
    ranks = size(group)
    if ranks & (ranks - 1):
        raise LayoutError(f"a reduction over {ranks} ranks is not a balanced tree; use a power of two")
    if ranks == 1:
        return _sum(partial.unsqueeze(0), bias, out_dtype)
    if not partial.numel():
        rows_kept = partial.shape[0] // ranks if scatter else partial.shape[0]
        return partial.new_empty(rows_kept, *partial.shape[1:], dtype=out_dtype)
    partial = partial.contiguous()
    if scatter:
        if partial.shape[0] % ranks:
            raise LayoutError(f"{partial.shape[0]} rows cannot be scattered over {ranks} ranks; pad them to a multiple")
        return _sum(all_to_all(partial.unflatten(0, (ranks, -1)), group), bias, out_dtype)
    rows = partial.reshape(-1, partial.shape[-1])
    if rows.shape[0] <= GATHER_ROWS:
        return _sum(gather(rows, group), bias, out_dtype).view(partial.shape)
    padding = -rows.shape[0] % ranks
    padded = torch.nn.functional.pad(rows, (0, 0, 0, padding)) if padding else rows
    mine = _sum(all_to_all(padded.unflatten(0, (ranks, -1)), group), bias, out_dtype)
    whole = gather(mine, group).flatten(0, 1)
    return whole[: rows.shape[0]].view(partial.shape)


def sum_in_place(data: Tensor, group: Any, *, scatter: bool = False) -> None:
    """Replace a flat f32 gradient buffer by its sum over ranks, element by element by the tree in rank order.

    Args:
        data: f32 [N], contiguous.
        scatter: only this rank's N / ranks elements need the sum; the others keep their own values.
    """
    ranks = size(group)
    if ranks == 1:
        return
    if scatter:
        parts = data.view(ranks, -1)
        mine = parts[rank(group)]
        for first in range(0, mine.numel(), PIECE):
            cut = slice(first, first + PIECE)
            mine[cut] = tree_reduce(parts[:, cut], group, scatter=True)[0]
        return
    for piece in data.split(PIECE):
        body = piece.numel() // WIDTH * WIDTH
        for rows in (piece[:body].view(-1, WIDTH), piece[body:].unsqueeze(0)):
            rows.copy_(tree_reduce(rows, group))


def _sum(parts: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    total: Tensor = schemas.tree_sum(parts, bias, out_dtype)
    return total


def all_to_all(parts: Tensor, group: Any) -> Tensor:
    """What every rank has for this one: parts [ranks, …], the r-th for rank r → [ranks, …], the r-th from rank r."""
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=group)
    return received


def gather(x: Tensor, group: Any) -> Tensor:
    """Every rank's x, [ranks, *x.shape], in rank order."""
    ranks = size(group)
    if ranks == 1:
        return x.unsqueeze(0)
    whole = x.new_empty(ranks, *x.shape)
    dist.all_gather(list(whole.unbind()), x.contiguous(), group=group)
    return whole


def gather_at_first(x: Tensor, group: Any, copies: int) -> Tensor:
    """x of each of `copies` neighbouring ranks, at the first of them: [copies, *x.shape] there, [0, *x.shape] elsewhere."""
    first = rank(group) // copies * copies
    sent = [int(r == first) for r in range(size(group))]
    taken = [int(rank(group) == first and first <= r < first + copies) for r in range(size(group))]
    received = x.new_empty(sum(taken), *x.shape)
    dist.all_to_all_single(received, x.unsqueeze(0).contiguous(), taken, sent, group=group)
    return received


def gather_rows(x: Tensor, group: Any) -> Tensor:
    """The rows [S, …] of a sequence of which every rank holds S / ranks."""
    return x if size(group) == 1 else gather(x, group).flatten(0, 1)


def own_rows(x: Tensor, group: Any) -> Tensor:
    """This rank's S / ranks rows of [S, …]."""
    return x.chunk(size(group))[rank(group)]


def owned_sum(x: Tensor, group: Any) -> Tensor:
    """The sum over ranks of tensors of which, element by element, all but one rank hold +0: the owner's bits, −0 included.

    Storage is added as integers, where any order is exact.

    Args:
        x: any floating dtype, a multiple of 4 bytes in its last dimension.
    """
    if size(group) == 1:
        return x
    whole = x.contiguous().clone()
    dist.all_reduce(whole.view(torch.int32), group=group)
    return whole
