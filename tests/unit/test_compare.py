"""Comparison of two engines' log-probabilities: bits decide, and nothing that is absent counts as equal."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mindspeed_tpi.errors import InputError
from mindspeed_tpi.parity.compare import compare
from mindspeed_tpi.parity.rollout import Rollout


def rollout(logprobs: list[float], prompt: int = 1) -> Rollout:
    """One sequence: `prompt` tokens, then one token per log-probability."""
    total = prompt + len(logprobs)
    return Rollout(
        token_ids=torch.arange(total),
        offsets=torch.tensor([0, total]),
        prompt_lengths=torch.tensor([prompt]),
        positions=torch.arange(total),
        logprobs=torch.tensor([math.nan] * prompt + logprobs),
        weight_versions=torch.zeros(total, dtype=torch.int64),
        temperatures=torch.ones(1),
    )


def train(logprobs: list[float], prompt: int = 1) -> Tensor:
    return torch.tensor([math.nan] * prompt + logprobs)


finite = st.floats(-100, 0, width=32)


@given(st.lists(finite, min_size=1, max_size=20), st.integers(1, 5))
def test_equal_values_are_exact(values: list[float], prompt: int) -> None:
    found = compare(rollout(values, prompt), train(values, prompt), len(values))
    assert found.exact and found.tokens == len(values)
    assert (found.nonzero, found.max_abs, found.mean_abs) == (0, 0.0, 0.0)


@given(st.lists(finite, min_size=1, max_size=20), st.data())
def test_one_last_bit_is_seen(values: list[float], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(values) - 1))
    theirs = torch.tensor(values)
    theirs[place] = torch.nextafter(theirs[place], torch.tensor(-math.inf))
    found = compare(rollout(values), train(theirs.tolist()), len(values))
    assert not found.exact and found.nonzero == 1
    assert int((found.logdiff != 0).sum()) == 1 or theirs[place].abs() < 1e-37


def test_signed_zero_is_a_difference_of_bits() -> None:
    found = compare(rollout([0.0]), train([-0.0]), 1)
    assert found.nonzero == 1 and found.max_abs == 0 and not found.exact


def test_logdiff_is_training_minus_rollout() -> None:
    found = compare(rollout([-1.0, -2.0]), train([-0.5, -2.25]), 2)
    assert found.logdiff.tolist() == [0.5, -0.25]
    assert (found.nonzero, found.max_abs, found.mean_abs) == (2, 0.5, 0.375)
    assert found.first == (0, 1)


@pytest.mark.parametrize(("ours", "theirs"), [([math.nan], [-1.0]), ([-1.0], [math.nan]), ([math.nan], [math.nan])])
def test_nan_is_a_failure_even_when_both_sides_agree(ours: list[float], theirs: list[float]) -> None:
    found = compare(rollout(theirs), train(ours), 1)
    assert not found.exact and found.nan == 1 and found.nonzero == 1


@pytest.mark.parametrize("ours", [[], [-1.0], [-1.0, -2.0, -3.0]])
def test_unequal_counts_are_a_failure(ours: list[float]) -> None:
    assert compare(rollout([-1.0, -2.0]), train(ours), 2).missing == abs(2 - len(ours))
    assert not compare(rollout([-1.0, -2.0]), train(ours), 2).exact


@pytest.mark.parametrize("expected", [1, 3])
def test_more_or_fewer_tokens_than_asked_for_is_a_failure(expected: int) -> None:
    found = compare(rollout([-1.0, -2.0]), train([-1.0, -2.0]), expected)
    assert found.missing == 1 and not found.exact


def test_no_token_is_no_proof() -> None:
    found = compare(rollout([]), train([]), 0)
    assert not found.exact and found.tokens == 0


def test_json_has_no_nan_or_infinity() -> None:
    found = compare(rollout([-1.0, -math.inf]), train([math.nan, -1.0]), 2)
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["max_abs"] is None


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(InputError, match="must be 1-D float32, got torch.bfloat16"):
        compare(rollout([-1.0]), train([-1.0]).bfloat16(), 1)
