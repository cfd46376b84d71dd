"""A change of order planted in the reference must be seen: each of these comparisons has to fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mindspeed_tpi import contract
from mindspeed_tpi.ops.backends import cpu, reference
from tests.ops.bits import same_bits
from tests.ops.cases import Case

Plant = Callable[[pytest.MonkeyPatch], None]
G = torch.Generator()


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=G).to(dtype)


def _constant(**changes: Any) -> Plant:
    return lambda monkeypatch: contract.set_current(contract.default().overridden(changes))


def _reversed_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    original = reference.chain

    def chain(a: np.ndarray, b: np.ndarray, present: Any = None, step: Any = None, start: Any = None) -> np.ndarray:
        return original(a[..., ::-1], b[..., ::-1], None if present is None else present[..., ::-1], step, start)

    monkeypatch.setattr(reference, "chain", chain)


def _reversed_sum_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    original = reference.sum_chain
    monkeypatch.setattr(
        reference,
        "sum_chain",
        lambda x, present=None, start=None: original(
            x[..., ::-1], None if present is None else present[..., ::-1], start
        ),
    )


def _no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "tree", lambda x: reference.sum_chain(x))


def _strided_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves added to each other, as a butterfly does, in place of adjacent pairs."""

    def tree(x: np.ndarray) -> np.ndarray:
        while (n := x.shape[-1]) > 1:
            x = reference.add(x[..., : n // 2], x[..., n // 2 :])
        return x[..., 0]

    monkeypatch.setattr(reference, "tree", tree)


def _reversed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    original = reference._rows
    monkeypatch.setattr(reference, "_rows", lambda *args: original(*args)[::-1])


def _one_head_leaf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_head_leaves", lambda heads: (heads, 1))


def _reversed_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    original = reference._fold
    monkeypatch.setattr(reference, "_fold", lambda t, has: original(t[::-1], has[::-1]))


def _unpaired(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree over gate's leaves, then up's."""
    original = reference._matmul

    def matmul(x: Any, w: Any, dtype: torch.dtype, leaf: int, leaves: int, paired: bool = False) -> np.ndarray:
        return original(x, w, dtype, leaf, leaves * (1 + paired))

    monkeypatch.setattr(reference, "_matmul", matmul)


def _summed_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chosen experts added one after the other."""
    monkeypatch.setattr(reference, "lane_tree", lambda x, present=None: reference.sum_chain(x, present))


def _swapped_fma(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product rounded before the sum."""
    monkeypatch.setattr(reference, "fma", lambda a, b, c: reference.add(reference.mul(a, b), c))


def _unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "rounded", lambda x, dtype: x)


def _extra_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums rounded to half precision before the storage dtype: twice where once is the rule."""
    original = reference.add
    monkeypatch.setattr(reference, "add", lambda a, b: reference.rounded(original(a, b), torch.float16))


def _other_argument(index: int, value: Any) -> Plant:
    """The reference runs with another argument (a cut, a segment length) than the kernel."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        original = Case.run

        def run(case: Case, backend: Any) -> list[Tensor]:
            if backend is reference:
                args = (*case.args[:index], value, *case.args[index + 1 :])
                case = Case(case.operator, args, case.mutated)
            return original(case, backend)

        monkeypatch.setattr(Case, "run", run)

    return plant


def _attention_case(backward: bool, tokens: int = 400) -> Case:
    q, k, v = _random(tokens, 4, 8), _random(tokens, 1, 8), _random(tokens, 1, 8)
    seqs = torch.tensor([[0, tokens, 0, 0, tokens]], dtype=torch.int32)
    rest = (1, 0.3, 0, 1 + backward)
    if not backward:
        return Case("attention", (q, k, v, seqs, *rest))
    forward = cpu.attention(q, k, v, seqs, *rest)
    halves = torch.tensor([[i, 200, i, 0, tokens] for i in (0, 200)], dtype=torch.int32)
    return Case("attention_backward", (_random(tokens, 4, 8), q, k, v, *forward, halves, *rest, False))


def _paged_case() -> Case:
    cache, table = _random(20, 1, 32, 16), torch.arange(20, dtype=torch.int32)[None]
    lengths = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([600], dtype=torch.int32)
    return Case("paged_attention", (_random(3, 2, 8), cache, table, *lengths, 0.3, 0, 2))


def _route_backward(score: str, renormalize: bool) -> Case:
    logits = _random(50, 200)
    ids = cpu.moe_route(logits, None, 6, score, renormalize, 1, 1, 2.5, 1e-20)[1]
    return Case("moe_route_backward", (_random(50, 6), logits, ids, score, renormalize, 2.5, 1e-20))


def _case(operator: str) -> Case:
    G.manual_seed(11)
    half = torch.bfloat16
    tokens = torch.arange(64) * 4
    logits, temperature = 3 * _random(64, 300), _random(64).abs() + 0.5
    if operator == "vocab_logprob":
        logits, tokens, temperature = 3 * _random(1000, 40), torch.arange(1000) % 40, _random(1000).abs() + 0.5
    if operator.startswith("vocab_logprob"):
        largest = cpu.vocab_max(logits, temperature)
        total, weighted = cpu.vocab_sums(logits, largest, temperature, 64, 8, True)
        if operator == "vocab_logprob":
            return Case(operator, (logits, tokens, largest, total, weighted, temperature, 0))
        entropy = cpu.vocab_logprob(logits, tokens, largest, total, weighted, temperature, 0)[1]
        rest = (entropy, _random(64), _random(64), temperature, 0, torch.float32)
        return Case(operator, (logits, tokens, largest, total, *rest))
    builders: dict[str, Callable[[], Case]] = {
        "linear": lambda: Case(operator, (_random(5, 192), _random(9, 192), _random(9), 24, 8, None)),
        "linear_dx": lambda: Case(operator, (_random(5, 192), _random(192, 9), 24, 8, None, False)),
        "linear_dx paired": lambda: Case("linear_dx", (_random(5, 192), _random(192, 9), 12, 8, None, True)),
        "linear_dw": lambda: Case(operator, (_random(96, 7), _random(96, 5), _random(7, 5), 3, None, 4, False), (2,)),
        "linear_db": lambda: Case(operator, (_random(96, 31), _random(31), 3, None, 4), (1,)),
        "grouped_linear": lambda: Case(
            operator, (_random(6, 192), _random(3, 9, 192), torch.tensor([0, 2, 2, 6]), 24, 8, None)
        ),
        "grouped_linear_dx": lambda: Case(
            operator, (_random(6, 192), _random(3, 192, 9), torch.tensor([0, 2, 2, 6]), 12, 8, None, True)
        ),
        "tree_sum": lambda: Case(operator, (_random(8, 5, 9), None, torch.float32)),
        "attention": lambda: _attention_case(False),
        "attention_backward": lambda: _attention_case(True),
        "paged_attention": _paged_case,
        "rms_norm": lambda: Case(operator, (_random(60, 700), _random(700), 1e-6)),
        "add_rms_norm": lambda: Case(
            operator, (_random(9, 300, dtype=half), _random(9, 300, dtype=half), _random(300, dtype=half), 1e-6)
        ),
        "rms_norm_backward": lambda: Case(
            operator, (_random(20, 300), _random(20, 300), _random(300), _random(20).abs(), _random(20, 300))
        ),
        "rms_norm_dw": lambda: Case(
            operator, (_random(96, 6, 30), _random(96, 6, 30), _random(96, 6).abs(), _random(30), 3, None, 4), (3,)
        ),
        "head_terms": lambda: Case(operator, (_random(20, 12, 30), _random(20, 12, 30), _random(20, 12).abs())),
        "residual_add": lambda: Case(operator, (_random(9, 300, dtype=half), _random(9, 300, dtype=half))),
        "rope": lambda: Case(operator, (_random(9, 3, 16), _random(9, 8), _random(9, 8), torch.arange(9), False)),
        "swiglu": lambda: Case(operator, (_random(9, 100),)),
        "swiglu_backward": lambda: Case(operator, (_random(9, 50), _random(9, 100))),
        "embedding_dw": lambda: Case(
            operator, (_random(24, 30), torch.arange(24) % 3, _random(3, 30), 0, 2, None), (2,)
        ),
        "vocab_sums": lambda: Case(operator, (logits, cpu.vocab_max(logits, None), None, 64, 8, True)),
        "token_logprob": lambda: Case(operator, (logits, tokens, temperature, 64, 8, True)),
        "moe_route": lambda: Case(operator, (_random(50, 60), None, 6, "softmax", True, 1, 1, 1.0, 0.0)),
        "moe_route all": lambda: Case("moe_route", (_random(50, 200), None, 6, "softmax", False, 1, 1, 1.0, 0.0)),
        "moe_route_backward": lambda: _route_backward("softmax", True),
        "moe_route_backward all": lambda: _route_backward("softmax", False),
        "moe_route_backward sigmoid": lambda: _route_backward("sigmoid", True),
        "expert_weight_backward": lambda: Case(operator, (_random(21, 960), _random(21, 960), _random(21), 120, 8)),
        "sigmoid_gate": lambda: Case(operator, (_random(9, 300), _random(9, 1))),
        "sigmoid_gate_backward": lambda: Case(operator, (_random(20, 300), _random(20, 300), _random(20, 1))),
        "moe_combine": lambda: Case(
            operator, (_random(30, 40), torch.randint(0, 30, (9, 6), generator=G), _random(9, 6))
        ),
        "exp": lambda: Case(operator, (3 * _random(1000),)),
        "log": lambda: Case(operator, (_random(1000).abs(),)),
    }
    return builders[operator]()


PLANTS: list[tuple[str, Plant]] = [
    ("linear", _reversed_chain),
    ("linear", _no_tree),
    ("linear", _strided_tree),
    ("linear", _swapped_fma),
    ("linear", _other_argument(3, 48)),
    ("linear_dx", _reversed_chain),
    ("linear_dx", _no_tree),
    ("linear_dx paired", _strided_tree),
    ("linear_dx paired", _unpaired),
    ("grouped_linear_dx", _unpaired),
    ("linear_dw", _reversed_chain),
    ("linear_dw", _reversed_rows),
    ("linear_dw", _other_argument(5, 1)),
    ("linear_db", _reversed_sum_chain),
    ("linear_db", _reversed_rows),
    ("linear_db", _strided_tree),
    ("grouped_linear", _reversed_chain),
    ("grouped_linear", _no_tree),
    ("grouped_linear_dx", _reversed_chain),
    ("grouped_linear_dx", _no_tree),
    ("tree_sum", _no_tree),
    ("tree_sum", _strided_tree),
    ("attention", _constant(kv_block=64)),
    ("attention", _constant(lanes=32)),
    ("attention", _constant(multiply_add="mul-add")),
    ("attention", _other_argument(7, 16)),
    ("attention", _reversed_chain),
    ("attention_backward", _constant(kv_block=64)),
    ("attention_backward", _other_argument(11, 16)),
    ("attention_backward", _reversed_chain),
    ("attention_backward", _reversed_blocks),
    ("attention_backward", _constant(attention_gradient="chain")),
    ("attention_backward", _strided_tree),
    ("attention_backward", _one_head_leaf),
    ("paged_attention", _constant(kv_block=64)),
    ("paged_attention", _constant(lanes=32)),
    ("paged_attention", _other_argument(7, 16)),
    ("rms_norm", _constant(lanes=32)),
    ("rms_norm", _strided_tree),
    ("rms_norm", _reversed_sum_chain),
    ("add_rms_norm", _constant(lanes=32)),
    ("add_rms_norm", _unrounded),
    ("rms_norm_backward", _constant(lanes=32)),
    ("rms_norm_backward", _constant(multiply_add="mul-add")),
    ("rms_norm_dw", _reversed_chain),
    ("rms_norm_dw", _reversed_sum_chain),
    ("rms_norm_dw", _reversed_rows),
    ("rms_norm_dw", _one_head_leaf),
    ("rms_norm_dw", _other_argument(6, 1)),
    ("head_terms", _one_head_leaf),
    ("head_terms", _reversed_chain),
    ("head_terms", _strided_tree),
    ("residual_add", _extra_rounding),
    ("rope", _constant(multiply_add="mul-add")),
    ("swiglu", _constant(transcendental="hardware")),
    ("swiglu_backward", _constant(multiply_add="mul-add")),
    ("embedding_dw", _reversed_rows),
    ("vocab_sums", _constant(lanes=32)),
    ("vocab_sums", _other_argument(3, 128)),
    ("vocab_sums", _strided_tree),
    ("vocab_logprob", _constant(transcendental="hardware")),
    ("vocab_logprob_backward", _constant(transcendental="hardware")),
    ("vocab_logprob_backward", _constant(multiply_add="mul-add")),
    ("token_logprob", _constant(lanes=32)),
    ("token_logprob", _other_argument(3, 128)),
    ("moe_route", _summed_chosen),
    ("moe_route all", _constant(lanes=32)),
    ("moe_route_backward", _summed_chosen),
    ("moe_route_backward all", _constant(lanes=32)),
    ("moe_route_backward sigmoid", _summed_chosen),
    ("moe_route_backward sigmoid", _constant(transcendental="hardware")),
    ("expert_weight_backward", _constant(lanes=32)),
    ("expert_weight_backward", _no_tree),
    ("expert_weight_backward", _strided_tree),
    ("expert_weight_backward", _other_argument(3, 240)),
    ("sigmoid_gate", _constant(transcendental="hardware")),
    ("sigmoid_gate_backward", _constant(lanes=32)),
    ("sigmoid_gate_backward", _strided_tree),
    ("moe_combine", _reversed_chain),
    ("moe_combine", _constant(multiply_add="mul-add")),
    ("exp", _constant(transcendental="hardware")),
    ("exp", _swapped_fma),
    ("log", _constant(transcendental="hardware")),
]


@pytest.mark.parametrize(("operator", "plant"), PLANTS)
def test_a_planted_change_is_seen(operator: str, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    case = _case(operator)
    actual = case.run(cpu)
    for a, b in zip(actual, case.run(reference), strict=True):
        assert same_bits(a, b), "equal before the change"
    plant(monkeypatch)
    assert not all(same_bits(a, b) for a, b in zip(actual, case.run(reference), strict=True))
