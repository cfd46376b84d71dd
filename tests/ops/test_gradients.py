"""Gradients of the typed operators: equal bits on both backends, and near float64 autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from mindspeed_tpi import ops
from mindspeed_tpi.parallel.logprob import linear_logprob
from tests.ops.accuracy import assert_near
from tests.ops.bits import assert_same_bits
from tests.ops.cases import DTYPES

LENGTH, BATCH, HIDDEN, VOCAB, EXPERTS = 20, 2, 24, 50, 12
TOKENS = LENGTH * BATCH
Function = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def keep_backend() -> Iterator[None]:
    name = ops.backends.active().name
    yield
    ops.backends.use(name)


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = torch.einsum("nhd,khd->hnk", q, keys) * 0.3
    i, j = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)
    return torch.einsum("hnk,khd->nhd", s.masked_fill((j > i) | (j <= i - 30), -torch.inf).softmax(-1), values)


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def _rope(x: Tensor) -> Tensor:
    cos, sin = (t.to(x.dtype)[:, None] for t in TABLES)
    a, b = x[..., :4], x[..., 4:8]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., 8:]), -1)


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def _logprob(logits: Tensor) -> Tensor:
    p = (logits / TEMPERATURE.to(logits.dtype)).log_softmax(-1)
    entropy = -(p.exp() * p).sum(-1)
    return torch.stack((p.gather(1, CHOSEN[:, None])[:, 0], entropy))


IDS = torch.arange(TOKENS) % 7
CHOSEN = torch.arange(TOKENS) % VOCAB
TEMPERATURE = torch.tensor([0.8])
TABLES = _random(TOKENS, 4, seed=1).cos(), _random(TOKENS, 4, seed=1).sin()
SEQS = torch.tensor([[0, TOKENS, 0, 0, TOKENS]], dtype=torch.int32)


def _route(z: Tensor, score: str, renormalize: bool) -> Tensor:
    ids = ROUTES[score]
    p = z.softmax(-1) if score == "softmax" else z.sigmoid()
    w = p.gather(1, ids)
    return 2.5 * (w / w.sum(-1, keepdim=True) if renormalize else w)


ROUTES = {
    score: ops.moe_route(_random(TOKENS, EXPERTS, seed=0), 4, score=score)[1].long() for score in ("softmax", "sigmoid")
}


def _routing(score: str, renormalize: bool) -> tuple[Function, Function, tuple[tuple[int, ...], ...]]:
    return (
        lambda z: ops.moe_route(z.float(), 4, score=score, renormalize=renormalize, scaling=2.5)[0],
        lambda z: _route(z, score, renormalize),
        ((TOKENS, EXPERTS),),
    )


# name: (operator, the same in float64, shapes of its differentiable operands)
FUNCTIONS: dict[str, tuple[Function, Function, tuple[tuple[int, ...], ...]]] = {
    "linear": (
        lambda x, w, b: ops.linear(x, w, b, batch=BATCH),
        lambda x, w, b: x @ w.T + b,
        ((LENGTH, BATCH, HIDDEN), (16, HIDDEN), (16,)),
    ),
    "linear paired": (
        lambda x, w: ops.linear(x, w, batch=BATCH, paired=True), lambda x, w: x @ w.T, ((LENGTH, BATCH, HIDDEN), (2 * 48, HIDDEN)),
    ),
    "attention": (
        lambda q, k, v: ops.attention(q, k, v, SEQS, scale=0.3, window=30),
        _attention,
        ((TOKENS, 4, 8), (TOKENS, 2, 8), (TOKENS, 2, 8)),
    ),
    "rms_norm": (lambda x, w: ops.rms_norm(x, w, 1e-6, batch=BATCH), _rms, ((LENGTH, BATCH, HIDDEN), (HIDDEN,))),
    "rms_norm per head": (
        lambda x, w: ops.rms_norm(x, w, 1e-6, batch=BATCH, per_head=True), _rms, ((TOKENS, 6, HIDDEN), (HIDDEN,)),
    ),
    "add_rms_norm": (
        lambda x, r, w: torch.stack(ops.add_rms_norm(x, r, w, 1e-6, batch=BATCH)),
        lambda x, r, w: torch.stack((_rms(x + r, w), x + r)),
        ((TOKENS, HIDDEN), (TOKENS, HIDDEN), (HIDDEN,)),
    ),
    "rope": (lambda x: ops.rope(x, *TABLES, torch.arange(TOKENS)), _rope, ((TOKENS, 3, 16),)),
    "swiglu": (ops.swiglu, _swiglu, ((TOKENS, 2 * HIDDEN),)),
    "residual_add": (ops.residual_add, torch.add, ((TOKENS, HIDDEN), (TOKENS, HIDDEN))),
    "sigmoid_gate": (
        lambda y, z: ops.sigmoid_gate(y, z.float()), lambda y, z: y * z.sigmoid(), ((TOKENS, HIDDEN), (TOKENS, 1)),
    ),
    "moe_route": _routing("softmax", True),
    "moe_route over all": _routing("softmax", False),
    "moe_route sigmoid": _routing("sigmoid", True),
    "moe_route sigmoid alone": _routing("sigmoid", False),
    "embedding": (lambda w: ops.embedding(w, IDS, batch=BATCH), lambda w: w[IDS], ((7, HIDDEN),)),
    "token_logprob": (
        lambda z: torch.stack(ops.token_logprob(z.float(), CHOSEN, TEMPERATURE, entropy=True)), _logprob, ((TOKENS, VOCAB),),
    ),
    "linear_logprob": (
        lambda x, w: torch.stack(linear_logprob(x, w, CHOSEN, temperature=TEMPERATURE, entropy=True, batch=BATCH, chunk=9)),
        lambda x, w: _logprob(x @ w.T),
        ((TOKENS, HIDDEN), (VOCAB, HIDDEN)),
    ),
}  # fmt: skip


def _gradients(function: Function, operands: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    leaves = [x.clone().to(dtype).requires_grad_() for x in operands]
    y = function(*leaves)
    y.backward(_random(*y.shape, seed=9).to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_both_backends_give_the_same_bits(name: str, dtype: torch.dtype) -> None:
    function, _, shapes = FUNCTIONS[name]
    operands = [_random(*shape, seed=i) for i, shape in enumerate(shapes)]
    ops.backends.use("cpu")
    actual = _gradients(function, operands, dtype)
    ops.backends.use("reference")
    for a, b in zip(actual, _gradients(function, operands, dtype), strict=True):
        assert_same_bits(a, b, name)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_near_float64(name: str) -> None:
    function, exact, shapes = FUNCTIONS[name]
    operands = [_random(*shape, seed=i) for i, shape in enumerate(shapes)]
    ops.backends.use("cpu")
    results = zip(
        _gradients(function, operands, torch.float32), _gradients(exact, operands, torch.float64), strict=True
    )
    for actual, wanted in results:
        assert_near(actual, wanted, wanted.abs().max() * (1 + operands[0].abs().max()), 200)


@pytest.mark.parametrize("batch", (1, 2))
def test_gradients_are_kept_in_float32_where_main_grad_exists(batch: int) -> None:
    x, weight = _random(TOKENS, HIDDEN, seed=0).bfloat16(), _random(16, HIDDEN, seed=1).bfloat16().requires_grad_()
    weight.main_grad = torch.zeros(16, HIDDEN)
    y = ops.linear(x, weight, batch=batch)
    dy = _random(*y.shape, seed=2).bfloat16()
    y.backward(dy)
    expected = torch.zeros(16, HIDDEN)
    ops.linear_dw(dy, x, expected, batch=batch)
    assert_same_bits(weight.main_grad, expected)
    assert weight.grad_added_to_main_grad


def test_an_expert_is_differentiated_through_its_weight() -> None:
    """dweights and da of w · (a W2ᵀ), and the combination's gradients, near float64 autograd."""
    hidden, rows, f = 32, 21, 96
    a, w2, w = _random(rows, f, seed=0), _random(hidden, f, seed=1), _random(rows, seed=2)
    dout = _random(rows, hidden, seed=3)
    g = ops.linear_dx(dout, w2, out_dtype=torch.float32)
    dweights, da = ops.expert_weight_backward(g, a, w)
    exact_a, exact_w = (x.double().requires_grad_() for x in (a, w))
    (exact_w[:, None] * (exact_a @ w2.double().T)).backward(dout.double())
    for actual, wanted in ((dweights, exact_w.grad), (da, exact_a.grad)):
        assert_near(actual, wanted, wanted.abs().max(), 200)
