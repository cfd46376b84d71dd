"""Rollouts of real vLLM engines, made once per model in processes of their own and shared by the whole session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed_tpi.parity.compare import compare
from mindspeed_tpi.parity.request import Request
from mindspeed_tpi.parity.rollout import Rollout
from tests.models import random_prompts, write_model

ROOT = Path(__file__).resolve().parents[2]
EDGES = [1, 2, 3, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 150, 200]

# scenario -> (prompt lengths, tokens shared at the start, fields of the request, settings of the engine)
SCENARIOS: dict[str, tuple[list[int], int, dict[str, Any], dict[str, Any]]] = {
    # 64 sequences in one batch, prompts over several chunks, prefix hits, too few pages for all of them
    "crowded": (
        EDGES * 4,
        40,
        {"temperature": 1.0, "max_new_tokens": 24},
        {"max_num_seqs": 64, "max_num_batched_tokens": 96, "kv_cache_blocks": 20, "max_model_len": 256},
    ),
    # big pages, whole prompts, no prefix cache, a few sequences at a time, prompt logprobs
    "plain": (
        EDGES,
        0,
        {"temperature": 1.0, "max_new_tokens": 8, "prompt_logprobs": True},
        {"max_num_seqs": 3, "max_num_batched_tokens": 512, "block_size": 128, "enable_prefix_caching": False},
    ),
    "single": ([77], 0, {"temperature": 0.0, "max_new_tokens": 60}, {"max_num_seqs": 1, "block_size": 64}),
    "cool": (EDGES, 20, {"temperature": 0.7, "max_new_tokens": 8}, {"max_num_seqs": 8, "max_num_batched_tokens": 128}),
    # attention segments of 2,048 positions merge
    "long": (
        [5990, 4097, 2049, 2040, 1],
        0,
        {"temperature": 1.0, "max_new_tokens": 10},
        {"max_num_seqs": 4, "max_num_batched_tokens": 700, "block_size": 128},
    ),
    "spawned": (EDGES, 40, {"temperature": 1.0, "max_new_tokens": 8}, {"spawn": True, "max_num_batched_tokens": 64}),
    "compiled": (
        EDGES,
        40,
        {"temperature": 1.0, "max_new_tokens": 8},
        {"enforce_eager": False, "max_num_batched_tokens": 64},
    ),
}
FAMILY_SCENARIOS = ("crowded", "plain", "cool")


@dataclass(frozen=True)
class Case:
    """One rollout and the request that made it."""

    request: Request
    rollout: Rollout

    @property
    def expected_tokens(self) -> int:
        return len(self.request.prompts) * self.request.max_new_tokens * (1 + len(self.request.weight_updates))


def assert_exact(case: Case, logprobs: Tensor) -> None:
    result = compare(case.rollout, logprobs, case.expected_tokens)
    assert result.exact, (result.nonzero, result.tokens, result.max_abs, result.missing)
    reported = ~case.rollout.logprobs.isnan()  # prompt logprobs, where the engine was asked for them
    assert torch.equal(logprobs[reported].view(torch.int32), case.rollout.logprobs[reported].view(torch.int32))


def run_jobs(jobs: list[dict[str, Any]], directory: Path, mode: str = "strict") -> None:
    """Make rollouts in one fresh process; its output is shown when it fails."""
    spec = directory / "jobs.json"
    spec.write_text(json.dumps(jobs))
    env = {**os.environ, "MINDSPEED_TPI": mode, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.parity.rollouts", str(spec)], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def roll_out(requests: dict[str, Request], directory: Path) -> dict[str, Case]:
    """The rollout of every request, made in one fresh process."""
    files = {name: directory / f"{name}.safetensors" for name in requests}
    jobs = [{"request": json.loads(r.to_json()), "out": str(files[name])} for name, r in requests.items()]
    run_jobs(jobs, directory)
    return {name: Case(r, Rollout.load(files[name])) for name, r in requests.items()}


def request_for(model: Path, scenario: str, dtype: str) -> Request:
    lengths, shared, fields, engine = SCENARIOS[scenario]
    prompts = random_prompts(lengths, shared=shared, seed=3)
    return Request.from_json(
        json.dumps({"model": str(model), "prompts": prompts, "dtype": dtype, "seed": 11, "engine": engine, **fields})
    )


@pytest.fixture(scope="session")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Case]]:
    """rollouts(family, dtype, scenarios) -> scenario -> Case."""
    made: dict[tuple[str, str, tuple[str, ...]], dict[str, Case]] = {}

    def make(family: str, dtype: str, scenarios: tuple[str, ...]) -> dict[str, Case]:
        key = (family, dtype, scenarios)
        if key not in made:
            directory = tmp_path_factory.mktemp(f"{family}-{dtype}")
            model = write_model(directory / "model", family, dtype=dtype, max_positions=8192)
            made[key] = roll_out({name: request_for(model, name, dtype) for name in scenarios}, directory)
        return made[key]

    return make
