"""Attention over a sequence that context-parallel ranks share (contract section 3).

Whatever the exchange, a query sees the keys of its own sequence in position order, block by block: only who computes it
changes.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_tpi import contract, ops
from mindspeed_tpi.errors import LayoutError
from mindspeed_tpi.ops import schemas
from mindspeed_tpi.ops._autograd import needs_grad
from mindspeed_tpi.parallel import tree, zigzag

Exchange = Literal["p2p", "all_gather", "a2a"]


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any,
    exchange: Exchange,
    scale: float,
    window: int = 0,
    whole_rows: bool = False,
) -> Tensor:
    """Causal attention of this rank's queries.

    Args:
        q: [S / ranks, B, Hq, D]. k, v: [S / ranks, B, Hk, D], all in zigzag order.
        group: context-parallel ranks.
        exchange: `a2a` swaps heads for tokens (Ulysses); `p2p` and `all_gather` bring every rank the keys and values of the
            whole sequence, one neighbour at a time or at once.
        window: keys visible to a query; 0: all.
        whole_rows: sum the gradients of K and V as one rank would, over the whole sequence. `a2a` always does; the others then
            run the whole backward pass on every rank.

    Returns:
        [S / ranks, B, Hq, D].

    Raises:
        LayoutError: `a2a` and heads that cannot be spread over the ranks.
    """
    if exchange == "a2a":
        return _ulysses(q, k, v, group, scale, window)
    if needs_grad(q, k, v):
        out: Tensor = _Gathered.apply(q, k, v, (group, exchange, scale, window, whole_rows))
        return out
    keys, values = _whole(k, group, exchange), _whole(v, group, exchange)
    return torch.cat([_chunk(q, keys, values, i, group, scale, window)[0] for i in range(2)])


def _ulysses(q: Tensor, k: Tensor, v: Tensor, group: Any, scale: float, window: int) -> Tensor:
    ranks = tree.size(group)
    if k.shape[2] % ranks:
        raise LayoutError(
            f"cp_comm_type a2a over {ranks} ranks needs a multiple of {ranks} key heads per tensor-parallel rank, not "
            f"{k.shape[2]}; use p2p or all_gather"
        )
    q, k, v = (_SwapHeads.apply(x, group, True) for x in (q, k, v))
    length, batch, heads, dim = q.shape
    out = ops.attention(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        ops.sbhd_seqs(length, batch),
        stride=batch,
        scale=scale,
        window=window,
    )
    back: Tensor = _SwapHeads.apply(out.view(length, batch, heads, dim), group, False)
    return back


class _SwapHeads(torch.autograd.Function):
    """[S / ranks, B, H, D] in zigzag order ↔ [S, B, H / ranks, D] in position order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, to_heads: bool) -> Tensor:
        ctx.options = (group, to_heads)
        return _to_heads(x, group) if to_heads else _to_tokens(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        group, to_heads = ctx.options
        return (_to_tokens if to_heads else _to_heads)(grads[0], group), None, None


def _to_heads(x: Tensor, group: Any) -> Tensor:
    return zigzag.in_order(tree.all_to_all(torch.stack(x.chunk(tree.size(group), dim=2)), group))


def _to_tokens(x: Tensor, group: Any) -> Tensor:
    return torch.cat(list(tree.all_to_all(zigzag.by_rank(x, tree.size(group)), group)), dim=2)


def _whole(x: Tensor, group: Any, exchange: Exchange) -> Tensor:
    """[S, B, Hk, D] in position order."""
    return zigzag.in_order(_ring(x, group) if exchange == "p2p" else tree.gather(x, group))


def _ring(x: Tensor, group: Any) -> Tensor:
    """Every rank's x, passed on from neighbour to neighbour."""
    ranks, mine = tree.size(group), tree.rank(group)
    parts = x.new_empty(ranks, *x.shape)
    parts[mine] = x
    following, previous = (dist.get_global_rank(group, (mine + step) % ranks) for step in (1, -1))
    for step in range(ranks - 1):
        sending = dist.P2POp(dist.isend, parts[(mine - step) % ranks], following, group)
        receiving = dist.P2POp(dist.irecv, parts[(mine - step - 1) % ranks], previous, group)
        for work in dist.batch_isend_irecv([sending, receiving]):
            work.wait()
    return parts


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, index: int, group: Any, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, m, l) of this rank's first or second chunk of queries against the whole sequence."""
    rows, batch, heads, dim = q.shape
    chunk = rows // 2
    part = q[index * chunk : (index + 1) * chunk].flatten(0, 1)
    seqs = _seqs(chunk, batch, index, group)
    segment = contract.current().segment_blocks
    out, m, l = schemas.attention(part, k.flatten(0, 1), v.flatten(0, 1), seqs, batch, scale, window, segment)  # noqa: E741
    return out.view(chunk, batch, heads, dim), m, l


