"""Runs the two engines of a parity check, each in a process of its own, and compares what they report."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from mindspeed_tpi import weights
from mindspeed_tpi.errors import InputError
from mindspeed_tpi.parallel.layout import Layout
from mindspeed_tpi.parity import prompts
from mindspeed_tpi.parity.compare import compare
from mindspeed_tpi.parity.launch import EngineFailure, EngineProcess, Job, Launcher
from mindspeed_tpi.parity.request import Request
from mindspeed_tpi.parity.result import Matrix, NoRun, Result, Run
from mindspeed_tpi.parity.rollout import Rollout
from mindspeed_tpi.profiles import Profile


def check(request: Request) -> None:
    """Refuse a model directory or a weight update whose files do not hold what the engines need, and prompts that are too
    long, before a process starts.

    Raises:
        InputError: names what was found and what was expected.
    """
    profile = Profile.load(request.model)
    for model in (request.model, *request.weight_updates):
        weights.check(model, profile)
    prompts.check(request.prompts, profile, request.max_new_tokens)


def run(
    request: Request,
    *,
    stock: Request | None = None,
    launch: Launcher | None = None,
    announce: Callable[[str], None] = lambda _: None,
) -> Result:
    """Roll out, recompute, compare; for `stock` first, under upstream's own numerics.

    All processes start at once and import their upstream; each waits for its turn before it builds an engine.

    Args:
        stock: what the stock run does; may have fewer prompts.
        launch: starts one engine process; default `EngineProcess`.
        announce: receives a line when each engine's turn comes.

    Raises:
        InputError: the model's files do not fit, or an engine refused the request; its own message.
        EngineFailure: an engine failed.
    """
    for asked in filter(None, (request, stock)):
        check(asked)
    requests = [replace(request, stock=False), *([replace(stock, stock=True)] if stock else [])]
    with tempfile.TemporaryDirectory(prefix="mindspeed-tpi-") as directory, ExitStack() as running:
        pairs = [_Pair(r, Path(directory), launch or EngineProcess, running) for r in reversed(requests)]
        return Result(*[pair.run(announce) for pair in pairs][::-1])


def run_matrix(
    request: Request,
    trains: Sequence[str],
    rollouts: Sequence[str],
    *,
    launch: Launcher | None = None,
    announce: Callable[[str], None] = lambda _: None,
) -> Matrix:
    """Every training layout against every rollout layout; one engine per rollout layout, one trainer job per number of ranks,
    and another for what is left after a cell that was refused or failed."""
    check(request)
    started = launch or EngineProcess
    jobs: dict[int, list[str]] = {}
    for train in trains:
        jobs.setdefault(Layout.parse(train, "train").ranks, []).append(train)
    cells: dict[tuple[str, str], Run | NoRun] = {}
    with tempfile.TemporaryDirectory(prefix="mindspeed-tpi-") as directory, ExitStack() as running:
        records: dict[str, _Record] = {}
        for rollout in rollouts:
            wanted = replace(request, stock=False, rollout=rollout)
            folder = Path(tempfile.mkdtemp(dir=directory))
            asked, record = folder / "request.json", folder / "record"
            asked.write_text(wanted.to_json(), encoding="utf-8")
            job = Job(wanted, "engine", rollout, [(asked, record)], folder, started, running)
            try:
                seconds = job.finish(announce)
            except (InputError, EngineFailure) as error:
                announce(f"rollout {rollout}: {error}")
                cells |= {(train, rollout): NoRun.of(replace(wanted, train=train), error) for train in trains}
                continue
            records[rollout] = _Record(record, Rollout.load(record), seconds)
        for ranks, layouts in jobs.items():
            waiting = [
                replace(request, stock=False, rollout=rollout, train=train) for train in layouts for rollout in records
            ]
            while waiting:
                folder = Path(tempfile.mkdtemp(dir=directory))
                files = []
                for number, cell in enumerate(waiting):
                    asked, answer = (folder / f"{number}.{name}" for name in ("json", "answer"))
                    asked.write_text(cell.to_json(), encoding="utf-8")
                    files.append((asked, records[cell.rollout].path, answer))
                names = "; ".join(dict.fromkeys(cell.train for cell in waiting))
                job = Job(waiting[0], "trainer", names, files, folder, started, running, ranks)
                try:
                    job.finish(announce)
                    done = len(waiting)
                except (InputError, EngineFailure) as error:
                    # files are worked on in turn: the first without an answer is the one that did not work
                    done = next((i for i, file in enumerate(files) if not file[-1].is_file()), len(files) - 1)
                    bad = waiting[done]
                    announce(f"train {bad.train}, rollout {bad.rollout}: {error}")
                    cells[bad.train, bad.rollout] = NoRun.of(bad, error)
                for cell, (_, _, answer) in zip(waiting[:done], files, strict=False):
                    record_ = records[cell.rollout]
                    cells[cell.train, cell.rollout] = _compared(cell, record_.rollout, answer, record_.seconds)
                waiting = waiting[done + 1 :]
    return Matrix(
        tuple(trains), tuple(rollouts), tuple(tuple(cells[train, rollout] for rollout in rollouts) for train in trains)
    )


@dataclass(frozen=True)
class _Record:
    """What one rollout engine wrote, and the seconds it took."""

    path: Path
    rollout: Rollout
    seconds: float


class _Pair:
    """The two jobs of one request: the engine waits for the request's file, the trainer for the record's."""

    def __init__(self, request: Request, directory: Path, launch: Launcher, running: ExitStack) -> None:
        self._request = request
        self._folder = folder = directory / ("stock" if request.stock else "parity")
        folder.mkdir()
        self._asked, self._partial, self._record, self._answer = (
            folder / name for name in ("request.json", "partial", "rollout", "answer")
        )
        ranks = Layout.parse(request.train, "train").ranks
        self._engine = Job(request, "engine", request.rollout, [(self._asked, self._partial)], folder, launch, running)
        files = [(self._asked, self._record, self._answer)]
        self._trainer = Job(request, "trainer", request.train, files, folder, launch, running, ranks)

    def run(self, announce: Callable[[str], None]) -> Run:
        written = self._folder / "written"
        written.write_text(self._request.to_json(), encoding="utf-8")
        written.rename(self._asked)
        seconds = self._engine.finish(announce)
        self._partial.rename(self._record)
        self._trainer.finish(announce)
        return _compared(self._request, Rollout.load(self._record), self._answer, seconds)


def _compared(request: Request, rollout: Rollout, answer: Path, rollout_seconds: float) -> Run:
    logprobs, meta = _read_answer(answer)
    expected = len(request.prompts) * request.max_new_tokens * (1 + len(request.weight_updates))
    wall = {"rollout": rollout_seconds, "train": meta["seconds"]["start"] + meta["seconds"]["recompute"]}
    return Run(request, rollout, meta, compare(rollout, logprobs, expected), wall)


def _read_answer(path: Path) -> tuple[Tensor, dict[str, Any]]:
    with safe_open(str(path), framework="pt") as file:
        return file.get_tensor("logprobs"), json.loads((file.metadata() or {}).get("meta", "{}"))
