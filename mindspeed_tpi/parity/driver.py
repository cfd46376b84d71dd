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
from typing import Any, BinaryIO, Protocol

from safetensors import safe_open
from torch import Tensor

from mindspeed_tpi.errors import InputError, ParityError
from mindspeed_tpi.parallel.layout import Layout
from mindspeed_tpi.parity.compare import Comparison, compare
from mindspeed_tpi.parity.request import Request
from mindspeed_tpi.parity.rollout import Rollout

TAIL_LINES = 30
_GRACE_SECONDS = 10
_UPSTREAMS = {"engine": "vLLM", "trainer": "Megatron-core"}


class Process(Protocol):
    """A started engine process."""

    def wait(self) -> int:
        """Its exit status, once it has ended; negative when a signal ended it."""

    def end(self) -> None:
        """End it and whatever it started, if it has not ended well."""


Launcher = Callable[[Sequence[str], Mapping[str, str], Path], Process]
"""Starts one engine process: (command line, environment, log file to write)."""


class EngineFailure(ParityError):
    """An engine process ended with an error; the message ends with the tail of its log."""


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
class Matrix:
    """Parity of every training layout with every rollout layout.

    Attributes:
        trains, rollouts: layouts. runs: [training layout][rollout layout].
    """

    trains: tuple[str, ...]
    rollouts: tuple[str, ...]
    runs: tuple[tuple[Run, ...], ...]

    @property
    def exact(self) -> bool:
        """Whether every token of every run has logdiff 0."""
        return all(run.comparison.exact for row in self.runs for run in row)

    def to_json(self) -> dict[str, Any]:
        """The JSON document of `mindspeed-tpi parity --matrix --json`."""
        return {
            "exact": self.exact,
            "train": list(self.trains),
            "rollout": list(self.rollouts),
            "nonzero": [[run.comparison.nonzero for run in row] for row in self.runs],
            "runs": [run.to_json() for row in self.runs for run in row],
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
    """Every training layout against every rollout layout; each rollout is made once.

    Raises:
        InputError: an engine refused the request; its own message.
        EngineFailure: an engine failed.
    """
    grid = []
    for rollout in rollouts:
        wanted = replace(request, stock=False, rollout=rollout, train=trains[0])
        with tempfile.TemporaryDirectory(prefix="mindspeed-tpi-") as directory, ExitStack() as running:
            pair = _Pair(wanted, Path(directory), launch or EngineProcess, running)
            grid.append([pair.run(announce), *(pair.recompute(train, announce) for train in trains[1:])])
    return Matrix(tuple(trains), tuple(rollouts), tuple(zip(*grid, strict=True)))


class _Pair:
    """The processes of one rollout: the engine waits for the request's file, the trainer for the record's."""

    def __init__(self, request: Request, directory: Path, launch: Launcher, running: ExitStack) -> None:
        self._request = request
        self._kind = "stock" if request.stock else "parity"
        self._folder = folder = directory / self._kind
        folder.mkdir()
        self._asked, self._partial, self._record = (folder / n for n in ("request.json", "partial", "rollout"))
        self._environment = {**os.environ, "MINDSPEED_TPI": "0" if request.stock else "strict"}
        self._launch, self._running = launch, running
        self._rollout: Rollout | None = None
        self._rollout_seconds = 0.0
        self._engine = self._start("engine", [self._asked, self._partial], self._environment)
        self._trainer = self._start_trainer(request.train)

    def _start(
        self, side: str, files: list[Path], environment: Mapping[str, str], name: str = "", ranks: int = 1
    ) -> Process:
        module = f"mindspeed_tpi.parity.{side}"
        job = [module] if ranks == 1 else ["mindspeed_tpi.parity.process", str(ranks), module]
        command = [sys.executable, "-m", *job, *map(str, files), "--wait", "--progress"]
        process = self._launch(command, environment, self._folder / f"{name or side}.log")
        self._running.callback(process.end)
        return process

    def _start_trainer(self, train: str) -> Process:
        """A trainer of a layout; it begins as soon as the rollout is there."""
        ranks = Layout.parse(train, "train").ranks
        asked = self._folder / f"{_file_name(train)}.json"
        asked.write_text(replace(self._request, train=train).to_json(), encoding="utf-8")
        threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
        environment = (
            {**self._environment, "OMP_NUM_THREADS": str(max(1, threads // ranks))} if ranks > 1 else self._environment
        )
        return self._start("trainer", [asked, self._record, self._answer(train)], environment, _file_name(train), ranks)

    def _answer(self, train: str) -> Path:
        return self._folder / f"{_file_name(train)}.answer"

    def run(self, announce: Callable[[str], None]) -> Run:
        """Roll out, then recompute in the request's training layout."""
        request = self._request
        written = self._folder / "written"
        written.write_text(request.to_json(), encoding="utf-8")
        written.rename(self._asked)
        where = f" ({request.rollout})" if request.rollout else ""
        self._rollout_seconds = self._finish("engine", where, "engine.log", self._engine, self._partial, announce)
        self._partial.rename(self._record)
        self._rollout = Rollout.load(self._record)
        return self._compare(request.train, self._trainer, announce)

    def recompute(self, train: str, announce: Callable[[str], None]) -> Run:
        """Recompute the same rollout in another training layout."""
        return self._compare(train, self._start_trainer(train), announce)

    def _compare(self, train: str, trainer: Process, announce: Callable[[str], None]) -> Run:
        assert self._rollout is not None
        request, answer = replace(self._request, train=train), self._answer(train)
        where = f" ({train})" if train else ""
        seconds = self._finish("trainer", where, f"{_file_name(train)}.log", trainer, answer, announce)
        logprobs, meta = _read_answer(answer)
        expected = len(request.prompts) * request.max_new_tokens * (1 + len(request.weight_updates))
        wall = {"rollout": self._rollout_seconds, "train": seconds}
        return Run(request, self._rollout, meta, compare(self._rollout, logprobs, expected), wall)

    def _finish(
        self, side: str, where: str, log_name: str, process: Process, output: Path, announce: Callable[[str], None]
    ) -> float:
        """Seconds until the process ended well."""
        announce(f"{self._kind} {side}: {_UPSTREAMS[side]}{where}")
        started = time.perf_counter()
        status = process.wait()
        log = self._folder / log_name
        if status == 2:
            raise InputError(_refusal(log))
        if status or not output.is_file():
            ended = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
            what = ended if status else f"{ended}, but it wrote no result"
            raise EngineFailure(f"the {self._kind} {side}{where} failed ({what}); the end of its log:\n{_tail(log)}")
        return time.perf_counter() - started


def _file_name(train: str) -> str:
    return f"trainer {train}".strip()


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
    lines = _lines(log)
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["refused without a reason"])[-1]
