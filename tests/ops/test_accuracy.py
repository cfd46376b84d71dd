"""Accuracy against float64, with bounds that follow from the prescribed orders.

A chain of n has n roundings, a tree over 2^d nodes d, a lane tree over n elements ceil(n / 64) + 6, each relative to
the sum of the absolute terms (Higham 2002, section 4.2).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed_tpi import contract
from mindspeed_tpi.ops.backends import cpu, reference
from tests.ops.accuracy import UNIT, assert_near
from tests.ops.cases import DTYPES

EXP_ERROR = LOG_ERROR = 2.0  # of the polynomials, in unit roundoffs relative to the result; measured: 1.4 and 1.3


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _lane_tree(n: int) -> int:
    return -(-n // 64) + 6


@pytest.mark.parametrize("backend", [cpu, reference])
def test_exp_and_log(backend: object) -> None:
    x = torch.linspace(-87, 88.5, 100_000)
    assert_near(backend.exp(x), x.double().exp(), x.double().exp(), EXP_ERROR)
    x = torch.exp(torch.linspace(-87, 88, 100_000))
    assert_near(backend.log(x), x.double().log(), x.double().log().abs(), LOG_ERROR)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", (7, 896, 4864))
def test_linear(dtype: torch.dtype, k: int) -> None:
    x, weight, bias = _random(9, k, dtype=dtype), _random(33, k, dtype=dtype, seed=1), _random(33, dtype=dtype, seed=2)
    cut = contract.current().leaves(k, "tensor")
    roundings = cut.size + math.log2(cut.count) + 1
    exact, scale = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T + 10
    assert_near(cpu.linear(x, weight, bias, cut.size, cut.count, None), exact + bias.double(), scale, roundings)
    dx = cpu.linear_dx(x, weight.T.contiguous(), cut.size, cut.count, torch.float32, False)
    assert_near(dx, exact, scale, roundings)
    grad = torch.zeros(9, 33)
    cpu.linear_dw(x.T.contiguous(), weight.T.contiguous(), grad, 1, None, 1, False)
    assert_near(grad, exact, scale, k + 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_of_the_head(dtype: torch.dtype) -> None:
    """dX over a vocabulary of 151,936: eight leaves of 19,200 (contract section 6), on gradients of a softmax's shape."""
    vocab = 151_936
    weight, logits = _random(vocab, 8, dtype=dtype), 4 * _random(2, vocab, seed=1)
    dy = logits.softmax(-1)
    dy[:, 7] -= 1
    dy = dy.to(dtype)
    cut = contract.current().head_leaves(vocab)
    assert (cut.size, cut.count) == (19_200, 8)
    exact, scale = dy.double() @ weight.double(), dy.double().abs() @ weight.double().abs()
    dx = cpu.linear_dx(dy, weight, cut.size, cut.count, torch.float32, False)
    assert_near(dx, exact, scale, 19_200 + 3)
    worst = float(((dx.double() - exact).abs() / scale).max() / UNIT[torch.float32])
    assert worst < 100  # roundings that do not all point one way: three orders below the bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", (0, 100))
def test_attention(dtype: torch.dtype, window: int) -> None:
    _check_attention(cpu, dtype, window, 700)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_the_reference_with_the_constants_of_ascend(dtype: torch.dtype) -> None:
    ascend = {"multiply_add": "mul-add", "transcendental": "hardware", "subnormals": "keep", "p_dtype": "input"}
    contract.set_current(contract.default().overridden({"family": "ascendc", **ascend}))
    _check_attention(reference, dtype, 100, 140, UNIT[dtype] / UNIT[torch.float32])


