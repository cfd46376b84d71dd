"""Routing and combination of experts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_tpi.errors import BackendError
from mindspeed_tpi.ops.backends import cpu, reference
from tests.ops import cases
from tests.ops.bits import assert_same_bits
from tests.ops.equality import check_drawn


@pytest.mark.parametrize("operator", ("moe_route", "moe_combine"))
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


def test_ties_go_to_the_smaller_id() -> None:
    for backend in (cpu, reference):
        for score in ("softmax", "sigmoid"):
            _, ids = backend.moe_route(torch.zeros(1, 8), None, 3, score, True, 1, 1, 1.0, 0.0)
            assert ids.tolist() == [[0, 1, 2]]
        _, ids = backend.moe_route(torch.zeros(1, 8), None, 2, "sigmoid", True, 4, 2, 1.0, 0.0)
        assert ids.tolist() == [[0, 1]]


@pytest.mark.parametrize("backend", [cpu, reference])
@pytest.mark.parametrize("score", ("softmax", "sigmoid"))
def test_nan_logits(backend: object, score: str) -> None:
    with pytest.raises(BackendError, match="NaN"):
        backend.moe_route(torch.tensor([[1.0, float("nan"), 2.0]]), None, 1, score, True, 1, 1, 1.0, 0.0)


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
    with pytest.raises(BackendError):
        backend.moe_combine(torch.zeros(2, 4), torch.tensor([[2]]), torch.ones(1, 1))