def _seqs(chunk: int, batch: int, index: int, group: Any) -> Tensor:
    position = chunk * zigzag.chunks(tree.rank(group), tree.size(group))[index]
    first = torch.arange(batch, dtype=torch.int32)
    columns = (first, torch.full_like(first, chunk), torch.full_like(first, position), first)
    return torch.stack((*columns, torch.full_like(first, position + chunk)), dim=1)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, Exchange, float, int, bool]) -> Tensor:
        group, exchange, scale, window, _ = ctx.options = options
        keys, values = _whole(k, group, exchange), _whole(v, group, exchange)
        halves = [_chunk(q, keys, values, i, group, scale, window) for i in range(2)]
        ctx.save_for_backward(q, k, v, *(t for half in halves for t in half))
        return torch.cat([half[0] for half in halves])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Every chunk of queries gives f32 roots of dK and dV; a tree adds the chunks in position order, at the key's rank."""
        q, k, v, *saved = ctx.saved_tensors
        group, exchange, scale, window, whole_rows = ctx.options
        ranks, segment = tree.size(group), contract.current().segment_blocks
        rows, batch, heads, dim = q.shape
        chunk = rows // 2
        whole = [_whole(x, group, exchange).flatten(0, 1) for x in (k, v)]
        if whole_rows:
            return *_whole_backward(grads[0], q, whole, saved, group, scale, window), None
        dq, roots = [], []
        for index in range(2):
            part = slice(index * chunk, (index + 1) * chunk)
            out, m, l = saved[3 * index : 3 * index + 3]  # noqa: E741
            dout = grads[0][part].reshape(chunk * batch, heads, dim)
            seqs = _seqs(chunk, batch, index, group)
            got = schemas.attention_backward(
                dout,
                q[part].flatten(0, 1),
                *whole,
                out.flatten(0, 1),
                m,
                l,
                seqs,
                batch,
                scale,
                window,
                segment,
                True,
            )
            dq.append(got[0].view(chunk, batch, heads, dim))
            roots.append(torch.stack(got[1:]).unflatten(1, (ranks * rows, batch)))  # [dK and dV, S, B, Hk, D]
        dkv = _exchange_roots(torch.stack(roots), group)
        return torch.cat(dq), _rounded(dkv[0] * scale, k.dtype), _rounded(dkv[1], v.dtype), None


def _whole_backward(
    dout: Tensor, q: Tensor, key_values: list[Tensor], saved: list[Tensor], group: Any, scale: float, window: int
) -> tuple[Tensor, ...]:
    """This rank's part of (dq, dk, dv) of the whole sequence; saved: (out, m, l) of both chunks."""
    rows, batch = q.shape[:2]
    length, segment = rows * tree.size(group), contract.current().segment_blocks
    sums = (torch.cat(saved[i::3], dim=1).t().unflatten(0, (rows, batch)) for i in (1, 2))
    dout, q, out, m, l = (zigzag.gather(x, group).flatten(0, 1) for x in (dout, q, torch.cat(saved[::3]), *sums))  # noqa: E741
    m, l = m.t().contiguous(), l.t().contiguous()  # noqa: E741
    seqs = ops.sbhd_seqs(length, batch)
    got = schemas.attention_backward(dout, q, *key_values, out, m, l, seqs, batch, scale, window, segment, False)
    return tuple(zigzag.own(x.unflatten(0, (length, batch)), group) for x in got)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x + 0 without subnormals, rounded: how the operator ends dK and dV."""
    whole: Tensor = schemas.tree_sum(x.unsqueeze(0), None, dtype)
    return whole + 0


def _exchange_roots(roots: Tensor, group: Any) -> Tensor:
    """Roots [2 chunks of queries, 2, S, …] of this rank → the sums over all chunks for its keys, [2, S / ranks, …]."""
    ranks = tree.size(group)
    # [2, 2, ranks, S / ranks, …]
    sent = torch.stack([torch.stack([zigzag.by_rank(x, ranks) for x in half]) for half in roots])
    sent = sent.permute(2, 0, 1, *range(3, sent.dim()))
    received = zigzag.chunks_in_order(tree.all_to_all(sent, group))
    total: Tensor = schemas.tree_sum(torch.stack(received), None, torch.float32)
    return total


def split_key_values(mixed: Tensor, group: Any, groups: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V of a rank when tensor-parallel ranks outnumber the KV heads, so that ranks / groups neighbours share one.

    Args:
        mixed: [S, B, columns / ranks] of the merged projection, whose columns are [q … | k | v] per KV head.
        group: tensor-parallel ranks. groups: KV heads. dim: head size.

    Returns:
        [S, B, heads / ranks, D], and twice [S, B, 1, D]. The gradients of K and V are read from the first of the ranks that
        share them, whose `shared_key_attention` returns the sum.
    """
    q, k, v = _SplitKeyValues.apply(mixed, group, groups, dim)
    return q, k, v


