"""Embedding and its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_tpi.errors import BackendError
from mindspeed_tpi.ops.backends import cpu, reference
from tests.ops import cases
from tests.ops.bits import assert_same_bits
from tests.ops.equality import check_drawn


@pytest.mark.parametrize("operator", ("embedding", "embedding_dw"))
@given(st.data())
def test_cpu_equals_reference(operator: str, data: st.DataObject) -> None:
    check_drawn(operator, data)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("backend", [cpu, reference])
def test_a_copy_keeps_every_bit_pattern(backend: Any, dtype: torch.dtype) -> None:
    """Also NaN payloads, which torch's own bfloat16 copies change (found by seed 13763 of the long mode)."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).unsqueeze(1)
    rows = torch.randperm(len(bits), generator=torch.Generator().manual_seed(0))
    found = backend.embedding(bits.view(dtype), rows, 0, len(bits))
    assert torch.equal(found.view(torch.int16), bits[rows])


@given(st.data())
def test_ranks_that_split_the_vocabulary_add_only_zeros(data: st.DataObject) -> None:
    s = cases.Drawn(data)
    vocab = 2 * s.integer(1, 6)
    weight = cases.values(s, (vocab, s.integer(1, 9)), s.choice(cases.DTYPES), ("normal", "wide"))
    ids = torch.randint(0, vocab, (s.integer(0, 6),), generator=cases.generator(s))
    parts = [cpu.embedding(weight[i : i + vocab // 2], ids, i, vocab) for i in (0, vocab // 2)]
    assert_same_bits(parts[0] + parts[1], cpu.embedding(weight, ids, 0, vocab))
    dy = cases.values(s, (len(ids), weight.shape[1]), weight.dtype)
    whole, split = torch.zeros(weight.shape), torch.zeros(weight.shape)
    cpu.embedding_dw(dy, ids, whole, 0, 1, None)
    for i in (0, vocab // 2):
        cpu.embedding_dw(dy, ids, split[i : i + vocab // 2], i, 1, None)
    assert_same_bits(split, whole)


@pytest.mark.parametrize("backend", [cpu, reference])
@pytest.mark.parametrize("token", (-1, 8))
def test_an_id_outside_the_vocabulary(backend: object, token: int) -> None:
    with pytest.raises(BackendError):
        backend.embedding(torch.zeros(4, 2), torch.tensor([token]), 0, 8)
