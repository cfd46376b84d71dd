"""Random cases of every operator, shared by the property tests and the long mode.

A builder draws a case's parameters from a `Source`: `Seeded` (an integer seed) or `Drawn` (hypothesis). The same
builder therefore serves both, and a failing seed of the long mode is a reproducer.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from mindspeed_tpi import contract
from mindspeed_tpi.ops.backends import cpu, reference
from tests.ops.bits import assert_same_bits, same_bits

T = TypeVar("T")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAN = float("nan")
WIDEST: str = cpu.describe()["isa"]


class Source(Protocol):
    """Where a case's parameters come from."""

    def integer(self, low: int, high: int) -> int:
        """low <= n <= high"""

    def choice(self, options: Sequence[T]) -> T:
        """One of the options."""


class Seeded:
    """Parameters of one (operator, seed)."""

    def __init__(self, operator: str, seed: int) -> None:
        self._random = random.Random(f"{operator}/{seed}")

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def choice(self, options: Sequence[T]) -> T:
        return self._random.choice(options)


class Drawn:
    """Parameters drawn by hypothesis."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def integer(self, low: int, high: int) -> int:
        return self._data.draw(st.integers(low, high))

    def choice(self, options: Sequence[T]) -> T:
        return self._data.draw(st.sampled_from(options))


@dataclass(frozen=True)
class Case:
    """One call: positional arguments of the schema, and which of them the operator writes."""

    operator: str
    args: tuple[Any, ...]
    mutated: tuple[int, ...] = ()

    def run(self, backend: Any) -> list[Tensor]:
        """Results and written arguments of the call on fresh copies."""
        args = [a.clone() if i in self.mutated else a for i, a in enumerate(self.args)]
        result = getattr(backend, self.operator)(*args)
        results = [] if result is None else [result] if isinstance(result, Tensor) else list(result)
        return results + [args[i] for i in self.mutated]

    def __repr__(self) -> str:
        parts = []
        for a in self.args:
            if isinstance(a, Tensor) and a.numel() > 64:
                parts.append(f"<{a.dtype} {tuple(a.shape)} strides {a.stride()}>")
            else:
                parts.append(repr(a))
        return f"{self.operator}({', '.join(parts)})"


@contextmanager
def running_on(isa: str | None, threads: int) -> Iterator[None]:
    """An instruction set and a number of threads, back to the widest and one thread whatever happens: a drawn case may end anywhere,
    and all tests after it would run on portable code."""
    if isa is not None:
        cpu.set_isa(isa)
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(1)
        cpu.set_isa(WIDEST)


def check(case: Case, isa: str | None = None, threads: int = 1) -> None:
    """cpu == reference, bit for bit."""
    expected = case.run(reference)
    with running_on(isa, threads):
        actual = case.run(cpu)
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        if not same_bits(a, b):  # to print a case takes as long as to run it
            assert_same_bits(a, b, f"{case!r}\non {isa} with {threads} threads, result {i}")


# ---- values and layouts ----


def generator(s: Source) -> torch.Generator:
    return torch.Generator().manual_seed(s.integer(0, 2**31 - 1))


KINDS = ("normal", "normal", "wide", "tiny", "integers", "special")


def values(s: Source, shape: Sequence[int], dtype: torch.dtype, kinds: Sequence[str] = KINDS) -> Tensor:
    """Random numbers of one kind; `integers` gives ties and zeros of both signs, `special` also NaN, Inf, subnormals."""
    g = generator(s)
    kind = s.choice(kinds)
    x = torch.randn(*shape, generator=g)
    if kind == "integers":
        return (x.round() * s.choice((1.0, 0.5, 3.0))).to(dtype)
    if kind == "wide":
        reach = 10 if dtype == torch.float16 else 50
        return (x * torch.exp2(torch.randint(-reach, reach, x.shape, generator=g))).to(dtype)
    if kind == "tiny":
        low, high = (-25, -12) if dtype == torch.float16 else (-128, -60)
        return (x * torch.exp2(torch.randint(low, high, x.shape, generator=g))).to(dtype)
    x = x * 2.0 ** s.integer(-2, 2)
    if kind == "special" and x.numel():
        tiny = torch.finfo(dtype).tiny
        odd = torch.tensor([NAN, math.inf, -math.inf, 0.0, -0.0, tiny / 2, -tiny / 4, tiny, torch.finfo(dtype).max])
        where = torch.randint(0, x.numel(), (s.integer(1, 3),), generator=g)
        x.view(-1)[where] = odd[torch.randint(s.choice((0, 1, 3)), len(odd), where.shape, generator=g)]
    return x.to(dtype)


def strided(s: Source, x: Tensor) -> Tensor:
    """The same values, at times with a last dimension that is not dense: a backend copies such small operands."""
    return torch.stack((x, x + 1), -1)[..., 0] if s.choice((False, False, True)) else x


def layout(s: Source, x: Tensor, swap: bool = True) -> Tensor:
    """The same values in storage with gaps, an offset or swapped leading dimensions; the last dimension stays dense."""
    kind = s.choice(("dense", "dense", "padded", "swapped"))
    if kind == "dense" or x.dim() < 2:
        return x
    swap = swap and kind == "swapped" and x.dim() > 2
    source = x.transpose(0, 1) if swap else x
    storage = x.new_full((*source.shape[:-1], x.shape[-1] + 3), NAN)
    view = storage[..., 2 : 2 + x.shape[-1]]
    view.copy_(source)
    return view.transpose(0, 1) if swap else view


def operand(s: Source, shape: Sequence[int], dtype: torch.dtype, kinds: Sequence[str] = KINDS) -> Tensor:
    return layout(s, values(s, shape, dtype, kinds))


def matrix(s: Source, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """A weight; at times one that is dense in its first dimension."""
    if s.choice((False, False, True)):
        return operand(s, shape[::-1], dtype).t()
    return operand(s, shape, dtype)


def size(s: Source, small: int, large: int) -> int:
    """Mostly up to `small`, sometimes up to `large`."""
    return s.integer(1, s.choice((small, small, small, small, small, large)))


def leaf_cut(s: Source, n: int) -> tuple[int, int]:
    """(leaf, leaves): the contract's, or an arbitrary cut with short or empty last leaves."""
    if s.choice((True, False)):
        cut = contract.current().leaves(n, s.choice(("whole", "tensor")))
        return cut.size, cut.count
    leaves = 1 << s.integer(0, 4)
    return -(-n // leaves) + s.choice((0, 0, 1, 2)), leaves


def dx_cut(s: Source, n: int) -> tuple[int, int, int, bool]:
    """(N, leaf, leaves, paired); paired: whole leaves of each half, N near n."""
    if s.choice((True, False)):
        return n, *leaf_cut(s, n), False
    leaves = 1 << s.integer(0, 4)
    leaf = max(n // (2 * leaves), 1)
    return 2 * leaf * leaves, leaf, leaves, True


def rows(s: Source) -> tuple[int, int, Tensor | None]:
    """(tokens, batch, row_offsets)"""
    if s.choice((True, False)):
        batch = s.integer(1, 4)
        return batch * s.integer(0, 6), batch, None
    lengths = [s.integer(0, 7) for _ in range(s.integer(0, 4))]
    first = s.integer(0, 2)
    offsets = torch.tensor([first, *lengths], dtype=torch.int64).cumsum(0)
    return int(offsets[-1]) + s.integer(0, 2), 1, offsets


def spans(s: Source) -> int:
    return 1 << s.integer(0, 3)


def out_dtype(s: Source) -> torch.dtype | None:
    return s.choice((None, torch.float32, *DTYPES))


def leading(s: Source, small: int = 5, large: int = 40) -> tuple[int, ...]:
    """Leading dimensions: tokens, or [S, B]; sometimes none at all."""
    if s.choice((False, False, True)):
        return s.integer(0, 4), s.integer(1, 3)
    return (size(s, small, large) - s.choice((0, 0, 1)),)


# ---- linear ----


def linear(s: Source) -> Case:
    dtype = s.choice(DTYPES)
    n, k = size(s, 9, 70), size(s, 40, 300)
    x, weight = operand(s, (*leading(s), k), dtype), matrix(s, (n, k), dtype)
    bias = s.choice((None, strided(s, values(s, (n,), dtype))))
    return Case("linear", (x, weight, bias, *leaf_cut(s, k), out_dtype(s)))


def linear_dx(s: Source) -> Case:
    dtype = s.choice(DTYPES)
    n, k = size(s, 40, 300), size(s, 9, 70)
    n, *cut = dx_cut(s, n)
    dy, weight = operand(s, (*leading(s), n), dtype), matrix(s, (n, k), dtype)
    return Case("linear_dx", (dy, weight, *cut[:2], out_dtype(s), cut[2]))


def linear_dw(s: Source) -> Case:
    dtype = s.choice(DTYPES)
    n, k = size(s, 6, 40), size(s, 6, 40)
    tokens, batch, row_offsets = rows(s)
    dy, x = operand(s, (tokens, n), dtype), operand(s, (tokens, k), dtype)
    grad = values(s, (n, k), torch.float32)
    if s.choice((False, False, True)):
        grad = grad.t().contiguous().t()
    if batch == 1 and row_offsets is None and s.choice((False, True)):
        return Case("linear_dw", (dy, x, grad, 1, None, 1, True), (2,))
    return Case("linear_dw", (dy, x, grad, batch, row_offsets, spans(s), False), (2,))


def linear_db(s: Source) -> Case:
    n = size(s, 6, 70)
    tokens, batch, row_offsets = rows(s)
    dy = operand(s, (tokens, n), s.choice(DTYPES))
    return Case("linear_db", (dy, values(s, (n,), torch.float32), batch, row_offsets, spans(s)), (1,))


def _experts(s: Source) -> Tensor:
    lengths = [s.choice((0, 1, 1, 2, 5)) for _ in range(s.integer(1, 4))]
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


def grouped_linear(s: Source) -> Case:
    dtype = s.choice(DTYPES)
    n, k, offsets = size(s, 9, 40), size(s, 30, 100), _experts(s)
    x = operand(s, (int(offsets[-1]), k), dtype)
    weight = layout(s, values(s, (len(offsets) - 1, n, k), dtype), swap=False)
    return Case("grouped_linear", (x, weight, offsets, *leaf_cut(s, k), out_dtype(s)))


def grouped_linear_dx(s: Source) -> Case:
    dtype = s.choice(DTYPES)
    (n, *cut), k, offsets = dx_cut(s, size(s, 30, 100)), size(s, 9, 40), _experts(s)
    dy = operand(s, (int(offsets[-1]), n), dtype)
    weight = layout(s, values(s, (len(offsets) - 1, n, k), dtype), swap=False)
    return Case("grouped_linear_dx", (dy, weight, offsets, *cut[:2], out_dtype(s), cut[2]))


def tree_sum(s: Source) -> Case:
    n = size(s, 40, 200)
    parts = values(s, (1 << s.integer(0, 4), *leading(s), n), torch.float32)
    parts = torch.where(parts.abs() < torch.finfo(torch.float32).tiny, 0.0, parts)  # as every operator returns them
    bias = s.choice((None, values(s, (n,), s.choice(DTYPES))))
    return Case("tree_sum", (parts, bias, s.choice(DTYPES)))


# ---- attention ----


@dataclass(frozen=True)
class Heads:
    """Sizes of an attention case."""

    queries: int
    keys: int
    dim: int


def heads(s: Source) -> Heads:
    kv = s.integer(1, 2)
    return Heads(kv * s.choice((1, 2, 3, 4)), kv, s.choice((8, 8, 8, 16, 24, 40)))


def extent(s: Source) -> tuple[int, int, int]:
    """(queries, position of the first, keys) of one line: a chunk of causal attention, mostly; few queries where keys
    cross blocks."""
    many = s.choice((False, False, False, False, False, True))
    keys = s.integer(100, 300) if many else s.integer(0, 20)
    queries = min(s.integer(0, 3 if many else 8), keys)
    position = s.choice((keys - queries, keys - queries, s.integer(0, keys + 2)))
    return queries, position, keys


def window(s: Source) -> int:
    return s.choice((0, 0, 0, 1, 5, 130))


def scale(s: Source) -> float:
    return s.choice((1.0, 0.125, 0.3535533905932738, -0.7))


def segment_blocks(s: Source) -> int:
    return s.choice((1, 2, 16))


ATTENTION_KINDS = ("normal", "normal", "normal", "integers", "tiny", "special")


def _sequences(s: Source) -> tuple[Tensor, int, int, int]:
    """(seqs, stride, query tokens, key tokens)"""
    if s.choice((False, False, True)):
        queries, position, keys = extent(s)
        batch = s.integer(1, 3)
        lines = [(b, queries, position + (b if position > 2 else 0), b, keys) for b in range(batch)]
        return torch.tensor(lines, dtype=torch.int32), batch, queries * batch, keys * batch
    lines, tq, tk = [], 0, 0
    for _ in range(s.choice((1, 1, 2, 3))):
        queries, position, keys = extent(s)
        lines.append((tq, queries, position, tk, keys))
        tq, tk = tq + queries, tk + keys
    return torch.tensor(lines, dtype=torch.int32), 1, tq, tk


def attention(s: Source) -> Case:
    h, dtype = heads(s), s.choice(DTYPES)
    seqs, stride, tq, tk = _sequences(s)
    q = operand(s, (tq, h.queries, h.dim), dtype, ATTENTION_KINDS)
    k = operand(s, (tk, h.keys, h.dim), dtype, ATTENTION_KINDS)
    v = operand(s, (tk, h.keys, h.dim), dtype, ATTENTION_KINDS)
    return Case("attention", (q, k, v, seqs, stride, scale(s), window(s), segment_blocks(s)))


def _segments(s: Source, seqs: Tensor, stride: int) -> Tensor:
    """Each line in 1, 2 or 4 lines with the same keys, the trees of dK and dV, in any order."""
    lines = []
    for query, queries, position, key, keys in seqs.tolist():
        count = s.choice([n for n in (1, 2, 4) if queries % n == 0 and (keys or n == 1)])
        size, order = queries // count, torch.randperm(count, generator=generator(s)).tolist()
        lines += [(query + i * size * stride, size, position + i * size, key, keys) for i in order]
    return torch.tensor(lines, dtype=torch.int32)


def attention_backward(s: Source) -> Case:
    forward = attention(s)
    q, k, v, *options = forward.args
    if s.choice((True, True, True, False)):
        out, m, l = cpu.attention(*forward.args)  # noqa: E741
    else:
        out, m = values(s, q.shape, q.dtype), values(s, (q.shape[1], q.shape[0]), torch.float32, ("normal",))
        l = values(s, m.shape, torch.float32, ("normal",)).abs()  # noqa: E741
    dout = operand(s, q.shape, q.dtype, ATTENTION_KINDS)
    if s.choice((True, False)):
        options[0] = _segments(s, *options[:2])
    return Case("attention_backward", (dout, q, k, v, layout(s, out), m, l, *options, s.choice((False, False, True))))


def _cache(s: Source, h: Heads, blocks: int, page: int, dtype: torch.dtype) -> Tensor:
    """A cache full of values, or of NaN, with swapped outer dimensions at times."""
    outer = (h.keys, blocks) if s.choice((True, False)) else (blocks, h.keys)
    shape = (*outer, page, 2 * h.dim)
    cache = torch.full(shape, NAN, dtype=dtype) if s.choice((True, False)) else values(s, shape, dtype)
    return cache if outer[0] == blocks and outer[1] == h.keys else cache.transpose(0, 1)


def paged_cache_write(s: Source) -> Case:
    h, dtype, page = heads(s), s.choice(DTYPES), s.choice((16, 32, 128))
    blocks, tokens = s.integer(1, 3), s.integer(0, 12)
    k, v = (operand(s, (tokens, h.keys, h.dim), dtype) for _ in range(2))
    slots = torch.randperm(blocks * page, generator=generator(s))[:tokens]
    slots = torch.where(torch.rand(len(slots), generator=generator(s)) < 0.2, -1, slots)
    return Case("paged_cache_write", (k, v, _cache(s, h, blocks, page, dtype), slots), (2,))


def paged_attention(s: Source) -> Case:
    h, dtype, page = heads(s), s.choice(DTYPES), s.choice((16, 16, 32, 64, 128, 256))
    lines = [extent(s) for _ in range(s.choice((1, 1, 2, 3)))]
    needed = [-(-keys // page) for _, _, keys in lines]
    blocks = sum(needed) + s.integer(1, 3)
    order = torch.randperm(blocks, generator=generator(s)).to(torch.int32)
    table = torch.zeros(len(lines), max(needed) + s.integer(0, 2), dtype=torch.int32)
    used = 0
    for r, count in enumerate(needed):
        table[r, :count] = order[used : used + count]
        used += count
    cache = torch.full((blocks, h.keys, page, 2 * h.dim), NAN, dtype=dtype)
    flat = cache.flatten(2)
    kinds = s.choice(ATTENTION_KINDS)
    for r, (_, _, keys) in enumerate(lines):
        content = values(s, (keys, h.keys, 2 * h.dim), dtype, (kinds,))
        for j in range(0, keys, page):
            part = content[j : j + page].transpose(0, 1)
            block = flat[int(table[r, j // page])]
            block[:, : h.dim * page].view(h.keys, h.dim, page)[..., : part.shape[1]] = part[..., : h.dim].transpose(
                1, 2
            )
            block[:, h.dim * page :].view(h.keys, page, h.dim)[:, : part.shape[1]] = part[..., h.dim :]
    if s.choice((True, False)):
        cache = cache.transpose(0, 1).contiguous().transpose(0, 1)
    starts = torch.tensor([0, *(queries for queries, _, _ in lines)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lengths = torch.tensor([keys for _, _, keys in lines], dtype=torch.int32)
    q = operand(s, (int(starts[-1]), h.queries, h.dim), dtype, ATTENTION_KINDS)
    return Case("paged_attention", (q, cache, table, starts, lengths, scale(s), window(s), segment_blocks(s)))


# ---- norm, rotary, activation, embedding ----


def _normed(s: Source) -> tuple[int, ...]:
    if s.choice((False, False, True)):
        return s.integer(0, 4), s.integer(1, 4), size(s, 40, 200)
    return s.integer(0, 5), size(s, 130, 400)


def eps(s: Source) -> float:
    return s.choice((1e-6, 1e-5, 0.0))


def rms_norm(s: Source) -> Case:
    dtype, shape = s.choice(DTYPES), _normed(s)
    return Case("rms_norm", (operand(s, shape, dtype), strided(s, values(s, shape[-1:], dtype)), eps(s)))


def add_rms_norm(s: Source) -> Case:
    dtype, shape = s.choice(DTYPES), _normed(s)
    x, residual = operand(s, shape, dtype), operand(s, shape, dtype)
    return Case("add_rms_norm", (x, residual, strided(s, values(s, shape[-1:], dtype)), eps(s)))


def _rstd(s: Source, x: Tensor) -> Tensor:
    return strided(s, values(s, x.shape[:-1], torch.float32, ("normal", "normal", "special")).abs())


def rms_norm_backward(s: Source) -> Case:
    dtype, shape = s.choice(DTYPES), _normed(s)
    dy, x = operand(s, shape, dtype), operand(s, shape, dtype)
    skip = s.choice((None, operand(s, shape, dtype)))
    return Case("rms_norm_backward", (dy, x, strided(s, values(s, shape[-1:], dtype)), _rstd(s, x), skip))


def rms_norm_dw(s: Source) -> Case:
    dtype, h = s.choice(DTYPES), size(s, 30, 130)
    tokens, batch, row_offsets = rows(s)
    shape = (tokens, s.integer(1, 6), h) if s.choice((True, False)) else (tokens, h)
    dy, x = operand(s, shape, dtype), operand(s, shape, dtype)
    grad = values(s, (h,), torch.float32)
    return Case("rms_norm_dw", (dy, x, _rstd(s, x), grad, batch, row_offsets, spans(s)), (3,))


def head_terms(s: Source) -> Case:
    dtype, shape = s.choice(DTYPES), (s.integer(0, 6), s.choice((1, 2, 3, 4, 6, 8)), size(s, 30, 130))
    dy, x = operand(s, shape, dtype), operand(s, shape, dtype)
    return Case("head_terms", (dy, x, _rstd(s, x)))


def residual_add(s: Source) -> Case:
    dtype, shape = s.choice(DTYPES), (*leading(s), size(s, 40, 300))
    return Case("residual_add", (operand(s, shape, dtype), operand(s, shape, dtype)))


def rope(s: Source) -> Case:
    dtype, tokens, positions = s.choice(DTYPES), s.integer(0, 6), s.integer(1, 9)
    dim = s.choice((8, 16, 64, 80))
    half = s.choice((dim // 2, dim // 2, dim // 4, 1, 3))
    x = operand(s, (tokens, s.integer(1, 5), dim), dtype)
    cos, sin = (values(s, (positions, half), torch.float32, ("normal", "tiny")) for _ in range(2))
    where = torch.randint(0, positions, (tokens,), generator=generator(s))
    return Case("rope", (x, cos, sin, where, s.choice((False, True))))


def swiglu(s: Source) -> Case:
    return Case("swiglu", (operand(s, (*leading(s), 2 * size(s, 40, 150)), s.choice(DTYPES)),))


def swiglu_backward(s: Source) -> Case:
    dtype, lead, f = s.choice(DTYPES), leading(s), size(s, 40, 150)
    return Case("swiglu_backward", (operand(s, (*lead, f), dtype), operand(s, (*lead, 2 * f), dtype)))


def embedding(s: Source) -> Case:
    held, start, h = s.integer(1, 9), s.integer(0, 5), size(s, 20, 100)
    vocab = start + held + s.integer(0, 5)
    ids = torch.randint(0, vocab, leading(s), generator=generator(s))
    return Case("embedding", (operand(s, (held, h), s.choice(DTYPES)), ids, start, vocab))


def embedding_dw(s: Source) -> Case:
    held, start, h = s.integer(1, 5), s.integer(0, 3), size(s, 20, 100)
    tokens, batch, row_offsets = rows(s)
    ids = torch.randint(0, start + held + 2, (tokens,), generator=generator(s))
    dy = operand(s, (tokens, h), s.choice(DTYPES))
    return Case("embedding_dw", (dy, ids, values(s, (held, h), torch.float32), start, batch, row_offsets), (2,))


# ---- logprob ----


def _vocabulary(s: Source) -> tuple[Tensor, Tensor | None, Tensor]:
    """(logits, temperature, tokens)"""
    rows_, v = s.integer(0, 4), size(s, 60, 400)
    logits = operand(s, (rows_, v), torch.float32)
    if s.choice((True, False)):
        logits = logits * s.choice((1.0, 10.0))
    temperature = values(s, (rows_,), torch.float32, ("normal",)).abs() + 0.01
    tokens = torch.randint(0, v, (rows_,), generator=generator(s))
    return logits, s.choice((None, temperature)), tokens


def vocab_cut(s: Source, v: int) -> tuple[int, int]:
    if s.choice((True, False)):
        cut = contract.current().vocab_leaves(v)
        return cut.size, cut.count
    return leaf_cut(s, v)


def vocab_max(s: Source) -> Case:
    logits, temperature, _ = _vocabulary(s)
    return Case("vocab_max", (logits, temperature))


def vocab_sums(s: Source) -> Case:
    logits, temperature, _ = _vocabulary(s)
    largest = cpu.vocab_max(logits, temperature) + s.choice((0.0, 0.0, 1.5))
    return Case("vocab_sums", (logits, largest, temperature, *vocab_cut(s, logits.shape[1]), s.choice((False, True))))


def _summed(s: Source) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor]:
    logits, temperature, tokens = _vocabulary(s)
    largest = cpu.vocab_max(logits, temperature)
    total, weighted = cpu.vocab_sums(logits, largest, temperature, logits.shape[1], 1, s.choice((False, True)))
    return logits, temperature, tokens, largest, total, weighted


def vocab_logprob(s: Source) -> Case:
    logits, temperature, tokens, largest, total, weighted = _summed(s)
    start = s.integer(0, 3)
    return Case("vocab_logprob", (logits, tokens + s.integer(0, 5), largest, total, weighted, temperature, start))


def vocab_logprob_backward(s: Source) -> Case:
    logits, temperature, tokens, largest, total, weighted = _summed(s)
    grad = values(s, tokens.shape, torch.float32)
    entropy = cpu.vocab_logprob(logits, tokens, largest, total, weighted, temperature, 0)[1]
    grad_entropy = values(s, tokens.shape, torch.float32) if len(entropy) else None
    args = (logits, tokens + s.integer(0, 3), largest, total, entropy, grad, grad_entropy, temperature)
    return Case("vocab_logprob_backward", (*args, s.integer(0, 2), s.choice(DTYPES)))


def token_logprob(s: Source) -> Case:
    logits, temperature, tokens = _vocabulary(s)
    cut = vocab_cut(s, logits.shape[1])
    return Case("token_logprob", (logits, tokens, temperature, *cut, s.choice((False, True))))


# ---- mixture of experts ----


def moe_route(s: Source) -> Case:
    score = s.choice(("softmax", "sigmoid"))
    groups = s.choice((1, 1, 2, 4)) if score == "sigmoid" else 1
    experts = groups * s.integer(2, s.choice((4, 16)))
    topk_groups = s.integer(1, groups)
    candidates = experts if groups == 1 else experts // groups * topk_groups
    logits = layout(s, values(s, (s.integer(0, 6), experts), torch.float32).nan_to_num(0.0, math.inf, -math.inf))
    bias = values(s, (experts,), torch.float32, ("normal", "integers", "tiny")) if score == "sigmoid" else None
    options = (s.choice((False, True)), groups, topk_groups, s.choice((1.0, 2.5)), s.choice((0.0, 1e-20)))
    topk = s.choice((s.integer(1, min(candidates, 8)), candidates))
    return Case("moe_route", (logits, s.choice((None, bias)), topk, score, *options))


def moe_route_backward(s: Source) -> Case:
    logits, _, _, score, renormalize, _, _, scaling, eps_ = (forward := moe_route(s)).args
    ids = cpu.moe_route(*forward.args)[1]
    dweights = strided(s, values(s, ids.shape, torch.float32))
    return Case("moe_route_backward", (dweights, logits, strided(s, ids), score, renormalize, scaling, eps_))


def moe_combine(s: Source) -> Case:
    produced, tokens, topk = s.integer(1, 12), s.integer(0, 6), s.integer(1, 8)
    y = operand(s, (produced, size(s, 40, 150)), s.choice(DTYPES))
    slots = torch.randint(-1, produced, (tokens, topk), generator=generator(s))
    return Case("moe_combine", (y, strided(s, slots), strided(s, values(s, (tokens, topk), torch.float32))))


def expert_weight_backward(s: Source) -> Case:
    p, f = size(s, 20, 70) - 1, size(s, 40, 300)
    g, a = operand(s, (p, f), torch.float32), operand(s, (p, f), s.choice(DTYPES))
    return Case("expert_weight_backward", (g, a, strided(s, values(s, (p,), torch.float32)), *leaf_cut(s, f)))


def _gated(s: Source, count: int) -> list[Tensor]:
    """`count` tensors [*, H], then the logits."""
    dtype, lead, h = s.choice(DTYPES), leading(s), size(s, 130, 400)
    return [*(operand(s, (*lead, h), dtype) for _ in range(count)), operand(s, (*lead, 1), torch.float32)]


def sigmoid_gate(s: Source) -> Case:
    return Case("sigmoid_gate", tuple(_gated(s, 1)))


def sigmoid_gate_backward(s: Source) -> Case:
    return Case("sigmoid_gate_backward", tuple(_gated(s, 2)))


# ---- exp and log ----


def _numbers(s: Source) -> Tensor:
    if s.choice((False, True)):
        return values(s, (s.integer(0, 100),), torch.float32) * s.choice((1.0, 30.0))
    return torch.randint(-(2**31), 2**31, (s.integer(0, 100),), generator=generator(s), dtype=torch.int64).to(
        torch.int32
    ).view(torch.float32)  # fmt: skip


def exp(s: Source) -> Case:
    return Case("exp", (_numbers(s),))


def log(s: Source) -> Case:
    x = _numbers(s)
    return Case("log", (x.abs() if s.choice((False, True, True)) else x,))


BUILDERS: dict[str, Callable[[Source], Case]] = {
    f.__name__: f
    for f in (
        linear, linear_dx, linear_dw, linear_db, grouped_linear, grouped_linear_dx, tree_sum, attention, attention_backward,
        paged_cache_write, paged_attention, rms_norm, add_rms_norm, rms_norm_backward, rms_norm_dw,
        head_terms, residual_add, rope, swiglu, swiglu_backward, embedding, embedding_dw, vocab_max, vocab_sums, vocab_logprob, vocab_logprob_backward,
        token_logprob, moe_route, moe_route_backward, moe_combine, expert_weight_backward, sigmoid_gate,
        sigmoid_gate_backward, exp, log,
    )
}  # fmt: skip


def seeded(operator: str, seed: int) -> tuple[Case, str, int]:
    """(case, instruction set, threads) of one seed."""
    s = Seeded(operator, seed)
    return BUILDERS[operator](s), s.choice(cpu.isas()), s.choice((1, 1, 1, 2, 4))
