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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import safe_open
from torch import Tensor

from mindspeed_tpi.errors import InputError, ParityError
from mindspeed_tpi.parity.compare import Comparison, compare
from mindspeed_tpi.parity.request import Request
from mindspeed_tpi.parity.rollout import Rollout

TAIL_LINES = 30
_GRACE_SECONDS = 10
_UPSTREAMS = {"rollout": "vLLM", "train": "Megatron-core"}

Launcher = Callable[[Sequence[str], Mapping[str, str], Path], int]
"""Runs one engine process: (command line, environment, log file to write) -> exit status."""


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
        wall_seconds: from start to end of each process.
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


def run(
    request: Request,
    *,
    stock: bool = False,
    launch: Launcher | None = None,
    announce: Callable[[str], None] = lambda _: None,
) -> Result:
    """Roll out, recompute, compare; with `stock` also under upstream's own numerics, before the parity run.

    Args:
        launch: runs one engine process; default `launch_process`.
        announce: receives a line before each process starts.

    Raises:
        InputError: an engine refused the request; its own message.
        EngineFailure: an engine failed.
    """
    launch = launch or launch_process
    before = _run_one(replace(request, stock=True), launch, announce) if stock else None
    return Result(_run_one(replace(request, stock=False), launch, announce), before)


def _run_one(request: Request, launch: Launcher, announce: Callable[[str], None]) -> Run:
    kind = "stock" if request.stock else "parity"
    environment = {**os.environ, "MINDSPEED_TPI": "0" if request.stock else "strict"}
    wall: dict[str, float] = {}

    with tempfile.TemporaryDirectory(prefix="mindspeed-tpi-") as directory:
        folder = Path(directory)
        asked, record, answer = folder / "request.json", folder / "rollout.safetensors", folder / "train.safetensors"
        asked.write_text(request.to_json(), encoding="utf-8")

        def step(side: str, module: str, output: Path, *files: Path) -> None:
            command = [
                sys.executable,
                "-m",
                f"mindspeed_tpi.parity.{module}",
                *map(str, files),
                str(output),
                "--progress",
            ]
            log = folder / f"{side}.log"
            announce(f"{kind} {side}: {_UPSTREAMS[side]}")
            started = time.perf_counter()
            status = launch(command, environment, log)
            wall[side] = time.perf_counter() - started
            if status == 2:
                raise InputError(_last_line(log))
            if status or not output.is_file():
                ended = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
                what = ended if status else f"{ended}, but it wrote no result"
                raise EngineFailure(f"the {kind} {side} engine failed ({what}); the end of its log:\n{_tail(log)}")

        step("rollout", "engine", record, asked)
        rollout = Rollout.load(record)
        step("train", "trainer", answer, asked, record)
        logprobs, meta = _read_answer(answer)
    expected = len(request.prompts) * request.max_new_tokens * (1 + len(request.weight_updates))
    return Run(request, rollout, meta, compare(rollout, logprobs, expected), wall)


def _read_answer(path: Path) -> tuple[Tensor, dict[str, Any]]:
    with safe_open(str(path), framework="pt") as file:
        return file.get_tensor("logprobs"), json.loads((file.metadata() or {}).get("meta", "{}"))


def launch_process(command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
    """Run a process in its own process group, its output into `log`; progress bars also go to this process's stderr.

    Whatever ends the wait (Ctrl-C included) ends the whole group.
    """
    with log.open("ab") as file:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        pump = threading.Thread(target=_pump, args=(process.stderr, file), daemon=True)
        pump.start()
        try:
            process.wait()
        finally:
            if process.returncode != 0:
                _end_group(process)
            pump.join(_GRACE_SECONDS)
    return process.returncode


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


def _last_line(log: Path) -> str:
    return (_lines(log) or ["error: refused without a reason"])[-1].removeprefix("error: ")
