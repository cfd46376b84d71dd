"""Gradient groups: what they ask of a step, and the order they add in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from mindspeed_tpi import envs
from mindspeed_tpi.errors import InputError, ParityError
from mindspeed_tpi.ops import gradient_groups
from mindspeed_tpi.ops._autograd import parameter_gradient


@pytest.fixture
def flag(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setenv(envs.GRADIENT_GROUPS.name, "4")
    yield monkeypatch
    monkeypatch.setenv(envs.GRADIENT_GROUPS.name, "0")
    gradient_groups.begin_step(1, 1)


ROWS = [torch.tensor([1e8]), torch.tensor([3.0]), torch.tensor([-1e8]), torch.tensor([5.0])]


def total(rows: list[Tensor], micro_batch: int = 1) -> Tensor:
    grad = torch.zeros(1)
    for first in range(0, len(rows), micro_batch):
        part = rows[first : first + micro_batch]
        gradient_groups.accumulate(grad, lambda g, part=part: [g.add_(row) for row in part], len(part), 1)
    gradient_groups.check_complete(grad)
    return grad


def test_groups_are_added_by_a_tree(flag: pytest.MonkeyPatch) -> None:
    assert gradient_groups.begin_step(4, 1) == 1
    assert torch.equal(total(ROWS), (ROWS[0] + ROWS[1]) + (ROWS[2] + ROWS[3]))
    in_order = ROWS[0] + ROWS[1] + ROWS[2] + ROWS[3]
    assert not torch.equal(in_order, (ROWS[0] + ROWS[1]) + (ROWS[2] + ROWS[3]))
    flag.setenv(envs.GRADIENT_GROUPS.name, "0")
    assert torch.equal(total(ROWS), in_order)


def test_ranks_hold_subtrees(flag: pytest.MonkeyPatch) -> None:
    rows = [torch.randn(3, generator=torch.Generator().manual_seed(i)) * 10**i for i in range(8)]
    gradient_groups.begin_step(8, 1)
    whole = torch.zeros(3)
    for row in rows:
        gradient_groups.accumulate(whole, lambda g, row=row: g.add_(row), 1, 1)
    halves = []
    for half in (rows[:4], rows[4:]):
        gradient_groups.begin_step(4, 2)
        halves.append(torch.zeros(3))
        for row in half:
            gradient_groups.accumulate(halves[-1], lambda g, row=row: g.add_(row), 1, 1)
    assert torch.equal(whole, halves[0] + halves[1])


@pytest.mark.parametrize(("rows", "ranks", "message"), [(6, 1, "multiple of 4 rows"), (8, 8, "8 data-parallel ranks")])
def test_steps_that_do_not_fit_are_refused(flag: pytest.MonkeyPatch, rows: int, ranks: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        gradient_groups.begin_step(rows, ranks)


@pytest.mark.parametrize("value", ("3", "-4", "two"))
def test_a_count_that_is_no_power_of_two_is_refused(flag: pytest.MonkeyPatch, value: str) -> None:
    flag.setenv(envs.GRADIENT_GROUPS.name, value)
    with pytest.raises(InputError, match=f"'{value}' is not a power of two"):
        gradient_groups.count()


def test_a_micro_batch_across_groups_is_refused(flag: pytest.MonkeyPatch) -> None:
    gradient_groups.begin_step(8, 1)
    with pytest.raises(ParityError, match="micro-batch of 4 rows crosses the end of a group of 2 rows"):
        total(ROWS * 2, micro_batch=4)


def test_more_rows_than_announced_are_refused(flag: pytest.MonkeyPatch) -> None:
    gradient_groups.begin_step(4, 1)
    with pytest.raises(ParityError, match="begin every step"):
        total(ROWS * 2)


def test_a_gradient_that_lacks_rows_is_not_reduced(flag: pytest.MonkeyPatch) -> None:
    gradient_groups.begin_step(4, 1)
    with pytest.raises(ParityError, match="after 3 of 4 rows"):
        total(ROWS[:3])


def test_no_step_and_no_main_grad_are_refused(flag: pytest.MonkeyPatch) -> None:
    flag.setattr(gradient_groups, "_step", None)
    with pytest.raises(ParityError, match="no step has begun"):
        total(ROWS)
    with pytest.raises(ParityError, match="wrap the model in DistributedDataParallel"):
        parameter_gradient(torch.zeros(1), lambda g: None, 1)