def _check_attention(backend: Any, dtype: torch.dtype, window: int, n: int, p_rounding: float = 0) -> None:
    heads, kv, dim, factor = 4, 2, 32, 32**-0.5
    q, k, v = (
        _random(n, heads, dim, dtype=dtype),
        _random(n, kv, dim, dtype=dtype, seed=1),
        _random(n, kv, dim, dtype=dtype, seed=2),
    )
    seqs = torch.tensor([[0, n, 0, 0, n]], dtype=torch.int32)
    keys, values = (x.double().repeat_interleave(heads // kv, 1) for x in (k, v))
    s = torch.einsum("nhd,khd->hnk", q.double(), keys) * factor
    i, j = torch.arange(n)[:, None], torch.arange(n)
    p = s.masked_fill((j > i) | ((j <= i - window) if window else False), -torch.inf).softmax(-1)
    exact = torch.einsum("hnk,khd->nhd", p, values)
    scale = torch.einsum("hnk,khd->nhd", p, values.abs())
    # Errors of a score change p by as much as the largest score times its roundings, twice (numerator and denominator).
    score = torch.einsum("nhd,khd->hnk", q.double().abs(), keys.abs()).max() * factor * (dim + 1)
    roundings = 2 * float(score) + 2 * (EXP_ERROR + 1) + 128 + _lane_tree(128) + 4 * math.ceil(n / 128) + p_rounding
    assert_near(backend.attention(q, k, v, seqs, 1, factor, window, 2)[0], exact, scale, roundings)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype: torch.dtype) -> None:
    h = 896
    x, weight = _random(9, h, dtype=dtype), _random(h, dtype=dtype, seed=1)
    rstd = (x.double().square().mean(-1) + 1e-6).rsqrt()
    roundings = _lane_tree(h) / 2 + 5
    assert_near(cpu.rms_norm(x, weight, 1e-6)[1], rstd, rstd, roundings)
    n = cpu.rms_norm(x, torch.ones(h, dtype=dtype), 1e-6)[0]
    exact = x.double() * rstd[:, None]
    assert_near(n, exact, exact.abs(), roundings + 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype: torch.dtype) -> None:
    x = _random(9, 2000, dtype=dtype) * 3
    gate, up = x.double().chunk(2, -1)
    exact = gate * gate.sigmoid() * up
    assert_near(cpu.swiglu(x), exact, exact.abs(), EXP_ERROR + 3)


@pytest.mark.parametrize("v", (50, 3000, 20_000))
def test_logprob(v: int) -> None:
    logits, tokens, temperature = 5 * _random(9, v), torch.arange(9) * (v // 10), torch.full((9,), 0.7)
    cut = contract.current().vocab_leaves(v)
    logprob, entropy, largest, total = cpu.token_logprob(logits, tokens, temperature, cut.size, cut.count, True)
    z = logits.double() / temperature.double()[:, None]
    exact = z.log_softmax(-1)
    spread = z.max() - z.min()
    sums = _lane_tree(cut.size) + math.log2(cut.count) + EXP_ERROR + 2 * float(spread)
    assert_near(total, (z - largest.double()[:, None]).exp().sum(-1), total.double(), sums)
    assert_near(logprob, exact.gather(1, tokens[:, None])[:, 0], 1 + spread, sums + LOG_ERROR + 3)
    assert_near(entropy, -(exact.exp() * exact).sum(-1), 1 + spread, 2 * sums + LOG_ERROR + 3)


def test_moe() -> None:
    logits = _random(50, 60)
    weights, ids = cpu.moe_route(logits, None, 6, "softmax", True, 1, 1, 1.0, 0.0)
    exact, chosen = logits.double().softmax(-1).topk(6)
    assert torch.equal(ids.long(), chosen.sort(-1)[0])
    exact = torch.gather(exact / exact.sum(-1, keepdim=True), 1, chosen.argsort(-1))
    assert_near(weights, exact, exact, 6 + 2 * float(logits.max() - logits.min()) + 2 * EXP_ERROR)
    y, slots = _random(300, 40), torch.arange(300).view(50, 6)
    combined = torch.einsum("tk,tkh->th", weights.double(), y[slots].double())
    magnitude = torch.einsum("tk,tkh->th", weights.double(), y[slots].double().abs())
    assert_near(cpu.moe_combine(y, slots, weights), combined, magnitude, 7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_experts(dtype: torch.dtype) -> None:
    p, f = 21, 768
    g, a, w = _random(p, f), _random(p, f, dtype=dtype, seed=1), _random(p, seed=2)
    cut = contract.current().leaves(f, "expert")
    dweights, da = cpu.expert_weight_backward(g, a, w, cut.size, cut.count)
    products = g.double() * a.double()
    assert_near(dweights, products.sum(-1), products.abs().sum(-1), 1 + _lane_tree(cut.size) + math.log2(cut.count))
    exact = w.double()[:, None] * g.double()
    assert_near(da, exact, exact.abs(), 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sigmoid_gate(dtype: torch.dtype) -> None:
    h = 896
    dout, y, z = _random(9, h, dtype=dtype), _random(9, h, dtype=dtype, seed=1), _random(9, 1, seed=2)
    gate = z.double().sigmoid()
    exact = y.double() * gate
    assert_near(cpu.sigmoid_gate(y, z), exact, exact.abs(), EXP_ERROR + 3)
    dy, dz = cpu.sigmoid_gate_backward(dout, y, z)
    assert_near(dy, dout.double() * gate, (dout.double() * gate).abs(), EXP_ERROR + 3)
    products, slope = dout.double() * y.double(), gate * (1 - gate)
    error = _lane_tree(h) + 1 + 2 * (EXP_ERROR + 3) * float((1 / (1 - gate)).max())
    assert_near(dz, products.sum(-1, keepdim=True) * slope, products.abs().sum(-1, keepdim=True) * slope, error)


@pytest.mark.parametrize("dtype", DTYPES)
def test_head_terms(dtype: torch.dtype) -> None:
    dy, x, rstd = _random(9, 12, 40, dtype=dtype), _random(9, 12, 40, dtype=dtype, seed=1), _random(9, 12, seed=2).abs()
    products = dy.double() * (x.float() * rstd[..., None]).to(dtype).double()
    assert_near(cpu.head_terms(dy, x, rstd), products.sum(1), products.abs().sum(1), 3 + 2)
