"""Engine and trainer processes of the driver: their environment, their logs, and what became of them."""

from __future__ import annotations

import codecs
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Protocol

from mindspeed_tpi import envs
from mindspeed_tpi.errors import InputError, ParityError
from mindspeed_tpi.parity.request import Request

TAIL_LINES = 30
_GRACE_SECONDS = 10
_UPSTREAMS = {"engine": "vLLM", "trainer": "Megatron-core"}
_MODULES = {"engine": "engine", "trainer": "recompute"}
# What a job scheduler or a launcher tells its own ranks; ours are told by us.
_JOB_VARIABLES = re.compile(
    "(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|(TORCHELASTIC|PET|VLLM_DP)_.*"
)


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


def environment(stock: bool, ranks: int) -> dict[str, str]:
    """Variables of a process that starts `ranks` ranks: this process's, less those of a job it belongs to.

    Python's safe path keeps modules in the working directory from standing in for anybody's (Python 3.11 and later).

    Raises:
        InputError: OMP_NUM_THREADS is no number, nor a list of numbers.
    """
    found = {name: value for name, value in os.environ.items() if not _JOB_VARIABLES.fullmatch(name)}
    mode = "audit" if envs.MODE.get() == "audit" else "strict"
    found |= {"MINDSPEED_TPI": "0" if stock else mode, "PYTHONSAFEPATH": "1"}
    if os.environ.get("OMP_NUM_THREADS"):
        found["OMP_NUM_THREADS"] = str(_threads())
    if ranks > 1:
        found["OMP_NUM_THREADS"] = str(max(1, _threads() // ranks))
    return found


def _threads() -> int:
    """Threads of one process. OMP_NUM_THREADS may list one number for each nesting level: the first counts, as in OpenMP."""
    value = os.environ.get("OMP_NUM_THREADS") or str(len(os.sched_getaffinity(0)))
    first = value.partition(",")[0].strip()
    if not (first.isascii() and first.isdigit() and int(first)):
        raise InputError(f"OMP_NUM_THREADS={value!r} must be a positive integer, or a list of them")
    return int(first)


class Job:
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
        module = f"mindspeed_tpi.parity.{_MODULES[side]}"
        job = [module] if ranks == 1 else ["mindspeed_tpi.parity.process", str(ranks), module]
        arguments = [str(path) for file in files for path in file]
        command = [sys.executable, "-m", *job, *arguments, "--wait", "--progress"]
        self._process = launch(command, environment(request.stock, ranks), self._log)
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


def _in_brackets(layouts: str) -> str:
    return f" ({layouts})" if layouts else ""


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
