"""Routing and combination of experts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_tpi import contract
from mindspeed_tpi.errors import BackendError
from mindspeed_tpi.ops.backends import cpu, reference
from tests.ops import cases
from tests.ops.accuracy import assert_near
from tests.ops.bits import assert_same_bits, bits
from tests.ops.equality import check_drawn

OPERATORS = (
    "moe_route", "moe_route_backward", "moe_combine", "expert_weight_backward", "sigmoid_gate", "sigmoid_gate_backward",
)  # fmt: skip


@pytest.mark.parametrize("operator", OPERATORS)
@given(st.data())
def test_cpu_equals_reference(operator: str, data: st.DataObject) -> None:
    check_drawn(operator, data)


@given(st.data())
def test_a_token_is_routed_by_its_own_logits(data: st.DataObject) -> None:
    logits, *rest = cases.moe_route(cases.Drawn(data)).args
    weights, ids = cpu.moe_route(logits, *rest)
    for t in range(len(logits)):
        w, i = cpu.moe_route(logits[t : t + 1], *rest)
        assert_same_bits(w[0], weights[t])
        assert_same_bits(i[0], ids[t])


@given(st.data())
def test_the_rows_of_the_outputs_may_be_permuted(data: st.DataObject) -> None:
    s = cases.Drawn(data)
    y, slots, weights = cases.moe_combine(s).args
    order = torch.randperm(len(y), generator=cases.generator(s))
    place = torch.empty_like(order)
    place[order] = torch.arange(len(y))
    moved = torch.where(slots < 0, slots, place[slots.clamp(min=0)])
    assert_same_bits(cpu.moe_combine(y[order], moved, weights), cpu.moe_combine(y, slots, weights))


@given(st.data())
def test_ranks_that_split_the_features_give_the_same_weight_gradient(data: st.DataObject) -> None:
    s = cases.Drawn(data)
    ranks = s.choice((1, 2, 4, 8))
    f = ranks * s.integer(1, 40) * s.choice((1, 8))
    g, a = cases.operand(s, (s.integer(1, 20), f), torch.float32), cases.operand(s, (1, f), s.choice(cases.DTYPES))
    a, weights = a.expand(len(g), f), cases.values(s, (len(g),), torch.float32)
    cut = contract.current().leaves(f, "expert")
    dweights, da = cpu.expert_weight_backward(g, a, weights, cut.size, cut.count)
    if cut.count < ranks:
        return
    own = cut.shard(ranks)
    parts = [
        cpu.expert_weight_backward(*pair, weights, own.size, own.count)
        for pair in zip(g.chunk(ranks, 1), a.chunk(ranks, 1), strict=True)
    ]
    assert_same_bits(cpu.tree_sum(torch.stack([root for root, _ in parts]), None, torch.float32), dweights)
    assert_same_bits(torch.cat([part for _, part in parts], 1), da)


def _chosen(keys: list[float], k: int) -> list[int]:
    """The k largest, ties to the smaller index."""
    return sorted(sorted(range(len(keys)), key=lambda e: (-keys[e], e))[:k])


@given(st.data())
def test_the_choice_is_the_largest_keys_with_ties_to_the_smaller_id(data: st.DataObject) -> None:
    """Against a plain sort, with many ties: groups, expert bias, k up to every candidate."""
    s = cases.Drawn(data)
    score, groups = s.choice((("softmax", 1), ("sigmoid", 1), ("sigmoid", 2), ("sigmoid", 4)))
    size = s.integer(2, 6)
    experts, kept = groups * size, s.integer(1, groups)
    topk = s.choice((1, s.integer(1, kept * size), kept * size))
    logits = torch.tensor([[s.choice((-1.0, 0.0, 0.5, 2.0)) for _ in range(experts)]])
    bias = torch.tensor([s.choice((0.0, 0.25)) for _ in range(experts)]) if s.choice((True, False)) else None
    bias = bias if score == "sigmoid" else None
    ids = cpu.moe_route(logits, bias, topk, score, True, groups, kept, 1.0, 1e-20)[1]
    keys = logits[0] if score == "softmax" else 1 / (1 + cpu.exp(-logits[0])) + (0 if bias is None else bias)
    candidates = range(experts)
    if groups > 1:
        two = keys.view(groups, size).topk(2).values
        best = _chosen((two[:, 0] + two[:, 1]).tolist(), kept)
        candidates = [e for e in range(experts) if e // size in best]
    assert ids[0].tolist() == [candidates[i] for i in _chosen([float(keys[e]) for e in candidates], topk)]


@given(st.data())
def test_experts_without_tokens_change_nothing(data: st.DataObject) -> None:
    s = cases.Drawn(data)
    x, weight, offsets, *rest = cases.grouped_linear(s).args
    used = offsets.diff() > 0
    kept = torch.cat((offsets[:1], offsets[1:][used]))
    assert_same_bits(cpu.grouped_linear(x, weight[used], kept, *rest), cpu.grouped_linear(x, weight, offsets, *rest))
    nothing = torch.zeros(len(weight) + 1, dtype=torch.int64)
    assert cpu.grouped_linear(x[:0], weight, nothing, *rest).shape == (0, weight.shape[1])


@given(st.data())
def test_gradients_of_experts_that_were_not_chosen_are_positive_zero(data: st.DataObject) -> None:
    s = cases.Drawn(data)
    dweights, logits, ids, score, renormalize, *rest = cases.moe_route_backward(s).args
    if score == "softmax" and not renormalize:
        return
    dlogits = cpu.moe_route_backward(dweights, logits, ids, score, renormalize, *rest)
    others = torch.ones(logits.shape, dtype=torch.bool).scatter_(1, ids.long(), False)
    assert not bool(bits(dlogits)[others].any())


def test_ties_go_to_the_smaller_id() -> None:
    for backend in (cpu, reference):
        for score in ("softmax", "sigmoid"):
            _, ids = backend.moe_route(torch.zeros(1, 8), None, 3, score, True, 1, 1, 1.0, 0.0)
            assert ids.tolist() == [[0, 1, 2]]
        _, ids = backend.moe_route(torch.zeros(1, 8), None, 2, "sigmoid", True, 4, 2, 1.0, 0.0)
        assert ids.tolist() == [[0, 1]]


@given(st.data())
def test_a_nan_logit_is_refused(data: st.DataObject) -> None:
    s = cases.Drawn(data)
    backend, backward = s.choice((cpu, reference)), s.choice((True, False))
    case = (cases.moe_route_backward if backward else cases.moe_route)(s)
    logits = case.args[1 if backward else 0].clone()
    if not logits.numel():
        return
    logits.view(-1)[s.integer(0, logits.numel() - 1)] = float("nan")
    args = (case.args[0], logits, *case.args[2:]) if backward else (logits, *case.args[1:])
    with pytest.raises(BackendError, match="NaN"):
        getattr(backend, case.operator)(*args)


@given(st.data())
def test_the_weights_of_all_experts_sum_to_the_scaling(data: st.DataObject) -> None:
    """k = E, renormalized: the ids are all experts in order, and the weights a partition of the scaling."""
    s = cases.Drawn(data)
    score, experts = s.choice(("softmax", "sigmoid")), s.integer(1, 70)
    logits = cases.values(s, (s.integer(1, 4), experts), torch.float32, ("normal",))
    weights, ids = cpu.moe_route(logits, None, experts, score, True, 1, 1, 2.5, 0.0)
    assert torch.equal(ids, torch.arange(experts, dtype=torch.int32).expand(ids.shape))
    assert_near(weights.sum(-1), torch.full((len(ids),), 2.5).double(), 2.5, 2 * experts + 4)


@pytest.mark.parametrize("backend", [cpu, reference])
def test_errors(backend: object) -> None:
    logits = torch.zeros(1, 8)
    for options in (
        (None, 9, "softmax", True, 1, 1),
        (None, 1, "softplus", True, 1, 1),
        (None, 1, "sigmoid", True, 3, 1),
    ):
        with pytest.raises(BackendError):
            backend.moe_route(logits, *options, 1.0, 0.0)
    ids = torch.tensor([[1, 8]], dtype=torch.int32)
    for call in (
        lambda: backend.moe_route_backward(torch.zeros(1, 2), logits, ids, "softmax", True, 1.0, 0.0),
        lambda: backend.moe_route_backward(torch.zeros(1, 2), logits, ids % 8, "softplus", True, 1.0, 0.0),
        lambda: backend.moe_route_backward(torch.zeros(1, 2), logits / 0, ids % 8, "softmax", True, 1.0, 0.0),
        lambda: backend.moe_route_backward(torch.zeros(1, 3), logits, ids % 8, "softmax", True, 1.0, 0.0),
        lambda: backend.expert_weight_backward(torch.zeros(2, 8), torch.zeros(2, 8), torch.zeros(3), 8, 1),
        lambda: backend.expert_weight_backward(torch.zeros(2, 8), torch.zeros(2, 8), torch.zeros(2), 3, 2),
        lambda: backend.sigmoid_gate(torch.zeros(2, 8), torch.zeros(2)),
        lambda: backend.sigmoid_gate_backward(torch.zeros(2, 8), torch.zeros(2, 8), torch.zeros(2, 1).half()),
    ):
        with pytest.raises(BackendError):
            call()
    with pytest.raises(BackendError):
        backend.moe_combine(torch.zeros(2, 4), torch.tensor([[2]]), torch.ones(1, 1))
