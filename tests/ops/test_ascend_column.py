"""The reference backend in the Ascend column, against loops written from docs/numerics-contract.md and docs/ascend.md: no code in
common, one float32 operation of NumPy at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mindspeed_tpi import contract
from mindspeed_tpi.contract import NumericsContract
from mindspeed_tpi.errors import BackendError
from mindspeed_tpi.ops.backends import cpu, reference

f32 = np.float32
ZERO = f32(0)
KV_BLOCK, SEGMENT_BLOCKS = 16, 2  # small, so that few tokens make several segments
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def column(default_state: None) -> Iterator[None]:
    contract.set_current(
        NumericsContract.ascendc().overridden({"kv_block": KV_BLOCK, "segment_blocks": SEGMENT_BLOCKS, "lanes": 8})
    )
    with np.errstate(all="ignore"):
        yield


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def numbers(x: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    return x.float().numpy()


def rounded(x: Any, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.array(x, dtype=f32)).to(dtype)


def exp(x: f32) -> f32:
    return f32(math.exp(float(x))) if x > -1000 else f32(0)


def tree(terms: list[f32]) -> f32:
    while len(terms) > 1:
        terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def cube(a: Sequence[f32], b: Sequence[f32], dtype: torch.dtype, start: f32 = ZERO) -> f32:
    """Products in groups of 16 (8 in f32) from the first on, a tree over each group, groups added to the sum in order."""
    group = 8 if dtype == torch.float32 else 16
    total = start
    for first in range(0, len(a), group):
        terms = [x * y for x, y in zip(a[first : first + group], b[first : first + group], strict=True)]
        total = total + tree(terms + [f32(0)] * (group - len(terms)))
    return total


def lanes(terms: Sequence[f32], present: Sequence[bool] | None = None, count: int = 8) -> f32:
    sums = [f32(0)] * count
    for j, term in enumerate(terms):
        if present is None or present[j]:
            sums[j % count] = sums[j % count] + term
    return tree(sums)


def equal(ours: Tensor, theirs: Any, dtype: torch.dtype) -> bool:
    expected = rounded(theirs, dtype)
    assert ours.dtype == dtype
    return torch.equal(ours, expected)


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 40), st.sampled_from([1, 2, 4]), st.booleans())
def test_linear(dtype: torch.dtype, leaf: int, leaves: int, biased: bool) -> None:
    k = leaf * leaves
    x, w, bias = values((2, k), dtype, 0), values((3, k), dtype, 1), values((3,), dtype, 2)
    a, b, c = numbers(x), numbers(w), numbers(bias)
    y = [
        [tree([cube(r[i : i + leaf], s[i : i + leaf], dtype) for i in range(0, k, leaf)]) + (c[n] if biased else f32(0)) for n, s in enumerate(b)]
        for r in a
    ]  # fmt: skip
    ours = reference.linear(x, w, bias if biased else None, leaf, leaves, torch.float32)
    assert equal(ours + 0, np.array(y) + f32(0), torch.float32)


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 24), st.sampled_from([1, 2]), st.booleans())
def test_linear_dx(dtype: torch.dtype, leaf: int, leaves: int, paired: bool) -> None:
    half = leaf * leaves
    n = half * (2 if paired else 1)
    dy, w = values((2, n), dtype, 3), values((n, 3), dtype, 4)
    a, b = numbers(dy), numbers(w).T

    def leaf_sum(r: Any, s: Any, i: int) -> f32:
        total = cube(r[i : i + leaf], s[i : i + leaf], dtype)
        return cube(r[half + i : half + i + leaf], s[half + i : half + i + leaf], dtype, total) if paired else total

    dx = [[tree([leaf_sum(r, s, i) for i in range(0, half, leaf)]) for s in b] for r in a]
    assert equal(reference.linear_dx(dy, w, leaf, leaves, torch.float32, paired), dx, torch.float32)


@settings(max_examples=10, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 40), st.sampled_from([1, 2]), st.sampled_from([0, 16, 32]))
def test_linear_dw(dtype: torch.dtype, tokens: int, spans: int, carried: int) -> None:
    tokens *= spans
    dy, x = values((tokens, 2), dtype, 5), values((tokens, 3), dtype, 6)
    start = values((2, 3), torch.float32, 7)
    a, b, g = numbers(dy).T, numbers(x).T, numbers(start)
    span = tokens // spans

    def row(r: Any, s: Any) -> f32:
        return tree([cube(r[i : i + span], s[i : i + span], dtype) for i in range(0, tokens, span)])

    grad = start.clone()
    reference.linear_dw(dy, x, grad, 1, None, spans, False)
    assert equal(grad, [[g[n, k] + row(a[n], b[k]) for k in range(3)] for n in range(2)], torch.float32)
    if carried < tokens:  # the row in two pieces is one chain
        whole, pieces = torch.zeros(2, 3), torch.zeros(2, 3)
        reference.linear_dw(dy, x, whole, 1, None, 1, True)
        for part in (slice(0, carried), slice(carried, tokens)):
            reference.linear_dw(dy[part], x[part], pieces, 1, None, 1, True)
        assert torch.equal(whole, pieces)
        assert equal(whole, [[cube(a[n], b[k], dtype) for k in range(3)] for n in range(2)], torch.float32)


Softmax = tuple[list[f32], f32, f32]


def attend(q: Any, k: Any, v: Any, at: int, scale: f32, window: int, dtype: torch.dtype) -> Softmax:
    """One query at position `at`: (o, m, l)."""

    def seen(j: int) -> bool:
        return j <= at and (window == 0 or j > at - window)

    merged: Softmax | None = None
    dim = len(q)
    for first in range(0, len(k), KV_BLOCK * SEGMENT_BLOCKS):
        segment: Softmax | None = None
        for start in range(first, min(first + KV_BLOCK * SEGMENT_BLOCKS, len(k)), KV_BLOCK):
            keys = range(start, min(start + KV_BLOCK, len(k)))
            if not any(map(seen, keys)):
                continue
            s = [cube(q, k[j], dtype) * scale for j in keys]
            m = max([x for x, j in zip(s, keys, strict=True) if seen(j)] + ([segment[1]] if segment else []))
            p = [exp(x - m) if seen(j) else f32(0) for x, j in zip(s, keys, strict=True)]
            total = lanes(p)
            entered = [numbers(rounded(x, dtype)).item() for x in p]
            products = [cube([f32(x) for x in entered], [v[j][d] for j in keys], dtype) for d in range(dim)]
            if segment is None:
                segment = (products, m, total)
            else:
                alpha = exp(segment[1] - m)
                segment = ([o * alpha + t for o, t in zip(segment[0], products, strict=True)], m, segment[2] * alpha + total)  # fmt: skip
        if segment is None:
            continue
        if merged is None:
            merged = segment
        else:
            m = max(merged[1], segment[1])
            a, b = exp(merged[1] - m), exp(segment[1] - m)
            merged = ([x * a + y * b for x, y in zip(merged[0], segment[0], strict=True)], m, merged[2] * a + segment[2] * b)  # fmt: skip
    assert merged is not None
    return [o / merged[2] + f32(0) for o in merged[0]], merged[1], merged[2]


@settings(max_examples=8, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 3), st.integers(1, 12), st.sampled_from([0, 5]))
def test_attention_and_its_gradient(dtype: torch.dtype, queries: int, eighths: int, window: int) -> None:
    """One KV head, two query heads, the last `queries` of the keys' positions as one line."""
    tokens, dim, scale = queries + 3 * eighths, 8, f32(0.4)
    q, k, v, dout = (
        values((n, h, dim), dtype, 10 + i)
        for i, (n, h) in enumerate(((queries, 2), (tokens, 1), (tokens, 1), (queries, 2)))
    )
    at = tokens - queries
    seqs = torch.tensor([[0, queries, at, 0, tokens]], dtype=torch.int32)
    out, m, l = reference.attention(q, k, v, seqs, 1, float(scale), window, SEGMENT_BLOCKS)  # noqa: E741
    a, ks, vs = numbers(q), numbers(k)[:, 0], numbers(v)[:, 0]
    for i in range(queries):
        for h in range(2):
            o, largest, total = attend(a[i, h], ks, vs, at + i, scale, window, dtype)
            assert equal(out[i, h], o, dtype) and float(m[h, i]) == largest and float(l[h, i]) == total

    def seen(i: int, j: int) -> bool:
        return j <= at + i and (window == 0 or j > at + i - window)

    do, o, cast = numbers(dout), numbers(out), lambda x: f32(numbers(rounded(x, dtype)).item())
    p, ds = np.zeros((2, queries, tokens), f32), np.zeros((2, queries, tokens), f32)
    for h in range(2):
        for i in range(queries):
            delta = lanes([x * y for x, y in zip(do[i, h], o[i, h], strict=True)])
            for j in range(tokens):
                if seen(i, j):
                    score = cube(a[i, h], ks[j], dtype) * scale
                    weight = exp(score - numbers(m)[h, i]) / numbers(l)[h, i]
                    p[h, i, j], ds[h, i, j] = cast(weight), cast(weight * (cube(do[i, h], vs[j], dtype) - delta))
    dq, dk, dv = reference.attention_backward(
        dout, q, k, v, out, m, l, seqs, 1, float(scale), window, SEGMENT_BLOCKS, False
    )
    length = KV_BLOCK * SEGMENT_BLOCKS
    for i in range(queries):
        for h in range(2):
            expected = []
            for d in range(dim):
                parts = [
                    cube(ds[h, i, first : first + length], ks[first : first + length, d], dtype)
                    for first in range(0, tokens, length)
                    if any(seen(i, j) for j in range(first, min(first + length, tokens)))
                ]
                total = parts[0]
                for part in parts[1:]:
                    total = total + part
                expected.append(total * scale + f32(0))
            assert equal(dq[i, h], expected, dtype)
    for j in range(tokens):
        for result, weights, x, factor in ((dk, ds, a, scale), (dv, p, do, f32(1))):
            heads = [[cube(weights[h, :, j], x[:, h, d], dtype) for d in range(dim)] for h in range(2)]
            assert equal(result[j, 0], [(s + t) * factor + f32(0) for s, t in zip(*heads, strict=True)], dtype)