class _SplitKeyValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mixed: Tensor, group: Any, groups: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.group, ctx.copies = group, tree.size(group) // groups
        whole = torch.cat(list(tree.gather(mixed, group)), dim=-1).unflatten(-1, (groups, -1, dim))
        ctx.shape = whole.shape
        q, k, v = _places(whole, group, ctx.copies)
        return q.contiguous(), k.contiguous(), v.contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        whole = grads[0].new_zeros(ctx.shape)
        q, k, v = _places(whole, ctx.group, ctx.copies)
        q.copy_(grads[0])
        if tree.rank(ctx.group) % ctx.copies == 0:
            k.copy_(grads[1])
            v.copy_(grads[2])
        whole = tree.owned_sum(whole.flatten(2), ctx.group)
        return whole.chunk(tree.size(ctx.group), dim=-1)[tree.rank(ctx.group)].contiguous(), None, None, None


def _places(whole: Tensor, group: Any, copies: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of this rank's Q, K and V in [S, B, groups, heads per group + 2, D]."""
    mine = tree.rank(group)
    of_group = whole[:, :, mine // copies]
    heads = (whole.shape[3] - 2) // copies
    first = mine % copies * heads
    return of_group[:, :, first : first + heads], of_group[:, :, -2:-1], of_group[:, :, -1:]


def shared_key_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seqs: Tensor,
    *,
    group: Any,
    copies: int,
    stride: int,
    scale: float,
    window: int = 0,
) -> Tensor:
    """`ops.attention` where `copies` neighbouring ranks of `group` hold the same keys and values, each its query heads.

    The tree over query heads continues over these ranks; the first of them returns the gradients of K and V, the others +0.
    """
    if not needs_grad(q, k, v):
        return ops.attention(q, k, v, seqs, stride=stride, scale=scale, window=window)
    out: Tensor = _SharedKeys.apply(q, k, v, seqs, group, copies, stride, scale, window)
    return out


class _SharedKeys(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seqs: Tensor,
        group: Any,
        copies: int,
        stride: int,
        scale: float,
        window: int,
    ) -> Tensor:
        segment = contract.current().segment_blocks
        out, m, l = schemas.attention(q, k, v, seqs, stride, scale, window, segment)  # noqa: E741
        ctx.save_for_backward(q, k, v, out, m, l, seqs)
        ctx.options = (stride, scale, window, segment)
        ctx.group, ctx.copies = group, copies
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, m, l, seqs = ctx.saved_tensors  # noqa: E741
        dq, dk, dv = schemas.attention_backward(grads[0], q, k, v, out, m, l, seqs, *ctx.options, True)
        first = tree.rank(ctx.group) // ctx.copies * ctx.copies
        roots = tree.gather(torch.stack((dk, dv)), ctx.group)[first : first + ctx.copies]
        dk, dv = schemas.tree_sum(roots, None, torch.float32)
        if tree.rank(ctx.group) == first:
            dk, dv = _rounded(dk * ctx.options[1], k.dtype), _rounded(dv, v.dtype)
        else:
            dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        return dq, dk, dv, None, None, None, None, None, None
