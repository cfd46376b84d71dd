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
    (x,) = cases.swiglu(cases.Drawn(data)).args
    f = x.shape[-1] // 2
    whole, half = cpu.swiglu(x), f // 2
    gate, up = x[..., :f], x[..., f:]
    parts = [cpu.swiglu(torch.cat((gate[..., i], up[..., i]), -1)) for i in (slice(0, half), slice(half, f))]
    assert_same_bits(torch.cat(parts, -1), whole)


@pytest.mark.parametrize("backend", [cpu, reference])
def test_errors(backend: object) -> None:
    with pytest.raises(BackendError):
        backend.swiglu(torch.zeros(2, 7))
    with pytest.raises(BackendError):
        backend.swiglu_backward(torch.zeros(2, 3), torch.zeros(2, 8))
