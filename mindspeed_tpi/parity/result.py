"""What came of a parity run, or of a matrix of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mindspeed_tpi.errors import InputError
from mindspeed_tpi.parity.compare import Comparison
from mindspeed_tpi.parity.launch import EngineFailure
from mindspeed_tpi.parity.request import Request
from mindspeed_tpi.parity.rollout import Rollout


@dataclass(frozen=True)
class Run:
    """One rollout and its recomputation.

    Attributes:
        request: what was asked for.
        rollout: the engine's record.
        train_meta: what the trainer says about itself (`seconds, op_calls, versions, fingerprint`).
        comparison: the two sides' log-probabilities compared.
        wall_seconds: of the rollout and of the recomputation, model loading included, imports not.
    """

    request: Request
    rollout: Rollout
    train_meta: dict[str, Any]
    comparison: Comparison
    wall_seconds: dict[str, float]

    @property
    def contract(self) -> dict[str, Any] | None:
        """Fingerprint and constants of the numerics contract; None for a stock run."""
        if self.rollout.meta.get("contract") is None:
            return None
        return {"fingerprint": self.rollout.meta["fingerprint"], "constants": self.rollout.meta["contract"]}

    def to_json(self) -> dict[str, Any]:
        meta = self.rollout.meta
        return self.comparison.to_json() | {
            "contract": self.contract,
            "model": self.request.model,
            "dtype": self.request.dtype,
            "temperature": self.request.temperature,
            "train": self.request.train,
            "rollout": self.request.rollout,
            "backend": meta.get("backend"),
            "versions": meta.get("versions", {}),
            "counters": meta.get("counters", {}),
            "op_calls": {"rollout": meta.get("op_calls", {}), "train": self.train_meta.get("op_calls", {})},
            "seconds": {
                "rollout": meta.get("seconds", {}),
                "train": self.train_meta.get("seconds", {}),
                "wall": self.wall_seconds,
            },
        }


@dataclass(frozen=True)
class Result:
    """A parity run, and the stock run beside it when one was asked for."""

    parity: Run
    stock: Run | None = None

    @property
    def exact(self) -> bool:
        """Whether every token of the parity run has logdiff 0."""
        return self.parity.comparison.exact

    def to_json(self) -> dict[str, Any]:
        """The JSON document of `mindspeed-tpi parity --json`."""
        return self.parity.to_json() | ({"stock": self.stock.to_json()} if self.stock else {})


@dataclass(frozen=True)
class NoRun:
    """A combination of layouts that gave nothing to compare.

    Attributes:
        state: `refused` (bad input) or `failed`. why: one line.
    """

    request: Request
    state: Literal["refused", "failed"]
    why: str

    @classmethod
    def of(cls, request: Request, error: InputError | EngineFailure) -> NoRun:
        if isinstance(error, EngineFailure):
            return cls(request, "failed", error.reason)
        return cls(request, "refused", str(error))

    def to_json(self) -> dict[str, Any]:
        return {"train": self.request.train, "rollout": self.request.rollout, self.state: self.why}


@dataclass(frozen=True)
class Matrix:
    """Parity of every training layout with every rollout layout.

    Attributes:
        trains, rollouts: layouts. cells: [training layout][rollout layout].
    """

    trains: tuple[str, ...]
    rollouts: tuple[str, ...]
    cells: tuple[tuple[Run | NoRun, ...], ...]

    @property
    def runs(self) -> list[Run]:
        """The cells that could be compared."""
        return [cell for row in self.cells for cell in row if isinstance(cell, Run)]

    @property
    def missing(self) -> list[NoRun]:
        """The cells that could not."""
        return [cell for row in self.cells for cell in row if isinstance(cell, NoRun)]

    @property
    def status(self) -> int:
        """Exit status: 3 an engine failed in some cell, else 1 a cell is not exact, else 2 a cell was refused, else 0."""
        states = {cell.state for cell in self.missing}
        if "failed" in states:
            return 3
        if not all(run.comparison.exact for run in self.runs):
            return 1
        return 2 if states else 0

    def to_json(self) -> dict[str, Any]:
        """The JSON document of `mindspeed-tpi parity --matrix --json`; `nonzero` is null where nothing was compared."""
        return {
            "exact": self.status == 0,
            "train": list(self.trains),
            "rollout": list(self.rollouts),
            "nonzero": [[c.comparison.nonzero if isinstance(c, Run) else None for c in row] for row in self.cells],
            "runs": [cell.to_json() for row in self.cells for cell in row],
        }
