"""Gradients that no data-parallel layout decides (contract section 9, behind `MINDSPEED_TPI_GRADIENT_GROUPS`).

The global batch is cut in G contiguous groups of rows. Rows are added in order inside a group, and groups by a balanced tree.
Data-parallel rank r works through the r-th contiguous run of groups, so what it holds after its last row is a whole subtree,
which the tree over ranks continues.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_tpi import envs
from mindspeed_tpi.errors import InputError, ParityError
from mindspeed_tpi.ops._running_tree import RunningTree

_STATE = "tpi_gradient_groups"  # attribute of an f32 gradient


@dataclass(frozen=True)
class _Step:
    """What this rank does in one optimizer step: `groups` groups of `rows` rows each."""

    groups: int
    rows: int


_step: _Step | None = None


def count() -> int:
    """Groups of the global batch; 0: off, rows are added one after the other.

    Raises:
        InputError: the flag is not a power of two.
    """
    text = envs.GRADIENT_GROUPS.get()
    if not text.isdigit() or int(text) & (int(text) - 1):
        raise InputError(
            f"{envs.GRADIENT_GROUPS.name}={text!r} is not a power of two (0: off); use the largest data-parallel size"
        )
    return int(text)


def begin_step(rows: int, ranks: int) -> int:
    """Say before an optimizer step's first backward pass what it will see.

    Args:
        rows: rows of this data-parallel rank, over all micro-batches.
        ranks: data-parallel ranks.

    Returns:
        Rows of a group, of which the micro-batch size must be a divisor; 0 when off.

    Raises:
        InputError: rows or ranks that the groups cannot be spread over.
    """
    global _step
    groups, name = count(), envs.GRADIENT_GROUPS.name
    if not groups:
        _step = None
        return 0
    if groups % ranks:
        raise InputError(f"{name}={groups} cannot be spread over {ranks} data-parallel ranks; use a multiple")
    own = groups // ranks
    if not rows or rows % own:
        raise InputError(
            f"{name}={groups}: {rows} rows per data-parallel rank are not {own} equal groups; use a global batch that is a "
            f"multiple of {groups} rows"
        )
    _step = _Step(own, rows // own)
    return _step.rows


class _Sum:
    """One gradient's sum in a step.

    Attributes:
        step: the step it belongs to.
        open: f32 sums of the rows of the present group, one per data-parallel rank whose rows are seen here; the gradient
            itself if that is one.
    """

    def __init__(self, step: _Step, grad: Tensor, peers: int) -> None:
        self.step = step
        self.open = [grad] if peers == 1 else [torch.zeros_like(grad) for _ in range(peers)]
        self._closed = [RunningTree() for _ in range(peers)]
        self._rows = self._groups = 0

    @property
    def complete(self) -> bool:
        return self._groups == self.step.groups

    @property
    def seen(self) -> int:
        return self._groups * self.step.rows + self._rows

    def admit(self, rows: int) -> None:
        """Refuse rows that do not belong to the present group."""
        if self.complete or self._rows + rows > self.step.rows:
            raise ParityError(
                f"{envs.GRADIENT_GROUPS.name}: a micro-batch of {rows} rows crosses the end of a group of {self.step.rows} rows; "
                "use a micro-batch size that divides the rows of a group, and begin every step (zero_grad_buffer or begin_step)"
            )

    def added(self, rows: int, grad: Tensor) -> None:
        """Count rows that have been added to `open`; after the last one, leave the whole sum in `grad`."""
        self._rows += rows
        if self._rows < self.step.rows:
            return
        self._rows = 0
        self._groups += 1
        for tree, total in zip(self._closed, self.open, strict=True):
            tree.add(total if self.complete else total.clone())
            if not self.complete:
                total.zero_()
        if self.complete:
            across = RunningTree()
            for tree in self._closed:
                across.add(tree.root())
            grad.copy_(across.root())
            self.open, self._closed = [], []


def accumulate(grad: Tensor, add: Callable[..., None], rows: int, peers: int) -> None:
    """Add the gradient of one micro-batch's rows to an f32 `grad`, by groups where the flag is set.

    Args:
        add: add(*targets) adds each of `peers` data-parallel ranks' rows to its target.
        rows: rows of the micro-batch, of each of these ranks.

    Raises:
        ParityError: rows that do not fit the step, or no step begun.
    """
    if not count():
        add(grad)
        return
    if _step is None:
        raise ParityError(
            f"{envs.GRADIENT_GROUPS.name} is set and no step has begun: call DistributedDataParallel.zero_grad_buffer(), or "
            "mindspeed_tpi.ops.gradient_groups.begin_step() where Megatron-core's num_microbatches_calculator is not in use, "
            "before the step's first backward pass"
        )
    state = getattr(grad, _STATE, None)
    if state is None or state.step is not _step:
        state = _Sum(_step, grad, peers)
        setattr(grad, _STATE, state)
    state.admit(rows)
    add(*state.open)
    state.added(rows, grad)


def check_complete(grad: Tensor) -> None:
    """Refuse to reduce a gradient that lacks rows of this step.

    Raises:
        ParityError: naming how many rows came.
    """
    state = getattr(grad, _STATE, None)
    if state is not None and _step is not None and state.step is _step and not state.complete:
        raise ParityError(
            f"{envs.GRADIENT_GROUPS.name}: a gradient is reduced after {state.seen} of {state.step.rows * state.step.groups} rows; "
            "run every micro-batch of the step first"
        )
