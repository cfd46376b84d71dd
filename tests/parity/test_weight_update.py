"""After an optimizer step and an in-place update of the running engine, parity holds again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from mindspeed_tpi.parity.compare import compare
from mindspeed_tpi.parity.rollout import Rollout
from mindspeed_tpi.parity.trainer import Trainer
from tests.parity.conftest import FAMILY_SCENARIOS, Case, run_jobs


def test_update_after_a_training_step(rollouts: Callable[..., dict[str, Case]], tmp_path: Path) -> None:
    case = rollouts("llama-tied", "bfloat16", FAMILY_SCENARIOS)["crowded"]
    trainer = Trainer(case.request)
    before = trainer.logprobs(case.rollout)
    trainer.train_step(case.rollout, lr=3e-3, micro_batch=4)
    updated = tmp_path / "updated"
    updated.mkdir()
    shutil.copy(Path(case.request.model) / "config.json", updated / "config.json")
    save_file({name: t.contiguous() for name, t in trainer.hf_tensors()}, str(updated / "model.safetensors"))

    request = replace(case.request, weight_updates=(str(updated),))
    out = tmp_path / "rollout.safetensors"
    run_jobs([{"request": json.loads(request.to_json()), "out": str(out)}], tmp_path)
    rollout = Rollout.load(out)
    assert set(rollout.weight_versions.tolist()) == {0, 1}
    fresh = Trainer(request)
    logprobs = fresh.logprobs(rollout)
    tokens = 2 * len(request.prompts) * request.max_new_tokens
    result = compare(rollout, logprobs, tokens)
    assert result.exact, (result.nonzero, result.tokens, result.max_abs)
    trainer.weight_version = 0  # the old rollout under the new weights: the step did change the model
    assert not torch.equal(trainer.logprobs(case.rollout), before)
