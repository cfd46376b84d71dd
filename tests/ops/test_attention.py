"""Attention: one definition for packed, chunked, batched and paged layouts."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mindspeed_tpi.errors import BackendError
from mindspeed_tpi.ops.attention import query_segments
from mindspeed_tpi.ops.backends import cpu, reference
from tests.ops import cases
from tests.ops.bits import assert_same_bits
from tests.ops.equality import check_drawn

OPERATORS = ("attention", "attention_backward", "paged_attention", "paged_cache_write")


@pytest.mark.parametrize("operator", OPERATORS)
@given(st.data())
def test_cpu_equals_reference(operator: str, data: st.DataObject) -> None:
    check_drawn(operator, data)


def _sequence(s: cases.Source, longest: int = 700) -> tuple[Tensor, Tensor, Tensor, tuple[float, int, int]]:
    """(q, k, v, options) of one causal sequence."""
    h, dtype, n = cases.heads(s), s.choice(cases.DTYPES), s.integer(1, s.choice((30, longest)))
    q = cases.operand(s, (n, h.queries, h.dim), dtype, ("normal", "special"))
    k, v = (cases.operand(s, (n, h.keys, h.dim), dtype, ("normal", "special")) for _ in range(2))
    return q, k, v, (cases.scale(s), cases.window(s), cases.segment_blocks(s))


def _lines(*lines: tuple[int, ...]) -> Tensor:
    return torch.tensor(lines, dtype=torch.int32)


def _chunks(s: cases.Source, n: int) -> list[tuple[int, int]]:
    """0 … n cut at random places."""
    return list(pairwise(sorted({0, n, *(s.integer(0, n) for _ in range(s.integer(0, 3)))})))


@given(st.data())
def test_chunks_of_queries_and_pages_give_the_same_bits(data: st.DataObject) -> None:
    s = cases.Drawn(data)
    q, k, v, options = _sequence(s)
    n, heads, dim = k.shape
    whole = cpu.attention(q, k, v, _lines((0, n, 0, 0, n)), 1, *options)[0]
    page = s.choice((16, 32, 64, 128, 256))
    pages = -(-n // page)
    table = torch.randperm(pages + 2, generator=cases.generator(s))[:pages]
    cache = torch.full((pages + 2, heads, page, 2 * dim), cases.NAN, dtype=q.dtype)
    position = torch.arange(n)
    slots = table[position // page] * page + position % page
    isa, threads, chunks = s.choice(cpu.isas()), s.choice((1, 2, 4)), _chunks(s, n)
    with cases.running_on(isa, threads):
        for first, last in chunks:
            chunk = slice(first, last)
            out = cpu.attention(q[chunk], k[:last], v[:last], _lines((0, last - first, first, 0, last)), 1, *options)[0]
            assert_same_bits(out, whole[chunk], f"queries {first} … {last}")
            cpu.paged_cache_write(k[chunk], v[chunk], cache, slots[chunk])
            lengths = (torch.tensor([0, last - first], dtype=torch.int32), torch.tensor([last], dtype=torch.int32))
            out = cpu.paged_attention(q[chunk], cache, table[None].to(torch.int32), *lengths, *options)
            assert_same_bits(out, whole[chunk], f"pages of {page}, queries {first} … {last}")


@given(st.data())
def test_neighbours_in_a_pack_or_a_batch_do_not_matter(data: st.DataObject) -> None:
    s = cases.Drawn(data)
    q, k, v, options = _sequence(s, 200)
    n, batch = len(q), s.integer(2, 3)
    line = _lines((0, n, 0, 0, n))
    dout = cases.values(s, q.shape, q.dtype, ("normal",))
    out, m, l = cpu.attention(q, k, v, line, 1, *options)  # noqa: E741
    grads = cpu.attention_backward(dout, q, k, v, out, m, l, line, 1, *options, False)

    others = [
        torch.randn(n, batch - 1, *x.shape[1:], generator=cases.generator(s)).to(x.dtype) for x in (q, k, v, dout)
    ]
    interleaved = [
        torch.cat((x[:, None], other), 1).flatten(0, 1) for x, other in zip((q, k, v, dout), others, strict=True)
    ]
    packed = [
        torch.cat((other.transpose(0, 1).flatten(0, 1), x)) for x, other in zip((q, k, v, dout), others, strict=True)
    ]
    layouts = (
        ("batch", interleaved, _lines(*((b, n, 0, b, n) for b in range(batch))), batch, slice(0, None, batch)),
        ("pack", packed, _lines(*((b * n, n, 0, b * n, n) for b in range(batch))), 1, slice((batch - 1) * n, None)),
    )
    for name, (q2, k2, v2, dout2), seqs, stride, own in layouts:
        result = cpu.attention(q2, k2, v2, seqs, stride, *options)
        assert_same_bits(result[0][own], out, name)
        grads2 = cpu.attention_backward(dout2, q2, k2, v2, *result, seqs, stride, *options, False)
        for a, b in zip(grads2, grads, strict=True):
            assert_same_bits(a[own], b, f"gradient, {name}")


def test_a_row_is_cut_in_segments_that_every_rank_pairs() -> None:
    """0, n − 1, 1, n − 2, …: the tree adds the two chunks of each of n / 2 ranks first."""
    lines = query_segments(_lines((3, 48, 0, 5, 48), (60, 7, 0, 60, 7), (80, 0, 0, 80, 0)), 2).tolist()
    assert lines[:4] == [[3, 3, 0, 5, 48], [93, 3, 45, 5, 48], [9, 3, 3, 5, 48], [87, 3, 42, 5, 48]]
    assert len(lines) == 16 + 1 + 1 and lines[16:] == [[60, 7, 0, 60, 7], [80, 0, 0, 80, 0]]


@given(st.data())
def test_ranks_that_split_the_heads_give_the_same_bits(data: st.DataObject) -> None:
    s = cases.Drawn(data)
    dtype, n, groups, ranks = (
        s.choice(cases.DTYPES),
        s.integer(1, s.choice((20, 150))),
        s.choice((4, 8, 12)),
        s.choice((2, 4)),
    )
    q, dout = (cases.values(s, (n, groups, 8), dtype, ("normal",)) for _ in range(2))
    k, v = (cases.values(s, (n, 1, 8), dtype, ("normal",)) for _ in range(2))
    options = (_lines((0, n, 0, 0, n)), 1, cases.scale(s), cases.window(s), cases.segment_blocks(s))
    out, m, l = cpu.attention(q, k, v, *options)  # noqa: E741
    dq, dk, dv = cpu.attention_backward(dout, q, k, v, out, m, l, *options, True)
    parts = []
    for i in range(0, groups, groups // ranks):
        own = slice(i, i + groups // ranks)
        local = cpu.attention(q[:, own], k, v, *options)
        assert_same_bits(local[0], out[:, own])
        parts.append(cpu.attention_backward(dout[:, own], q[:, own], k, v, *local, *options, True))
        assert_same_bits(parts[-1][0], dq[:, own])
    for index, whole in ((1, dk), (2, dv)):
        assert_same_bits(cpu.tree_sum(torch.stack([p[index] for p in parts]), None, torch.float32), whole)


@pytest.mark.parametrize("isa", cpu.isas())
@pytest.mark.parametrize("keys", (1, 9, 33))
def test_the_sign_of_a_zero_maximum(isa: str, keys: int) -> None:
    zeros = torch.zeros(keys, 1, 8)
    cases.check(cases.Case("attention", (zeros, zeros, zeros, _lines((0, keys, 0, 0, keys)), 1, -0.7, 0, 16)), isa)


@pytest.mark.parametrize("isa", cpu.isas())
@pytest.mark.parametrize(("queries", "groups"), [(5, 3), (16, 1), (17, 2), (33, 4)])
def test_many_queries_over_pages(isa: str, queries: int, groups: int) -> None:
    g = torch.Generator().manual_seed(queries)
    cache, q = torch.randn(3, 2, 32, 32, generator=g), torch.randn(queries, 2 * groups, 16, generator=g)
    table, starts, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([[2, 0]], [0, queries], [queries + 3]))
    cases.check(cases.Case("paged_attention", (q, cache, table, starts, lengths, 0.3, 0, 16)), isa)


@pytest.mark.parametrize("backend", [cpu, reference])
def test_no_visible_key_gives_zero(backend: object) -> None:
    q, k = torch.ones(2, 1, 8), torch.full((3, 1, 8), cases.NAN)
    out, m, l = backend.attention(q, k, k, _lines((0, 2, 7, 0, 3)), 1, 1.0, 2, 16)  # noqa: E741
    assert_same_bits(out, torch.zeros(2, 1, 8))
    assert_same_bits(m, torch.full((1, 2), -torch.inf))
    assert_same_bits(l, torch.zeros(1, 2))
    for gradient in backend.attention_backward(q, q, k, k, out, m, l, _lines((0, 2, 7, 0, 3)), 1, 1.0, 2, 16, False):
        assert_same_bits(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("backend", [cpu, reference])
def test_errors(backend: object) -> None:
    q, k = torch.zeros(4, 4, 8), torch.zeros(4, 2, 8)
    line = _lines((0, 4, 0, 0, 4))
    for call in (
        lambda b: b.attention(q, torch.zeros(4, 3, 8), torch.zeros(4, 3, 8), line, 1, 1.0, 0, 16),
        lambda b: b.attention(q, k, k, _lines((1, 4, 0, 0, 4)), 1, 1.0, 0, 16),
        lambda b: b.attention(q, k, k, _lines((0, 4, 0, 0, 5)), 1, 1.0, 0, 16),
        lambda b: b.attention(q, k, k, _lines((0, 4, -1, 0, 4)), 1, 1.0, 0, 16),
        lambda b: b.attention(q, k.half(), k.half(), line, 1, 1.0, 0, 16),
        lambda b: _gradients(b, q, k, _lines((0, 1, 0, 0, 4), (1, 1, 1, 0, 4), (2, 1, 2, 0, 4))),
    ):
        with pytest.raises(BackendError):
            call(backend)


def _gradients(backend: object, q: Tensor, k: Tensor, seqs: Tensor) -> None:
    one = torch.ones(q.shape[1], len(q))
    backend.attention_backward(q, q, k, k, q, one, one, seqs, 1, 1.0, 0, 16, False)


@pytest.mark.parametrize("backend", [cpu, reference])
def test_paged_errors(backend: object) -> None:
    q, cache = torch.zeros(1, 2, 8), torch.zeros(2, 2, 16, 16)
    one = torch.tensor([0, 1], dtype=torch.int32)

    def attend(table: list[int], length: int, kv_cache: Tensor = cache) -> None:
        lengths = torch.tensor([length], dtype=torch.int32)
        backend.paged_attention(q, kv_cache, torch.tensor([table], dtype=torch.int32), one, lengths, 1.0, 0, 16)

    attend([0], 3)
    for arguments in (([2], 3), ([-1], 3), ([0], 17), ([0], 0), ([0], 3, torch.zeros(2, 2, 24, 16))):
        with pytest.raises(BackendError):
            attend(*arguments)
    with pytest.raises(BackendError):
        backend.paged_cache_write(q, q, cache, torch.tensor([32]))
