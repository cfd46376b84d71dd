"""Rotary embedding."""

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


@given(st.data())
def test_cpu_equals_reference(data: st.DataObject) -> None:
    check_drawn("rope", data)


@given(st.data())
def test_a_token_depends_on_its_position_alone(data: st.DataObject) -> None:
    x, cos, sin, positions, inverse = cases.rope(cases.Drawn(data)).args
    y = cpu.rope(x, cos, sin, positions, inverse)
    for t in range(len(x)):
        assert_same_bits(cpu.rope(x[t : t + 1], cos, sin, positions[t : t + 1], inverse)[0], y[t])
    order = torch.arange(len(x) - 1, -1, -1)
    assert_same_bits(cpu.rope(x[order], cos, sin, positions[order], inverse), y[order])


@given(st.data())
def test_the_rest_of_the_head_is_copied(data: st.DataObject) -> None:
    x, cos, *rest = cases.rope(cases.Drawn(data)).args
    y = cpu.rope(x, cos, *rest)
    half = 2 * cos.shape[1]
    exact = ~x[..., half:].isnan()
    assert_same_bits(y[..., half:][exact], x[..., half:][exact])


@pytest.mark.parametrize("backend", [cpu, reference])
@pytest.mark.parametrize("position", (-1, 4))
def test_positions_outside_the_table(backend: object, position: int) -> None:
    table = torch.zeros(4, 4)
    with pytest.raises(BackendError):
        backend.rope(torch.zeros(1, 1, 8), table, table, torch.tensor([position]), False)


@pytest.mark.parametrize("backend", [cpu, reference])
def test_rotary_dim_beyond_the_head(backend: object) -> None:
    table = torch.zeros(4, 5)
    with pytest.raises(BackendError):
        backend.rope(torch.zeros(1, 1, 8), table, table, torch.tensor([0]), False)
