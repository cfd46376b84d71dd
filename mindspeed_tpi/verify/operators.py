"""What every operator must hold, whatever the backend: for each one a generator of findings.

`run to run`: the same call twice. `batch`: any part of the rows, any order. `tensor parallel`: shards continued by `tree_sum`, or laid
side by side. `micro-batch`: gradients added row by row. `chunk`, `paging`, `decode`: attention over the same sequence in other pieces.
`accuracy`: the distance from float64. `reference`: the reference backend's bits, at small sizes (made by `Bench.run`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from mindspeed_tpi import contract
from mindspeed_tpi.contract import Leaves, Role
from mindspeed_tpi.verify.probe import TP, UNIT, Bench, Finding, by_rows, equal, leaves, near

F32 = torch.float32
EXP = 4.0  # roundings granted to exp and log
Probe = Callable[[Bench], Iterator[Finding]]


def _products(b: Bench) -> list[tuple[str, int, int, Role, Role]]:
    """(name, N, K, who may cut K in the forward product, who may cut N in dX)"""
    s = b.sizes
    heads = (s.heads + 2 * s.kv_heads) * s.head_dim
    return [
        ("qkv", heads, s.hidden, "whole", "tensor"),
        ("o_proj", s.hidden, s.heads * s.head_dim, "tensor", "whole"),
        ("gate_up", 2 * s.ffn, s.hidden, "whole", "tensor"),
        ("down", s.hidden, s.ffn, "tensor", "whole"),
        ("router", s.experts, s.hidden, "whole", "whole"),
    ]


def _parts(size: int, ranks: int) -> list[slice]:
    return [slice(r * size // ranks, (r + 1) * size // ranks) for r in range(ranks)]


def _tree(b: Bench, parts: list[Tensor]) -> list[Tensor]:
    return b.run("tree_sum", torch.stack(parts), None, F32)


def _matrix_accuracy(operator: str, y: Tensor, x: Tensor, weight: Tensor, length: int, what: str) -> Finding:
    """y = x weightᵀ for some of the columns; any order of `length` float32 additions stays within the bound."""
    a, w = x.cpu().double(), weight.cpu().double()
    return near(operator, y, a @ w.T, a.abs() @ w.abs().T, length + 2, what)


def linear(b: Bench) -> Iterator[Finding]:
    for name, n, k, role, _ in _products(b):
        x, weight, bias = b.normal(b.sizes.tokens, k), b.normal(n, k, scale=k**-0.5), b.normal(n)
        cut = leaves(k, role)
        out = F32 if name == "router" else None

        def call(
            x: Tensor, w: Tensor = weight, c: Tensor | None = bias, cut: Leaves = cut, out: torch.dtype | None = out
        ) -> list[Tensor]:
            return b.run("linear", x, w, c, cut.size, cut.count, out)

        yield from by_rows("linear", call, x, order=b.order(len(x)), what=name)
        whole, root = call(x), call(x, c=None, out=F32)
        for tp in TP:
            if n % tp == 0:
                shards = [call(x, weight[p], bias[p])[0] for p in _parts(n, tp)]
                yield equal("linear", "tensor parallel", [torch.cat(shards, -1)], whole, f"{name} columns over {tp}")
            if tp <= cut.count and role == "tensor":
                shards = [call(x[:, p], weight[:, p], None, cut.shard(tp), F32)[0] for p in _parts(k, tp)]
                yield equal("linear", "tensor parallel", _tree(b, shards), root, f"{name} reduction over {tp}")
        yield _matrix_accuracy("linear", call(x, c=None)[0][:, :48], x, weight[:48], k, name)


def linear_dx(b: Bench) -> Iterator[Finding]:
    for name, n, k, _, role in _products(b):
        dy, weight = b.normal(b.sizes.tokens, n), b.normal(n, k, scale=n**-0.5)
        paired = name == "gate_up"
        cut = leaves(n // 2 if paired else n, role)

        def call(
            dy: Tensor, w: Tensor = weight, cut: Leaves = cut, paired: bool = paired, out: torch.dtype | None = None
        ) -> list[Tensor]:
            return b.run("linear_dx", dy, w, cut.size, cut.count, out, paired)

        yield from by_rows("linear_dx", call, dy, order=b.order(len(dy)), what=name)
        root = call(dy, out=F32)
        for tp in TP:
            if tp > cut.count or role != "tensor":
                continue
            if paired:
                half = n // 2
                rows = [
                    torch.cat([torch.arange(p.start, p.stop), half + torch.arange(p.start, p.stop)])
                    for p in _parts(half, tp)
                ]
                pairs = [(dy[:, r.to(dy.device)], weight[r.to(dy.device)]) for r in rows]
            else:
                pairs = [(dy[:, p], weight[p]) for p in _parts(n, tp)]
            shards = [call(d, w, cut.shard(tp), out=F32)[0] for d, w in pairs]
            yield equal("linear_dx", "tensor parallel", _tree(b, shards), root, f"{name} reduction over {tp}")
        yield _matrix_accuracy("linear_dx", call(dy, weight[:, :48])[0], dy, weight[:, :48].T, n, name)


def _by_micro_batch(
    operator: str, add: Callable[[Tensor, int, int, int], list[Tensor]], grad: Tensor, tokens: int, what: str
) -> Iterator[Finding]:
    """`add(grad, batch, first, last)`: rows first … last of a batch of four, laid out [S, B]."""
    whole = add(grad, 4, 0, 4)
    yield equal(operator, "run to run", add(grad, 4, 0, 4), whole, what)
    for cuts in ((0, 1, 2, 3, 4), (0, 2, 4), (0, 3, 4)):
        partial = [grad]
        for first, last in zip(cuts, cuts[1:], strict=False):
            partial = add(partial[0], last - first, first, last)
        yield equal(operator, "micro-batch", partial, whole, f"{what} rows {cuts} of {tokens} tokens".strip())


def _rows_of(x: Tensor, first: int, last: int) -> Tensor:
    """Rows first … last of tokens that lie [S, 4]."""
    return x.reshape(-1, 4, *x.shape[1:])[:, first:last].flatten(0, 1)


def linear_dw(b: Bench) -> Iterator[Finding]:
    tokens = 4 * (b.sizes.tokens // 4)
    for name, n, k, _, _ in _products(b):
        n = min(n, 512)
        dy, x, grad = b.normal(tokens, n), b.normal(tokens, k), b.normal(n, k, dtype=F32)

        def add(
            g: Tensor, batch: int, first: int, last: int, dy: Tensor = dy, x: Tensor = x, spans: int = 1
        ) -> list[Tensor]:
            return b.run("linear_dw", _rows_of(dy, first, last), _rows_of(x, first, last), g, batch, None, spans, False)

        yield from _by_micro_batch("linear_dw", add, grad, tokens, name)
        whole = add(grad, 4, 0, 4)
        for tp in TP:
            if n % tp == 0:
                shards = [add(grad[p], 4, 0, 4, dy[:, p])[0] for p in _parts(n, tp)]
                yield equal(
                    "linear_dw", "tensor parallel", [torch.cat(shards)], whole, f"{name} rows of the weight over {tp}"
                )
            if k % tp == 0:
                shards = [add(grad[:, p].contiguous(), 4, 0, 4, dy, x[:, p])[0] for p in _parts(k, tp)]
                yield equal(
                    "linear_dw",
                    "tensor parallel",
                    [torch.cat(shards, 1)],
                    whole,
                    f"{name} columns of the weight over {tp}",
                )
        nothing = torch.zeros_like(grad)
        row, first = b.normal(40, n), b.normal(40, k)
        once = b.run("linear_dw", row, first, nothing, 1, None, 1, False)
        begun = b.run("linear_dw", row[:16], first[:16], nothing, 1, None, 1, True)[0]
        carried = b.run("linear_dw", row[16:], first[16:], begun, 1, None, 1, True)
        yield equal("linear_dw", "chunk", carried, once, f"{name}: a row in two pieces")
        found = add(torch.zeros_like(grad[:48]), 4, 0, 4, dy[:, :48])[0]
        yield _matrix_accuracy("linear_dw", found, dy[:, :48].T, x.T, tokens + 4, name)


def linear_db(b: Bench) -> Iterator[Finding]:
    tokens, n = 4 * (b.sizes.tokens // 4), (b.sizes.heads + 2 * b.sizes.kv_heads) * b.sizes.head_dim
    dy, grad = b.normal(tokens, n), b.normal(n, dtype=F32)

    def add(g: Tensor, batch: int, first: int, last: int) -> list[Tensor]:
        return b.run("linear_db", _rows_of(dy, first, last), g, batch, None, 4)

    yield from _by_micro_batch("linear_db", add, grad, tokens, "qkv")
    exact = dy.cpu().double()
    yield near("linear_db", add(torch.zeros_like(grad), 4, 0, 4)[0], exact.sum(0), exact.abs().sum(0), tokens + 4)


def _experts(b: Bench) -> Tensor:
    """Offsets of uneven runs, some empty, over twice the tokens."""
    s = b.sizes
    experts = min(s.experts, 16)  # of this rank
    chosen = torch.randint(experts, (2 * s.tokens,), generator=b.generator)
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(chosen, minlength=experts).cumsum(0)])


def _grouped(
    b: Bench, operator: str, name: str, n: int, k: int, cut: Leaves, extra: tuple[bool, ...], dx: bool
) -> Iterator[Finding]:
    offsets = _experts(b)
    rows, length = int(offsets[-1]), n if dx else k
    x, weight = b.normal(rows, length), b.normal(len(offsets) - 1, n, k, scale=length**-0.5)

    def call(x: Tensor, w: Tensor, offsets: Tensor) -> list[Tensor]:
        return b.run(operator, x, w, offsets, cut.size, cut.count, None, *extra)

    whole = call(x, weight, offsets)
    yield equal(operator, "run to run", call(x, weight, offsets), whole, name)
    plain = "linear_dx" if dx else "linear"
    for expert in torch.argsort(offsets.diff(), descending=True)[:3].tolist():
        first, last = int(offsets[expert]), int(offsets[expert + 1])
        one = torch.tensor([0, last - first])
        alone = call(x[first:last], weight[expert : expert + 1], one)
        yield equal(operator, "batch", alone, [whole[0][first:last]], f"{name}: expert {expert} alone")
        bias = () if dx else (None,)
        same = b.run(plain, x[first:last], weight[expert], *bias, cut.size, cut.count, None, *extra)
        yield equal(operator, "batch", same, [whole[0][first:last]], f"{name}: expert {expert} by {plain}")
        w = weight[expert].T if dx else weight[expert]
        yield _matrix_accuracy(operator, alone[0], x[first:last], w, length, name)


def grouped_linear(b: Bench) -> Iterator[Finding]:
    s = b.sizes
    yield from _grouped(
        b, "grouped_linear", "gate_up", 2 * s.expert_ffn, s.hidden, leaves(s.hidden, "whole"), (), False
    )
    yield from _grouped(b, "grouped_linear", "down", s.hidden, s.expert_ffn, leaves(s.expert_ffn, "expert"), (), False)


def grouped_linear_dx(b: Bench) -> Iterator[Finding]:
    s = b.sizes
    yield from _grouped(
        b, "grouped_linear_dx", "gate_up", 2 * s.expert_ffn, s.hidden, leaves(s.expert_ffn, "expert"), (True,), True
    )
    yield from _grouped(
        b, "grouped_linear_dx", "down", s.hidden, s.expert_ffn, leaves(s.hidden, "whole"), (False,), True
    )


def tree_sum(b: Bench) -> Iterator[Finding]:
    s = b.sizes
    parts, bias = b.normal(8, s.tokens, s.hidden, dtype=F32), b.normal(s.hidden)
    yield from by_rows(
        "tree_sum",
        lambda x: b.run("tree_sum", x.transpose(0, 1), bias, s.dtype),
        parts.transpose(0, 1),
        order=b.order(s.tokens),
    )
    whole = b.run("tree_sum", parts, None, F32)
    for ranks in (2, 4):
        roots = [b.run("tree_sum", p, None, F32)[0] for p in parts.chunk(ranks)]
        yield equal("tree_sum", "tensor parallel", _tree(b, roots), whole, f"a tree of {ranks} trees")
    exact = parts.cpu().double()
    yield near("tree_sum", whole[0], exact.sum(0), exact.abs().sum(0), 3)


class _Sequence:
    """Queries, keys and values of one sequence, and calls of attention on pieces of it."""

    def __init__(self, b: Bench) -> None:
        s = b.sizes
        self.b, self.tokens, self.scale = b, s.context, s.head_dim**-0.5
        self.q = b.normal(self.tokens, s.heads, s.head_dim)
        self.k, self.v = (b.normal(self.tokens, s.kv_heads, s.head_dim) for _ in range(2))
        self.qkv = (self.q, self.k, self.v)
        rules = contract.current()
        crossed = self.tokens > rules.kv_block * rules.segment_blocks
        n = self.tokens
        self.batched = self.lines((0, n, 0, 0, n), (1, n, 0, 1, n))
        self.packed = self.lines((0, 33, 0, 0, 33), (33, n, 0, 33, n))
        self.segment = rules.segment_blocks if crossed else 1  # so that segments are merged at small sizes too

    def lines(self, *lines: tuple[int, int, int, int, int]) -> Tensor:
        return torch.tensor(lines, dtype=torch.int32)

    def forward(self, qkv: Sequence[Tensor], seqs: Tensor, stride: int = 1, window: int = 0) -> list[Tensor]:
        return self.b.run("attention", *qkv, seqs, stride, self.scale, window, self.segment)

    def whole(self, window: int = 0) -> list[Tensor]:
        n = self.tokens
        return self.forward(self.qkv, self.lines((0, n, 0, 0, n)), window=window)

    def backward(
        self,
        dout: Tensor,
        forward: Sequence[Tensor],
        qkv: Sequence[Tensor],
        seqs: Tensor,
        stride: int = 1,
        partial: bool = False,
    ) -> list[Tensor]:
        options = (seqs, stride, self.scale, 0, self.segment, partial)
        return self.b.run("attention_backward", dout, *qkv, *forward, *options)

    def chunks(self) -> list[tuple[int, int]]:
        """(first, last) of some ranges of queries."""
        n = self.tokens
        return [(n - 1, n), (n // 2, n // 2 + 1), (0, n // 3), (n // 3, n // 3 + 17), (n // 3, n)]

    def kv_heads(self) -> list[tuple[slice, slice]]:
        """Query heads and KV head of the first and the last KV head."""
        count, group = self.k.shape[1], self.q.shape[1] // self.k.shape[1]
        return [(slice(h * group, (h + 1) * group), slice(h, h + 1)) for h in (0, count - 1)]

    def beside(self, x: Tensor) -> Tensor:
        """A batch of two, [S, B]: this sequence and another one. `batched` are its lines."""
        return torch.stack([x, x.flip(0)], 1).flatten(0, 1)

    def behind(self, x: Tensor) -> Tensor:
        """33 tokens of another sequence, then this one. `packed` are its lines."""
        return torch.cat([x.flip(0)[:33], x])


def _softmax(s: _Sequence) -> tuple[Tensor, Tensor, float]:
    """Probabilities of KV head 0's query heads in float64, that head's values, and the roundings that such a weight may be off by."""
    group = s.q.shape[1] // s.k.shape[1]
    q, k, v = s.q[:, :group].cpu().double(), s.k[:, 0].cpu().double(), s.v[:, 0].cpu().double()
    scores = torch.einsum("nhd,kd->hnk", q, k) * s.scale
    later = torch.ones(s.tokens, s.tokens, dtype=torch.bool).triu(1)
    score = float(torch.einsum("nhd,kd->hnk", q.abs(), k.abs()).max()) * s.scale * (q.shape[2] + 1)
    narrowed = UNIT[s.q.dtype] / UNIT[F32] if contract.current().p_dtype == "input" else 0.0
    return scores.masked_fill(later, -math.inf).softmax(-1), v, 2 * score + 2 * EXP + narrowed


def attention(b: Bench) -> Iterator[Finding]:
    s = _Sequence(b)
    n, op = s.tokens, "attention"
    for window in (0, n // 3):
        whole = s.whole(window)
        what = f"window {window}" if window else ""
        yield equal(op, "run to run", s.whole(window), whole, what)
        for first, last in s.chunks():
            expected = [whole[0][first:last], whole[1][:, first:last], whole[2][:, first:last]]
            line = s.lines((0, last - first, first, 0, n))
            part = s.forward((s.q[first:last], s.k, s.v), line, window=window)
            yield equal(op, "chunk", part, expected, f"{what} queries {first}:{last}".strip())
            line = s.lines((0, last - first, first, 0, last))
            short = s.forward((s.q[first:last], s.k[:last], s.v[:last]), line, window=window)
            yield equal(op, "chunk", short, expected, f"{what} queries {first}:{last}, later keys not there".strip())
    whole = s.whole()
    packed = s.forward([s.behind(x) for x in s.qkv], s.packed)
    found = [packed[0][33:], packed[1][:, 33:], packed[2][:, 33:]]
    yield equal(op, "batch", found, whole, "packed behind another sequence")
    batch = s.forward([s.beside(x) for x in s.qkv], s.batched, 2)
    found = [batch[0][0::2], batch[1][:, 0::2], batch[2][:, 0::2]]
    yield equal(op, "batch", found, whole, "in a batch of two, [S, B]")
    for heads, kv in s.kv_heads():
        alone = s.forward((s.q[:, heads], s.k[:, kv], s.v[:, kv]), s.lines((0, n, 0, 0, n)))
        expected = [whole[0][:, heads], whole[1][heads], whole[2][heads]]
        yield equal(op, "tensor parallel", alone, expected, f"KV head {kv.start} alone")
    p, v, roundings = _softmax(s)
    exact, terms = (torch.einsum("hnk,kd->nhd", p, x) for x in (v, v.abs()))
    yield near(op, whole[0][:, : len(p)], exact, terms, roundings + n)


def attention_backward(b: Bench) -> Iterator[Finding]:
    s = _Sequence(b)
    n, op = s.tokens, "attention_backward"
    dout, line = b.normal(*s.q.shape), s.lines((0, n, 0, 0, n))
    forward = s.whole()
    whole = s.backward(dout, forward, s.qkv, line)
    yield equal(op, "run to run", s.backward(dout, forward, s.qkv, line), whole, "")
    for check, many, lines, stride, mine in (
        ("in a batch of two, [S, B]", s.beside, s.batched, 2, slice(0, None, 2)),
        ("packed behind another sequence", s.behind, s.packed, 1, slice(33, None)),
    ):
        qkv = [many(x) for x in s.qkv]
        found = s.backward(many(dout), s.forward(qkv, lines, stride), qkv, lines, stride)
        yield equal(op, "batch", [x[mine] for x in found], whole, check)
    for heads, kv in s.kv_heads():
        own = [forward[0][:, heads], forward[1][heads], forward[2][heads]]
        alone = s.backward(dout[:, heads], own, (s.q[:, heads], s.k[:, kv], s.v[:, kv]), line)
        expected = [whole[0][:, heads], whole[1][:, kv], whole[2][:, kv]]
        yield equal(op, "tensor parallel", alone, expected, f"KV head {kv.start} alone")
    group = b.sizes.heads // b.sizes.kv_heads
    if group % 2 == 0:
        root = s.backward(dout, forward, s.qkv, line, partial=True)
        halves = []
        for half in range(2):
            h = (torch.arange(b.sizes.heads) // (group // 2) % 2 == half).nonzero()[:, 0].to(b.device)
            own = [forward[0][:, h], forward[1][h], forward[2][h]]
            halves.append(s.backward(dout[:, h], own, (s.q[:, h], s.k, s.v), line, partial=True))
        for i, name in ((1, "dK"), (2, "dV")):
            tree = _tree(b, [x[i] for x in halves])
            yield equal(op, "tensor parallel", tree, [root[i]], f"{name}: query heads over 2")
    p, _, roundings = _softmax(s)
    d = dout[:, :group].cpu().double()
    exact, terms = (torch.einsum("hnk,nhd->kd", p, x) for x in (d, d.abs()))
    yield near(op, whole[2][:, 0], exact, terms, roundings + 2 * n, "dV")


class _Pages:
    """A sequence's keys and values in pages of a cache, in scattered order, between other sequences' pages."""

    def __init__(self, s: _Sequence, page: int, pieces: int = 1) -> None:
        b, z = s.b, s.b.sizes
        needed = -(-s.tokens // page)
        self.table = torch.randperm(needed + 3, generator=b.generator)[:needed].to(torch.int32).to(b.device)
        cache = torch.full((needed + 3, z.kv_heads, page, 2 * z.head_dim), math.nan, dtype=z.dtype, device=b.device)
        where = torch.arange(s.tokens, device=b.device)
        slots = self.table.long()[where // page] * page + where % page
        for part in torch.arange(s.tokens, device=b.device).chunk(pieces):
            cache = b.run("paged_cache_write", s.k[part], s.v[part], cache, slots[part])[0]
        self.cache, self.s = cache, s

    def call(self, *requests: tuple[int, int]) -> Tensor:
        """Queries first … last of this sequence for every request, one after another."""
        s = self.s
        counts = [last - first for first, last in requests]
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(s.b.device)
        lengths = torch.tensor([last for _, last in requests], dtype=torch.int32).to(s.b.device)
        table = self.table.repeat(len(requests), 1)
        q = torch.cat([s.q[first:last] for first, last in requests])
        return s.b.run("paged_attention", q, self.cache, table, starts, lengths, s.scale, 0, s.segment)[0]


def paged_cache_write(b: Bench) -> Iterator[Finding]:
    s = _Sequence(b)
    b.generator.manual_seed(5)
    whole = _Pages(s, 16)
    for pieces in (1, 2, 7):
        b.generator.manual_seed(5)
        yield equal("paged_cache_write", "batch", [_Pages(s, 16, pieces).cache], [whole.cache], f"in {pieces} pieces")


def paged_attention(b: Bench) -> Iterator[Finding]:
    s = _Sequence(b)
    n, op = s.tokens, "paged_attention"
    dense = s.whole()[0]
    for page in (16, 32, 128):
        pages = _Pages(s, page)
        prefill = pages.call((0, n))
        yield equal(op, "run to run", [pages.call((0, n))], [prefill], f"pages of {page}")
        yield equal(op, "paging", [prefill], [dense], f"pages of {page} against training's attention")
        for first, last in s.chunks():
            check = "decode" if last - first == 1 else "chunk"
            yield equal(
                op, check, [pages.call((first, last))], [dense[first:last]], f"pages of {page}, queries {first}:{last}"
            )
        requests = [(n // 2 - 1, n // 2), (0, 40), (n - 1, n), (n // 3, n // 3 + 5)]
        together = pages.call(*requests)
        yield equal(
            op,
            "batch",
            [together],
            [torch.cat([dense[a:z] for a, z in requests])],
            f"pages of {page}, {len(requests)} requests",
        )


def _norm_operands(b: Bench) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    s = b.sizes
    return b.normal(s.tokens, s.hidden), b.normal(s.tokens, s.hidden), b.normal(s.hidden), b.normal(s.tokens, s.hidden)


def rms_norm(b: Bench) -> Iterator[Finding]:
    x, _, weight, _ = _norm_operands(b)
    yield from by_rows("rms_norm", lambda x: b.run("rms_norm", x, weight, 1e-6), x, order=b.order(len(x)))
    heads, w = b.normal(b.sizes.tokens, b.sizes.heads, b.sizes.head_dim), b.normal(b.sizes.head_dim)
    yield from by_rows("rms_norm", lambda x: b.run("rms_norm", x, w, 1e-6), heads, order=b.order(len(x)), what="heads")
    exact = (x.cpu().double().square().mean(-1) + 1e-6).rsqrt()
    yield near("rms_norm", b.run("rms_norm", x, weight, 1e-6)[1], exact, exact, x.shape[1] / 2 + 4)


def add_rms_norm(b: Bench) -> Iterator[Finding]:
    x, y, weight, _ = _norm_operands(b)
    call = lambda x, y: b.run("add_rms_norm", x, y, weight, 1e-6)  # noqa: E731
    yield from by_rows("add_rms_norm", call, x, y, order=b.order(len(x)))
    total = b.run("residual_add", x, y)[0]
    normed, rstd = b.run("rms_norm", total, weight, 1e-6)
    yield equal("add_rms_norm", "batch", call(x, y), [normed, total, rstd], "residual_add, then rms_norm")


def rms_norm_backward(b: Bench) -> Iterator[Finding]:
    x, dy, weight, skip = _norm_operands(b)
    rstd = b.run("rms_norm", x, weight, 1e-6)[1]
    call = lambda dy, x, r, skip: b.run("rms_norm_backward", dy, x, weight, r, skip)  # noqa: E731
    yield from by_rows("rms_norm_backward", call, dy, x, rstd, skip, order=b.order(len(x)))
    d, z, w, r = dy.cpu().double(), x.cpu().double(), weight.cpu().double(), rstd.cpu().double()[:, None]
    g, h = d * w, z * r
    exact = r * (g - h * (g * h).mean(-1, keepdim=True))
    terms = r * (g.abs() + h.abs() * (g * h).abs().mean(-1, keepdim=True))
    yield near("rms_norm_backward", call(dy, x, rstd, None)[0], exact, terms, x.shape[1] + 6)


def rms_norm_dw(b: Bench) -> Iterator[Finding]:
    s, tokens = b.sizes, 4 * (b.sizes.tokens // 4)
    for what, shape in (("hidden", (s.hidden,)), ("heads", (s.heads, s.head_dim))):
        dy, x = b.normal(tokens, *shape), b.normal(tokens, *shape)
        rstd, grad = b.normal(tokens, *shape[:-1], dtype=F32).abs(), b.normal(shape[-1], dtype=F32)

        def add(
            g: Tensor, batch: int, first: int, last: int, dy: Tensor = dy, x: Tensor = x, rstd: Tensor = rstd
        ) -> list[Tensor]:
            rows = [_rows_of(t, first, last) for t in (dy, x, rstd)]
            return b.run("rms_norm_dw", *rows, g, batch, None, 4)

        yield from _by_micro_batch("rms_norm_dw", add, grad, tokens, what)
        n = (x.cpu().float() * rstd.cpu()[..., None]).to(x.dtype).double() * dy.cpu().double()
        n = n.flatten(0, -2)
        yield near("rms_norm_dw", add(torch.zeros_like(grad), 4, 0, 4)[0], n.sum(0), n.abs().sum(0), 2 * len(n), what)


def head_terms(b: Bench) -> Iterator[Finding]:
    s = b.sizes
    dy, x = (b.normal(s.tokens, s.heads, s.head_dim) for _ in range(2))
    rstd = b.normal(s.tokens, s.heads, dtype=F32).abs()
    call = lambda dy, x, r: b.run("head_terms", dy, x, r)  # noqa: E731
    yield from by_rows("head_terms", call, dy, x, rstd, order=b.order(s.tokens))
    whole = call(dy, x, rstd)
    if s.heads % 2 == 0:
        halves = [call(dy[:, p], x[:, p], rstd[:, p])[0] for p in _parts(s.heads, 2)]
        yield equal("head_terms", "tensor parallel", _tree(b, halves), whole, "heads over 2")


def residual_add(b: Bench) -> Iterator[Finding]:
    x, y, _, _ = _norm_operands(b)
    yield from by_rows("residual_add", lambda x, y: b.run("residual_add", x, y), x, y, order=b.order(len(x)))
    exact = x.cpu().double() + y.cpu().double()
    yield near("residual_add", b.run("residual_add", x, y)[0], exact, exact.abs(), 1)


def rope(b: Bench) -> Iterator[Finding]:
    s = b.sizes
    x, positions = b.normal(s.tokens, s.heads, s.head_dim), b.integers(500, s.tokens)
    angle = torch.arange(500, dtype=torch.float64)[:, None] * torch.rand(
        s.rotary, generator=b.generator, dtype=torch.float64
    )
    cos, sin = angle.cos().float().to(b.device), angle.sin().float().to(b.device)
    for inverse in (False, True):
        call = lambda x, p, inverse=inverse: b.run("rope", x, cos, sin, p, inverse)  # noqa: E731
        yield from by_rows("rope", call, x, positions, order=b.order(s.tokens), what="inverse" if inverse else "")
    a, z = x.cpu().double()[..., : s.rotary], x.cpu().double()[..., s.rotary : 2 * s.rotary]
    at = positions.cpu()
    c, t = cos.cpu().double()[at][:, None], sin.cpu().double()[at][:, None]
    found = b.run("rope", x, cos, sin, positions, False)[0]
    yield near("rope", found[..., : s.rotary], a * c - z * t, (a * c).abs() + (z * t).abs(), 3)


def _gates(b: Bench) -> Tensor:
    return b.normal(b.sizes.tokens, 2 * b.sizes.ffn, scale=3)


def swiglu(b: Bench) -> Iterator[Finding]:
    x = _gates(b)
    yield from by_rows("swiglu", lambda x: b.run("swiglu", x), x, order=b.order(len(x)))
    g, u = x.cpu().double().chunk(2, -1)
    exact = g * g.sigmoid() * u
    yield near("swiglu", b.run("swiglu", x)[0], exact, exact.abs(), EXP + 4)


def swiglu_backward(b: Bench) -> Iterator[Finding]:
    x, dy = _gates(b), b.normal(b.sizes.tokens, b.sizes.ffn)
    yield from by_rows("swiglu_backward", lambda dy, x: b.run("swiglu_backward", dy, x), dy, x, order=b.order(len(x)))
    (g, u), d = x.cpu().double().chunk(2, -1), dy.cpu().double()
    q = g.sigmoid()
    exact = torch.cat([d * u * (q + g * q * (1 - q)), d * g * q], -1)
    terms = torch.cat([(d * u).abs() * (q + (g * q).abs()), (d * g * q).abs()], -1)
    yield near("swiglu_backward", b.run("swiglu_backward", dy, x)[0], exact, terms, EXP + 8)


def embedding(b: Bench) -> Iterator[Finding]:
    s = b.sizes
    rows = min(s.vocab, 8192)
    weight, ids = b.normal(rows, s.hidden), b.integers(rows, s.tokens)
    call = lambda ids: b.run("embedding", weight, ids, 0, rows)  # noqa: E731
    yield from by_rows("embedding", call, ids, order=b.order(s.tokens))
    yield equal("embedding", "accuracy", call(ids), [weight[ids]], "a copy")
    half = rows // 2
    shards = [b.run("embedding", weight[:half], ids, 0, rows)[0], b.run("embedding", weight[half:], ids, half, rows)[0]]
    yield equal("embedding", "tensor parallel", [shards[0] + shards[1]], call(ids), "vocabulary over 2")


def embedding_dw(b: Bench) -> Iterator[Finding]:
    s, tokens, rows = b.sizes, 4 * (b.sizes.tokens // 4), 6
    dy, ids, grad = b.normal(tokens, s.hidden), b.integers(rows, tokens), b.normal(rows, s.hidden, dtype=F32)

    def add(g: Tensor, batch: int, first: int, last: int, start: int = 0) -> list[Tensor]:
        return b.run("embedding_dw", _rows_of(dy, first, last), _rows_of(ids, first, last), g, start, batch, None)

    yield from _by_micro_batch("embedding_dw", add, grad, tokens, "")
    halves = [add(grad[:3], 4, 0, 4)[0], add(grad[3:], 4, 0, 4, 3)[0]]
    yield equal("embedding_dw", "tensor parallel", [torch.cat(halves)], add(grad, 4, 0, 4), "vocabulary over 2")
    d = dy.cpu().double()
    exact, terms = (torch.zeros(rows, s.hidden, dtype=torch.float64).index_add(0, ids.cpu(), x) for x in (d, d.abs()))
    yield near("embedding_dw", add(torch.zeros_like(grad), 4, 0, 4)[0], exact, terms, tokens)


class _Logits:
    """Rows of logits, and the calls on a shard of the vocabulary."""

    def __init__(self, b: Bench) -> None:
        s = b.sizes
        self.b, self.vocab = b, s.vocab
        self.cut = contract.current().vocab_leaves(s.vocab)
        self.logits = b.normal(s.logit_tokens, s.vocab, scale=4, dtype=F32)
        self.tokens = b.integers(s.vocab, s.logit_tokens)
        self.temperature = b.normal(s.logit_tokens, dtype=F32).abs() + 0.3
        self.order = b.order(s.logit_tokens)
        self.maximum = b.run("vocab_max", self.logits, self.temperature)[0]

    def shards(self, ranks: int) -> list[tuple[int, Tensor]]:
        """(first column, logits) of every rank that owns columns."""
        width = self.cut.size * self.cut.count // ranks
        return [(r * width, self.logits[:, r * width : (r + 1) * width]) for r in range(ranks)]

    def sums(self, logits: Tensor, ranks: int = 1) -> list[Tensor]:
        cut = self.cut.shard(ranks)
        return self.b.run("vocab_sums", logits, self.maximum, self.temperature, cut.size, cut.count, True)

    def ranks(self) -> list[int]:
        """Layouts in which every rank owns a column."""
        width = self.cut.size * self.cut.count
        return [tp for tp in TP if tp <= self.cut.count and width // tp * (tp - 1) < self.vocab]


def vocab_max(b: Bench) -> Iterator[Finding]:
    v = _Logits(b)
    yield from by_rows("vocab_max", lambda x, t: b.run("vocab_max", x, t), v.logits, v.temperature, order=v.order)
    for tp in v.ranks():
        parts = [b.run("vocab_max", x, v.temperature)[0] for _, x in v.shards(tp)]
        yield equal("vocab_max", "tensor parallel", [torch.stack(parts).amax(0)], [v.maximum], f"vocabulary over {tp}")


def vocab_sums(b: Bench) -> Iterator[Finding]:
    v = _Logits(b)
    cut = v.cut
    call = lambda x, m, t: b.run("vocab_sums", x, m, t, cut.size, cut.count, True)  # noqa: E731
    yield from by_rows("vocab_sums", call, v.logits, v.maximum, v.temperature, order=v.order)
    whole = v.sums(v.logits)
    for tp in v.ranks():
        parts = [v.sums(x, tp) for _, x in v.shards(tp)]
        for i, name in enumerate(("S", "E")):
            yield equal(
                "vocab_sums",
                "tensor parallel",
                _tree(b, [p[i] for p in parts]),
                [whole[i]],
                f"{name}: vocabulary over {tp}",
            )
    z = v.logits.cpu().double() / v.temperature.cpu().double()[:, None] - v.maximum.cpu().double()[:, None]
    exact = z.exp().sum(-1)
    yield near("vocab_sums", whole[0], exact, exact, cut.size + 20 + EXP + 2 * float(z.abs().max()))


def vocab_logprob(b: Bench) -> Iterator[Finding]:
    v = _Logits(b)
    total, weighted = v.sums(v.logits)
    call = lambda x, n, m, s, e, t: b.run("vocab_logprob", x, n, m, s, e, t, 0)  # noqa: E731
    operands = (v.logits, v.tokens, v.maximum, total, weighted, v.temperature)
    yield from by_rows("vocab_logprob", call, *operands, order=v.order)
    whole = call(*operands)
    for tp in v.ranks():
        parts = [
            b.run("vocab_logprob", x, v.tokens, v.maximum, total, weighted, v.temperature, first)
            for first, x in v.shards(tp)
        ]
        joined = torch.stack([p[0] for p in parts]).sum(0)  # one of them is not +0
        yield equal("vocab_logprob", "tensor parallel", [joined, parts[-1][1]], whole, f"vocabulary over {tp}")
    z = v.logits.cpu().double() / v.temperature.cpu().double()[:, None]
    exact, spread = z.log_softmax(-1), z.amax() - z.amin()
    budget = v.cut.size + 30 + 2 * float(spread)
    yield near("vocab_logprob", whole[0], exact.gather(1, v.tokens.cpu()[:, None])[:, 0], 1 + spread, budget)
    yield near("vocab_logprob", whole[1], -(exact.exp() * exact).sum(-1), 1 + spread, 2 * budget, "entropy")


def vocab_logprob_backward(b: Bench) -> Iterator[Finding]:
    v = _Logits(b)
    total, weighted = v.sums(v.logits)
    entropy = b.run("vocab_logprob", v.logits, v.tokens, v.maximum, total, weighted, v.temperature, 0)[1]
    grads = [b.normal(len(v.tokens), dtype=F32) for _ in range(2)]

    def call(x: Tensor, *rest: Tensor, start: int = 0) -> list[Tensor]:
        return b.run("vocab_logprob_backward", x, *rest, start, b.sizes.dtype)

    rest = (v.tokens, v.maximum, total, entropy, *grads, v.temperature)
    yield from by_rows("vocab_logprob_backward", call, v.logits, *rest, order=v.order)
    whole = call(v.logits, *rest)
    for tp in v.ranks():
        parts = [call(x, *rest, start=first)[0] for first, x in v.shards(tp)]
        yield equal("vocab_logprob_backward", "tensor parallel", [torch.cat(parts, 1)], whole, f"vocabulary over {tp}")
    t = v.temperature.cpu().double()[:, None]
    p = (v.logits.cpu().double() / t).softmax(-1)
    hot = torch.nn.functional.one_hot(v.tokens.cpu(), v.vocab)
    exact = (p - hot) * -grads[0].cpu().double()[:, None] / t
    found = b.run(
        "vocab_logprob_backward",
        v.logits,
        v.tokens,
        v.maximum,
        total,
        entropy[:0],
        grads[0],
        None,
        v.temperature,
        0,
        F32,
    )
    spread = float((v.logits.cpu() / t).abs().max())
    yield near(
        "vocab_logprob_backward",
        found[0],
        exact,
        (p + hot) * grads[0].cpu().double().abs()[:, None] / t,
        v.cut.size + 30 + 4 * spread,
    )


def token_logprob(b: Bench) -> Iterator[Finding]:
    v = _Logits(b)
    cut = v.cut
    call = lambda x, n, t: b.run("token_logprob", x, n, t, cut.size, cut.count, True)  # noqa: E731
    yield from by_rows("token_logprob", call, v.logits, v.tokens, v.temperature, order=v.order)
    total, weighted = v.sums(v.logits)
    steps = [
        *b.run("vocab_logprob", v.logits, v.tokens, v.maximum, total, weighted, v.temperature, 0),
        v.maximum,
        total,
    ]
    yield equal("token_logprob", "batch", call(v.logits, v.tokens, v.temperature), steps, "in three steps")


_ROUTERS = (
    ("softmax", True, 1, 1, 1.0, 0.0),
    ("softmax", False, 1, 1, 1.0, 0.0),
    ("sigmoid", True, 2, 1, 2.5, 1e-20),
)


def _router(b: Bench, score: str, groups: int) -> tuple[Tensor, Tensor | None]:
    experts = b.sizes.experts
    logits = b.normal(b.sizes.tokens, experts, dtype=F32)
    logits[: len(logits) // 2] = logits[: len(logits) // 2].mul(2).round().div(2)  # ties
    bias = b.normal(experts, dtype=F32) if score == "sigmoid" else None
    return logits, bias


def moe_route(b: Bench) -> Iterator[Finding]:
    for score, renormalize, groups, chosen, scaling, eps in _ROUTERS:
        if b.sizes.experts % groups or b.sizes.topk * groups > b.sizes.experts * chosen:
            continue
        logits, bias = _router(b, score, groups)
        options = (b.sizes.topk, score, renormalize, groups, chosen, scaling, eps)
        what = f"{score}{', renormalised' if renormalize else ''}{f', {groups} groups' if groups > 1 else ''}"
        call = lambda x, bias=bias, options=options: b.run("moe_route", x, bias, *options)  # noqa: E731
        yield from by_rows("moe_route", call, logits, order=b.order(len(logits)), what=what)
        if score == "softmax" and not renormalize:
            weights, ids = call(logits)
            exact = logits.cpu().double().softmax(-1).gather(1, ids.cpu().long())
            yield near("moe_route", weights, exact, exact, b.sizes.experts + EXP + 20, what)


def moe_route_backward(b: Bench) -> Iterator[Finding]:
    for score, renormalize, groups, chosen, scaling, eps in _ROUTERS:
        if b.sizes.experts % groups or b.sizes.topk * groups > b.sizes.experts * chosen:
            continue
        logits, bias = _router(b, score, groups)
        ids = b.run("moe_route", logits, bias, b.sizes.topk, score, renormalize, groups, chosen, scaling, eps)[1]
        dweights = b.normal(*ids.shape, dtype=F32)
        options = (score, renormalize, scaling, eps)
        call = lambda d, x, i, options=options: b.run("moe_route_backward", d, x, i, *options)  # noqa: E731
        yield from by_rows("moe_route_backward", call, dweights, logits, ids, order=b.order(len(ids)), what=score)
        z = logits.cpu().double().requires_grad_()
        values = z.softmax(-1) if score == "softmax" else z.sigmoid()
        w = values.gather(1, ids.cpu().long())
        w = (w / w.sum(-1, keepdim=True) if renormalize else w) * scaling
        (exact,) = torch.autograd.grad(w, z, dweights.cpu().double())
        terms = scaling * dweights.cpu().double().abs().sum(-1, keepdim=True)
        yield near(
            "moe_route_backward", call(dweights, logits, ids)[0], exact, terms, b.sizes.experts + EXP + 30, score
        )  # type: ignore[arg-type]


def moe_combine(b: Bench) -> Iterator[Finding]:
    s = b.sizes
    y, weights = b.normal(s.tokens * s.topk, s.hidden), b.normal(s.tokens, s.topk, dtype=F32).abs()
    slots = torch.randperm(len(y), generator=b.generator).view(s.tokens, s.topk).to(b.device)
    slots[::3, 0] = -1
    call = lambda i, w: b.run("moe_combine", y, i, w)  # noqa: E731
    yield from by_rows("moe_combine", call, slots, weights, order=b.order(s.tokens))
    w = torch.where(slots < 0, 0.0, weights).cpu().double()
    rows = y.cpu().double()[slots.cpu().clamp(min=0)]
    exact, terms = (torch.einsum("tk,tkh->th", w, x) for x in (rows, rows.abs()))
    yield near("moe_combine", call(slots, weights)[0], exact, terms, 2 * s.topk + 1)
    place = b.order(len(y))
    moved = torch.empty_like(y)
    moved[place] = y
    elsewhere = torch.where(slots < 0, slots, place[slots.clamp(min=0)])
    yield equal(
        "moe_combine",
        "batch",
        b.run("moe_combine", moved, elsewhere, weights),
        call(slots, weights),
        "rows of y elsewhere",
    )


def expert_weight_backward(b: Bench) -> Iterator[Finding]:
    s = b.sizes
    g, a, weights = (
        b.normal(s.tokens, s.expert_ffn, dtype=F32),
        b.normal(s.tokens, s.expert_ffn),
        b.normal(s.tokens, dtype=F32),
    )
    cut = leaves(s.expert_ffn, "expert")

    def call(g: Tensor, a: Tensor, w: Tensor, cut: Leaves = cut) -> list[Tensor]:
        return b.run("expert_weight_backward", g, a, w, cut.size, cut.count)

    yield from by_rows("expert_weight_backward", call, g, a, weights, order=b.order(s.tokens))
    whole = call(g, a, weights)
    for tp in TP:
        if tp <= cut.count:
            parts = [call(g[:, p], a[:, p], weights, cut.shard(tp)) for p in _parts(s.expert_ffn, tp)]
            yield equal(
                "expert_weight_backward",
                "tensor parallel",
                _tree(b, [p[0] for p in parts]),
                whole[:1],
                f"reduction over {tp}",
            )
    terms = g.cpu().double() * a.cpu().double()
    yield near("expert_weight_backward", whole[0], terms.sum(-1), terms.abs().sum(-1), s.expert_ffn + 2)


def sigmoid_gate(b: Bench) -> Iterator[Finding]:
    y, _, _, _ = _norm_operands(b)
    z = b.normal(len(y), 1, dtype=F32)
    yield from by_rows("sigmoid_gate", lambda y, z: b.run("sigmoid_gate", y, z), y, z, order=b.order(len(y)))
    exact = y.cpu().double() * z.cpu().double().sigmoid()
    yield near("sigmoid_gate", b.run("sigmoid_gate", y, z)[0], exact, exact.abs(), EXP + 4)


def sigmoid_gate_backward(b: Bench) -> Iterator[Finding]:
    d, y, _, _ = _norm_operands(b)
    z = b.normal(len(y), 1, dtype=F32)
    call = lambda d, y, z: b.run("sigmoid_gate_backward", d, y, z)  # noqa: E731
    yield from by_rows("sigmoid_gate_backward", call, d, y, z, order=b.order(len(y)))
    gate = z.cpu().double().sigmoid()
    exact = d.cpu().double() * gate
    yield near("sigmoid_gate_backward", call(d, y, z)[0], exact, exact.abs(), EXP + 4)


def _elementary(operator: str, x: Tensor, exact: Tensor, b: Bench) -> Iterator[Finding]:
    yield from by_rows(operator, lambda x: b.run(operator, x), x, order=b.order(len(x)))
    yield near(operator, b.run(operator, x)[0], exact, exact.abs(), EXP)


def exp(b: Bench) -> Iterator[Finding]:
    x = torch.linspace(-87, 88, 5000).to(b.device)
    yield from _elementary("exp", x, x.cpu().double().exp(), b)


def log(b: Bench) -> Iterator[Finding]:
    x = torch.linspace(-87, 88, 5000).exp().to(b.device)
    yield from _elementary("log", x, x.cpu().double().log(), b)


PROBES: dict[str, Probe] = {
    f.__name__: f
    for f in (
        linear, linear_dx, linear_dw, linear_db, grouped_linear, grouped_linear_dx, tree_sum, attention, attention_backward,
        paged_cache_write, paged_attention, rms_norm, add_rms_norm, rms_norm_backward, rms_norm_dw, head_terms, residual_add,
        rope, swiglu, swiglu_backward, embedding, embedding_dw, vocab_max, vocab_sums, vocab_logprob, vocab_logprob_backward,
        token_logprob, moe_route, moe_route_backward, moe_combine, expert_weight_backward, sigmoid_gate, sigmoid_gate_backward,
        exp, log,
    )
}  # fmt: skip
