"""SwiGLU."""

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


@pytest.mark.parametrize("operator", ("swiglu", "swiglu_backward"))
@given(st.data())
def test_cpu_equals_reference(operator: str, data: st.DataObject) -> None:
    check_drawn(operator, data)


@given(st.data())
def test_ranks_that_split_the_features_give_the_same_bits(data: st.DataObject) -> None:
    s = cases.Drawn(data)
    ranks = s.choice((1, 2, 4))
    x = cases.operand(s, (s.integer(0, 5), 2 * ranks * s.integer(1, 20)), s.choice(cases.DTYPES))
    gate, up = (half.chunk(ranks, -1) for half in x.chunk(2, -1))
    parts = [cpu.swiglu(torch.cat(pair, -1)) for pair in zip(gate, up, strict=True)]
    assert_same_bits(torch.cat(parts, -1), cpu.swiglu(x))


@pytest.mark.parametrize("backend", [cpu, reference])
def test_errors(backend: object) -> None:
    with pytest.raises(BackendError):
        backend.swiglu(torch.zeros(2, 7))
    with pytest.raises(BackendError):
        backend.swiglu_backward(torch.zeros(2, 3), torch.zeros(2, 8))
