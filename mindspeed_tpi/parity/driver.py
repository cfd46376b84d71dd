"""Runs the two engines of a parity check, each in a process of its own, and compares what they report."""

from __future__ import annotations

import codecs
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

from safetensors import safe_open
from torch import Tensor

from mindspeed_tpi import envs
from mindspeed_tpi.errors import InputError, ParityError
from mindspeed_tpi.parallel.layout import Layout
from mindspeed_tpi.parity.compare import Comparison, compare
from mindspeed_tpi.parity.request import Request
from mindspeed_tpi.parity.rollout import Rollout

TAIL_LINES = 30
_GRACE_SECONDS = 10
_UPSTREAMS = {"engine": "vLLM", "trainer": "Megatron-core"}
_MODULES = {"engine": "engine", "trainer": "recompute"}


class Process(Protocol):
    """A started engine process."""

    def wait(self) -> int:
        """Its exit status, once it has ended; negative when a signal ended it."""

    def end(self) -> None:
        """End it and whatever it started, if it has not ended well."""


Launcher = Callable[[Sequence[str], Mapping[str, str], Path], Process]
"""Starts one engine process: (command line, environment, log file to write)."""


class EngineFailure(ParityError):
    """An engine process ended with an error; the message ends with the tail of its log.

    Attributes:
        reason: one line: the last error that the process reported, or how it ended.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


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
        InputError: an engine refused the request; its own message.
        EngineFailure: an engine failed.
    """
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
            job = _Job(wanted, "engine", rollout, [(asked, record)], folder, started, running)
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
                job = _Job(waiting[0], "trainer", names, files, folder, started, running, ranks)
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


class _Job:
    """A started engine or trainer, which waits until its first input file exists."""

    def __init__(
        self,
        request: Request,
        side: str,
        layouts: str,
        files: Sequence[Sequence[Path]],
        folder: Path,
        launch: Launcher,
        running: ExitStack,
        ranks: int = 1,
    ) -> None:
        """Args:
        layouts: for messages.
        files: file arguments of each piece of work; the last is what the process writes.
        ranks: above 1, as many processes.
        """
        self._what = f"{'stock' if request.stock else 'parity'} {side}"
        self._announcement = f"{self._what}: {_UPSTREAMS[side]}{_in_brackets(layouts)}"
        self._what += _in_brackets(layouts)
        self._log = folder / f"{side}.log"
        self._outputs = [file[-1] for file in files]
        mode = "audit" if envs.MODE.get() == "audit" else "strict"
        environment = {**os.environ, "MINDSPEED_TPI": "0" if request.stock else mode}
        module = f"mindspeed_tpi.parity.{_MODULES[side]}"
        job = [module]
        if ranks > 1:
            job = ["mindspeed_tpi.parity.process", str(ranks), module]
            threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
            environment["OMP_NUM_THREADS"] = str(max(1, threads // ranks))
        arguments = [str(path) for file in files for path in file]
        command = [sys.executable, "-m", *job, *arguments, "--wait", "--progress"]
        self._process = launch(command, environment, self._log)
        running.callback(self._process.end)

    def finish(self, announce: Callable[[str], None]) -> float:
        """Seconds until the process ended well.

        Raises:
            InputError: it refused its input.
            EngineFailure: it ended otherwise, or wrote no result.
        """
        announce(self._announcement)
        started = time.perf_counter()
        status = self._process.wait()
        if status == 2:
            raise InputError(_refusal(self._log))
        written = all(output.is_file() for output in self._outputs)
        if status or not written:
            ended = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
            what = ended if status else f"{ended}, but it wrote no result"
            message = f"the {self._what} failed ({what}); the end of its log:\n{_tail(self._log)}"
            raise EngineFailure(message, (_errors(self._log) or [what])[-1])
        return time.perf_counter() - started


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
        self._engine = _Job(request, "engine", request.rollout, [(self._asked, self._partial)], folder, launch, running)
        files = [(self._asked, self._record, self._answer)]
        self._trainer = _Job(request, "trainer", request.train, files, folder, launch, running, ranks)

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


def _in_brackets(layouts: str) -> str:
    return f" ({layouts})" if layouts else ""


def _read_answer(path: Path) -> tuple[Tensor, dict[str, Any]]:
    with safe_open(str(path), framework="pt") as file:
        return file.get_tensor("logprobs"), json.loads((file.metadata() or {}).get("meta", "{}"))


class EngineProcess:
    """A process in a process group of its own, its output in `log`; progress bars also go to this process's stderr."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._pump = threading.Thread(target=_pump, args=(self._process.stderr, self._log), daemon=True)
        self._pump.start()

    def wait(self) -> int:
        self._process.wait()
        self.end()
        return self._process.returncode

    def end(self) -> None:
        if self._log.closed:
            return
        if self._process.returncode != 0:
            _end_group(self._process)
        self._pump.join(_GRACE_SECONDS)
        self._log.close()


def _pump(source: BinaryIO, log: BinaryIO) -> None:
    """Copy a stream into a log, and its progress bars (from a carriage return to the end of its line) to stderr."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    inside = False
    while chunk := os.read(source.fileno(), 65536):
        log.write(chunk)
        log.flush()
        for part in re.findall(r"[\r\n]|[^\r\n]+", decoder.decode(chunk)):
            inside = inside or part == "\r"
            if inside:
                sys.stderr.write(part)
            inside = inside and part != "\n"
        sys.stderr.flush()


def _end_group(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _lines(log: Path) -> list[str]:
    """The log's lines as a terminal would end up showing them."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    shown = (line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n"))
    return [line for line in shown if line]


def _tail(log: Path) -> str:
    return "\n".join(f"  {line}" for line in _lines(log)[-TAIL_LINES:])


def _refusal(log: Path) -> str:
    """The last error that a process reported, for its user to read."""
    return (_errors(log) or _lines(log) or ["refused without a reason"])[-1]


def _errors(log: Path) -> list[str]:
    return [line.removeprefix("error: ") for line in _lines(log) if line.startswith("error: ")]
