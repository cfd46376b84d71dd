"""Ranks that differ are refused before the first step, and a rank that dies ends the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.models import write_model
from tests.parallel.faults import SIZES


@pytest.fixture(scope="module")
def job(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[subprocess.CompletedProcess[str], float, list[dict[str, str]]]:
    """The finished job, how long it took, and what each rank was told."""
    directory = tmp_path_factory.mktemp("faults")
    model, out = write_model(directory / "model", **SIZES), directory / "out"  # type: ignore[arg-type]
    command = [sys.executable, "-m", "mindspeed_tpi.parity.process", "2", "tests.parallel.faults", str(model), str(out)]
    environment = {**os.environ, "MINDSPEED_TPI": "strict", "OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    seconds = time.monotonic() - started
    files = [Path(f"{out}.{rank}") for rank in (0, 1)]
    assert all(file.is_file() for file in files), ended.stderr[-3000:]
    return ended, seconds, [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("world size", "world size is '4' there and '2' on rank 0"),
        ("layout", "layout is 'tp=1,pp=2' there and 'tp=2' on rank 0"),
        ("dtype", "dtype is 'float32' there and 'bfloat16' on rank 0"),
        ("checkpoint", "rank 1 differs from rank 0 in checkpoint: "),
        ("contract", "rank 1 differs from rank 0 in contract fingerprint: "),
    ],
)
def test_ranks_that_differ_are_refused_by_name(
    job: tuple[object, float, list[dict[str, str]]], field: str, said: str
) -> None:
    messages = [rank[field] for rank in job[2]]
    assert said in messages[0] and "rank 1 differs from rank 0 in" in messages[0]
    assert all("start all ranks with the same" in message for message in messages)


def test_a_rank_that_dies_in_a_tree_ends_the_others(
    job: tuple[subprocess.CompletedProcess[str], float, list[dict[str, str]]],
) -> None:
    ended, seconds, _ = job
    assert ended.returncode == 3 and seconds < 120
    assert "rank 1 was killed by signal 9" in ended.stderr.splitlines()[-1]
