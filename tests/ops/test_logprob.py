"""Log-probabilities of chosen tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_tpi import contract, ops
from mindspeed_tpi.errors import BackendError
from mindspeed_tpi.ops.backends import cpu, reference
from mindspeed_tpi.parallel.logprob import linear_logprob
from tests.ops import cases
from tests.ops.bits import assert_same_bits
from tests.ops.equality import check_drawn

OPERATORS = ("vocab_max", "vocab_sums", "vocab_logprob", "vocab_logprob_backward", "token_logprob")


@pytest.mark.parametrize("operator", OPERATORS)
@given(st.data())
def test_cpu_equals_reference(operator: str, data: st.DataObject) -> None:
    check_drawn(operator, data)


@given(st.data())
def test_ranks_that_split_the_vocabulary_give_the_same_bits(data: st.DataObject) -> None:
    s = cases.Drawn(data)
    ranks, tokens = s.choice((1, 2, 4, 8)), s.integer(1, 4)
    cut = contract.current().vocab_leaves(v := s.integer(8, 200))
    logits = cases.values(s, (tokens, v), torch.float32)
    temperature = s.choice((None, cases.values(s, (tokens,), torch.float32, ("normal",)).abs() + 0.1))
    chosen = torch.randint(0, v, (tokens,), generator=cases.generator(s))
    own = cut.shard(ranks)
    starts = [i for i in range(0, ranks * own.size * own.count, own.size * own.count) if i < v]
    parts = [logits[:, i : i + own.size * own.count] for i in starts]
    largest = torch.stack([cpu.vocab_max(p, temperature) for p in parts]).amax(0)
    sums = [cpu.vocab_sums(p, largest, temperature, own.size, own.count, True) for p in parts]
    absent = torch.zeros(ranks - len(parts), tokens)
    total, weighted = (
        cpu.tree_sum(torch.cat((torch.stack(x), absent)), None, torch.float32) for x in zip(*sums, strict=True)
    )
    owned = [
        cpu.vocab_logprob(p, chosen, largest, total, weighted, temperature, i)
        for p, i in zip(parts, starts, strict=True)
    ]
    logprob, entropy, m, whole = cpu.token_logprob(logits, chosen, temperature, cut.size, cut.count, True)
    assert_same_bits(total, whole, "S")
    for t in range(tokens):
        owner = next(r for r, i in enumerate(starts) if i <= chosen[t] < i + own.size * own.count)
        assert_same_bits(owned[owner][0][t], logprob[t], "logprob")
    assert_same_bits(owned[0][1], entropy, "entropy")


@given(st.data())
def test_a_row_does_not_depend_on_the_others(data: st.DataObject) -> None:
    logits, tokens, temperature, *rest = cases.token_logprob(cases.Drawn(data)).args
    whole = cpu.token_logprob(logits, tokens, temperature, *rest)
    for t in range(len(logits)):
        row = slice(t, t + 1)
        alone = cpu.token_logprob(logits[row], tokens[row], None if temperature is None else temperature[row], *rest)
        for a, b in zip(alone, whole, strict=True):
            assert_same_bits(a, b[row])


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_fused_with_the_projection_in_chunks(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(7, 24, generator=g).to(dtype), torch.randn(50, 24, generator=g).to(dtype)
    tokens = torch.randint(0, 50, (7,), generator=g)
    logits = ops.linear(hidden, weight, out_dtype=torch.float32)
    expected = ops.token_logprob(logits, tokens, torch.tensor([0.7]), entropy=True)
    for chunk in (1, 3, 7, 100):
        fused = linear_logprob(hidden, weight, tokens, temperature=torch.tensor([0.7]), entropy=True, chunk=chunk)
        for a, b in zip(fused, expected, strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("backend", [cpu, reference])
@pytest.mark.parametrize("token", (-1, 9))
def test_a_token_outside_the_vocabulary(backend: object, token: int) -> None:
    with pytest.raises(BackendError):
        backend.token_logprob(torch.zeros(1, 9), torch.tensor([token]), None, 9, 1, False)


@pytest.mark.parametrize("backend", [cpu, reference])
def test_logits_must_be_float32(backend: object) -> None:
    with pytest.raises(BackendError):
        backend.vocab_max(torch.zeros(1, 9, dtype=torch.bfloat16), None)