@settings(max_examples=10, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 40))
def test_rms_norm(dtype: torch.dtype, columns: int) -> None:
    x, weight = values((2, columns), dtype, 20), values((columns,), dtype, 21)
    y, rstd = reference.rms_norm(x, weight, 1e-6)
    for row, ours, r in zip(numbers(x), y, rstd, strict=True):
        scale = f32(1) / np.sqrt(lanes([v * v for v in row]) / f32(columns) + f32(1e-6))
        normed = numbers(rounded([v * scale for v in row], dtype))
        assert float(r) == scale and equal(ours, normed * numbers(weight), dtype)


def test_logprob() -> None:
    """Three leaves of four of a vocabulary of ten; the exact maximum first."""
    logits, tokens = values((3, 10), torch.float32, 30), torch.tensor([0, 9, 4])
    logprob, _, largest, total = reference.token_logprob(logits, tokens, None, 4, 4, False)
    for row, token, ours, found, whole in zip(numbers(logits), tokens.tolist(), logprob, largest, total, strict=True):
        top = row.max()
        p = [exp(x - top) for x in row]
        leaves = [lanes(p[i : i + 4]) for i in (0, 4, 8)] + [f32(0)]
        assert float(found) == top and float(whole) == tree(leaves)
        assert float(ours) == (row[token] - top) - f32(math.log(float(tree(leaves))))


