"""A job of several ranks: its exit status, and what it says when a rank fails."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

RANKS = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
assert os.environ["WORLD_SIZE"] == "2"
if rank == 1:
    {fault}
time.sleep({patience})
"""


def run(fault: str, patience: float = 60) -> tuple[int, str]:
    code = RANKS.format(fault=fault, patience=patience)
    job = f"import sys; from mindspeed_tpi.parity.process import run_ranks; sys.exit(run_ranks(2, [sys.executable, '-c', {code!r}]))"
    ended = subprocess.run([sys.executable, "-c", job], capture_output=True, text=True, timeout=50)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(
    ("fault", "status", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 3, "error: rank 1 was killed by signal 9"),
        ("sys.exit(3)", 3, "error: rank 1 ended with exit status 3"),
        ("print('error: no such model', file=sys.stderr); sys.exit(2)", 2, "error: no such model"),
    ],
)
def test_a_rank_that_fails_ends_the_others(fault: str, status: int, said: str) -> None:
    assert run(fault) == (status, said + "\n")


def test_ranks_that_end_well() -> None:
    assert run("pass", patience=0) == (0, "")


def test_a_job_ends_with_its_driver(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"import os, pathlib, time; pathlib.Path({str(pid)!r} + os.environ['RANK']).write_text(str(os.getpid())); time.sleep(60)"
    job = f"import sys; from mindspeed_tpi.parity.process import run_ranks; run_ranks(1, [sys.executable, '-c', {code!r}])"
    driver = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {job!r}]); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", driver], stderr=subprocess.DEVNULL)
    written = Path(f"{pid}0")
    try:
        deadline = time.monotonic() + 40
        while not (written.is_file() and written.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{written.read_text()}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{written.read_text()}")
