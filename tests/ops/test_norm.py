"""RMSNorm and its gradients."""

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


@pytest.mark.parametrize(
    "operator",
    (
        "rms_norm", "add_rms_norm", "rms_norm_backward", "rms_norm_dw", "head_terms", "residual_add",
    ),
)  # fmt: skip
@given(st.data())
def test_cpu_equals_reference(operator: str, data: st.DataObject) -> None:
    check_drawn(operator, data)


@given(st.data())
def test_a_row_does_not_depend_on_the_others(data: st.DataObject) -> None:
    x, weight, eps = cases.rms_norm(cases.Drawn(data)).args
    y, rstd = cpu.rms_norm(x, weight, eps)
    for t in range(len(x)):
        row, r = cpu.rms_norm(x[t], weight, eps)
        assert_same_bits(row, y[t])
        assert_same_bits(r, rstd[t])


@given(st.data())
def test_the_residual_add_is_rounded_first(data: st.DataObject) -> None:
    x, residual, weight, eps = cases.add_rms_norm(cases.Drawn(data)).args
    y, total, rstd = cpu.add_rms_norm(x, residual, weight, eps)
    again, r = cpu.rms_norm(total, weight, eps)
    assert_same_bits(again, y)
    assert_same_bits(r, rstd)


@given(st.data())
def test_ranks_that_split_the_heads_give_the_same_weight_gradient(data: st.DataObject) -> None:
    s = cases.Drawn(data)
    dtype, ranks, batch, spans = s.choice(cases.DTYPES), s.choice((1, 2, 4, 8)), s.integer(1, 3), s.choice((1, 8))
    shape = (batch * s.integer(1, 9), ranks * s.integer(1, 4), s.integer(1, 40))
    dy, x = cases.operand(s, shape, dtype), cases.operand(s, shape, dtype)
    rstd = cases.values(s, shape[:-1], torch.float32, ("normal",)).abs()
    whole, exchanged = (torch.ones(shape[-1]) for _ in range(2))
    cpu.rms_norm_dw(dy, x, rstd, whole, batch, None, spans)
    terms = [cpu.head_terms(*parts) for parts in zip(*(t.chunk(ranks, 1) for t in (dy, x, rstd)), strict=True)]
    cpu.linear_db(cpu.tree_sum(torch.stack(terms), None, torch.float32), exchanged, batch, None, spans)
    assert_same_bits(exchanged, whole)


@given(st.data())
def test_ranks_that_own_spans_give_the_same_weight_gradient(data: st.DataObject) -> None:
    s = cases.Drawn(data)
    dtype, ranks, spans = s.choice(cases.DTYPES), s.choice((1, 2, 4, 8)), 8
    shape = (spans * s.integer(1, 3), *s.choice(((), (1,), (3,), (4,))), s.integer(1, 40))
    dy, x = cases.operand(s, shape, dtype), cases.operand(s, shape, dtype)
    rstd = cases.values(s, shape[:-1], torch.float32, ("normal",)).abs()
    whole = torch.zeros(shape[-1])
    cpu.rms_norm_dw(dy, x, rstd, whole, 1, None, spans)
    roots = [torch.zeros(shape[-1]) for _ in range(ranks)]
    for root, *parts in zip(roots, *(t.chunk(ranks) for t in (dy, x, rstd)), strict=True):
        cpu.rms_norm_dw(*parts, root, 1, None, spans // ranks)
    assert_same_bits(cpu.tree_sum(torch.stack(roots), None, torch.float32), whole)


@pytest.mark.parametrize("backend", [cpu, reference])
def test_errors(backend: object) -> None:
    with pytest.raises(BackendError):
        backend.rms_norm(torch.zeros(2, 8), torch.zeros(7), 1e-6)
    with pytest.raises(BackendError):
        backend.rms_norm(torch.zeros(2, 8), torch.zeros(8).half(), 1e-6)


def test_one_row_without_leading_dimensions() -> None:
    x, weight = torch.randn(130), torch.randn(130)
    for backend in (reference, cpu):
        assert [t.shape for t in backend.rms_norm(x, weight, 1e-5)] == [(130,), ()]