CHANGES: list[tuple[str, Any, Callable[[], Any]]] = [
    ("leaf_order", "chain", lambda: test_linear.hypothesis.inner_test(torch.float32, 40, 2, False)),
    ("attention_gradient", "add", lambda: test_attention_and_its_gradient.hypothesis.inner_test(torch.float32, 3, 12, 0)),
    ("p_dtype", "float32", lambda: test_attention_and_its_gradient.hypothesis.inner_test(torch.bfloat16, 3, 12, 0)),
    ("transcendental", "polynomial", lambda: test_attention_and_its_gradient.hypothesis.inner_test(torch.float32, 3, 12, 0)),
    ("multiply_add", "fma", lambda: test_attention_and_its_gradient.hypothesis.inner_test(torch.float32, 3, 12, 0)),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value", "run"), CHANGES, ids=[field for field, *_ in CHANGES])
def test_each_constant_is_followed(field: str, value: Any, run: Callable[[], Any]) -> None:
    own = contract.current()
    contract.set_current(own.overridden({field: value}))
    try:
        with pytest.raises(AssertionError):
            run()
    finally:
        contract.set_current(own)


def test_the_cpu_backend_refuses_the_column() -> None:
    with pytest.raises(BackendError, match="has family='cpu', the contract says 'ascendc'"):
        cpu.check(NumericsContract.ascendc())
    with pytest.raises(BackendError, match="subnormals='flush' with isa='dav-2201'"):
        reference.check(NumericsContract.ascendc().overridden({"subnormals": "flush"}))
    reference.check(NumericsContract.ascendc())
