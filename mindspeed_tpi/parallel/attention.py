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
from mindspeed_tpi.ops._running_tree import RunningTree
from mindspeed_tpi.ops.attention import fold
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
) -> Tensor:
    """Causal attention of this rank's queries.

    Args:
        q: [S / ranks, B, Hq, D]. k, v: [S / ranks, B, Hk, D], all in zigzag order.
        group: context-parallel ranks.
        exchange: `a2a` swaps heads for tokens (Ulysses); `p2p` and `all_gather` bring every rank the keys and values of the
            whole sequence, one neighbour at a time or at once.
        window: keys visible to a query; 0: all.

    Returns:
        [S / ranks, B, Hq, D]. Result and gradients have the bits of one rank that holds the whole sequence.

    Raises:
        LayoutError: `a2a` and heads that cannot be spread over the ranks; or, in the backward pass, a sequence whose segments of
            queries cannot.
    """
    if exchange == "a2a":
        return _ulysses(q, k, v, group, scale, window)
    if needs_grad(q, k, v):
        out: Tensor = _Gathered.apply(q, k, v, (group, exchange, scale, window))
        return out
    return _attend(q, k, v, group, exchange, scale, window)[0]


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


def _attend(
    q: Tensor, k: Tensor, v: Tensor, group: Any, exchange: Exchange, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, m, l) of this rank's queries against the whole sequence."""
    rows, batch = q.shape[:2]
    keys, values = (_whole(x, group, exchange).flatten(0, 1) for x in (k, v))
    chunk, ranks = rows // 2, tree.size(group)
    places = [(i * chunk, c * chunk) for i, c in enumerate(zigzag.chunks(tree.rank(group), ranks))]
    seqs = _seqs(places, chunk, batch)
    segment = contract.current().segment_blocks
    out, m, l = schemas.attention(q.flatten(0, 1), keys, values, seqs, batch, scale, window, segment)  # noqa: E741
    return out.view(q.shape), m, l


def _seqs(places: list[tuple[int, int]], length: int, batch: int) -> Tensor:
    """For every batch column a line of `length` queries at each of `places`: (this rank's row, position)."""
    lines = [(row * batch + b, length, at, b, at + length) for b in range(batch) for row, at in places]
    return torch.tensor(lines, dtype=torch.int32)


def _own_segments(rows: int, group: Any) -> tuple[list[tuple[int, int]], int]:
    """(row here, position) of this rank's segments of queries, in the order of their tree; and their length."""
    ranks, mine = tree.size(group), tree.rank(group)
    cut = contract.current().query_segments(rows * ranks)
    own = cut.count // (2 * ranks)  # of a chunk
    if not own:
        raise LayoutError(
            f"a row of {rows * ranks} tokens has {cut.count} segments of queries, which {ranks} context-parallel ranks cannot share "
            f"in pairs with equal bits; use up to {cut.count // 2} ranks, or a larger max_cp in MINDSPEED_TPI_CONTRACT on both sides"
        )
    places = []
    for i in range(mine * own, (mine + 1) * own):
        places.append(((i - mine * own) * cut.size, i * cut.size))
        last = cut.count - 1 - i
        places.append((rows - (i + 1 - mine * own) * cut.size, last * cut.size))
    return places, cut.size


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, Exchange, float, int]) -> Tensor:
        ctx.options = options
        out, m, l = _attend(q, k, v, *options)  # noqa: E741
        ctx.save_for_backward(q, k, v, out, m, l)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """This rank's segments of queries give one f32 root of dK and dV, an aligned subtree (contract section 3), which the
        tree over ranks continues at each key's rank."""
        q, k, v, out, m, l = ctx.saved_tensors  # noqa: E741
        group, exchange, scale, window = ctx.options
        rows, batch = q.shape[:2]
        ranks, segment = tree.size(group), contract.current().segment_blocks
        seqs = _seqs(*_own_segments(rows, group), batch)
        whole = [_whole(x, group, exchange).flatten(0, 1) for x in (k, v)]
        dout, out = grads[0].reshape(q.shape).flatten(0, 1), out.flatten(0, 1)
        dq, dk, dv = schemas.attention_backward(
            dout, q.flatten(0, 1), *whole, out, m, l, seqs, batch, scale, window, segment, True
        )
        roots = [zigzag.by_rank(x.unflatten(0, (ranks * rows, batch)), ranks) for x in (dk, dv)]
        received = tree.all_to_all(torch.stack(roots, dim=1), group)  # [ranks, dK and dV, S / ranks, B, Hk, D]
        dk, dv = schemas.tree_sum(received, None, torch.float32)
        return dq.view(q.shape), _rounded(dk * scale, k.dtype), _rounded(dv, v.dtype), None


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x + 0 without subnormals, rounded: how the operator ends dK and dV."""
    whole: Tensor = schemas.tree_sum(x.unsqueeze(0), None, dtype)
    return whole + 0


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

    `seqs` holds whole sequences of one length. The tree over query heads continues over these ranks; the first of them returns the gradients of K and V, the others +0.
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
        """Query heads are summed before segments: each segment's roots of dK and dV meet at the first of the ranks."""
        q, k, v, out, m, l, seqs = ctx.saved_tensors  # noqa: E741
        stride, scale, window, segment = ctx.options
        lengths = set(seqs[:, 1].tolist())
        if len(lengths) != 1:
            raise LayoutError(f"key heads shared by ranks need sequences of one length, not {sorted(lengths)}")
        cut = contract.current().query_segments(lengths.pop())
        first = tree.rank(ctx.group) // ctx.copies * ctx.copies
        owner = tree.rank(ctx.group) == first
        dq, total = torch.empty_like(q), RunningTree()
        for i in fold(cut.count):
            part, stop = slice(i * cut.size * stride, (i + 1) * cut.size * stride), (i + 1) * cut.size * stride
            lines = seqs.clone()
            lines[:, 1], lines[:, 2], lines[:, 4] = cut.size, i * cut.size, (i + 1) * cut.size
            dq[part], *roots = schemas.attention_backward(
                grads[0][part],
                q[part],
                k[:stop],
                v[:stop],
                out[part],
                m[:, part],
                l[:, part],
                lines,
                *ctx.options,
                True,
            )
            parts = tree.gather_at_first(torch.stack(roots), ctx.group, ctx.copies)
            if owner:
                node = torch.zeros(2, *k.shape, dtype=torch.float32, device=k.device)
                node[:, :stop] = schemas.tree_sum(parts, None, torch.float32)
                total.add(node)
        if owner:
            dk, dv = total.root()
            dk, dv = _rounded(dk * scale, k.dtype), _rounded(dv, v.dtype)
        else:
            dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        return dq, dk, dv, None, None, None, None, None, None
