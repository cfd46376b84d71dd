"""Trainers of many layouts in one job, so that Megatron-core is imported once per number of ranks.

    python -m torch.distributed.run --nproc-per-node N -m tests.parallel.trainers JOBS.json OUT.pt

JOBS holds a list of {name, model, train, micro_batch, groups, fused_head (the loss in chunks), config (fields of TransformerConfig)} or {name, model, train,
rollouts}; OUT a dictionary name → result of rank 0.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_tpi import envs
from mindspeed_tpi.ops import backends
from mindspeed_tpi.parallel import logprob
from mindspeed_tpi.parity.compare import compare
from mindspeed_tpi.parity.megatron import import_megatron
from mindspeed_tpi.parity.request import Request
from mindspeed_tpi.parity.rollout import Rollout
from mindspeed_tpi.parity.trainer import Trainer
from tests.models import megatron_config, random_prompts
from tests.rollout_records import record

LENGTHS = [40, 17, 33, 9]
VOCAB = 100


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Of a layout: how it compares with engines' records; or log-probabilities and, after a step, the gradient norm and hashes of
    clipped gradients and of weights."""
    import_megatron()
    os.environ[envs.GRADIENT_GROUPS.name] = str(job.get("groups", 0))
    with megatron_config(**job.get("config", {})):
        trainer = Trainer(Request(job["model"], ((1, 2),), dtype=job.get("dtype", "bfloat16"), train=job["train"]))
    logprob.CHUNK_ELEMENTS = 4 * VOCAB if job.get("fused_head") else 1 << 24
    if "rollouts" in job:
        return {"differ": {path: _compare(trainer, Rollout.load(path)) for path in job["rollouts"]}}
    lengths = LENGTHS * 2 if "groups" in job else LENGTHS
    rollout = record(random_prompts(lengths, vocab=VOCAB, seed=3), trainer.contract)
    logprobs = trainer.logprobs(rollout, micro_batch=job.get("micro_batch"))
    before = backends.call_counts().get("vocab_logprob_backward", 0)
    trainer.train_step(rollout, micro_batch=job.get("micro_batch") or 1)
    chunks = backends.call_counts().get("vocab_logprob_backward", 0) - before  # 0: a pipeline stage without the head
    hashes = {"gradients": trainer.gradient_hashes(), "weights": trainer.weight_hashes()}
    return {"logprobs": logprobs, "norm": {"norm": trainer.grad_norm}, "chunks": chunks, **hashes}


def _compare(trainer: Trainer, rollout: Rollout) -> tuple[int, int]:
    """(sampled tokens that differ from an engine's record, sampled tokens)."""
    found = compare(rollout, trainer.logprobs(rollout), int(rollout.generated.sum()))
    return found.nonzero + found.nan + found.missing, found.tokens


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    results = {}
    for job in jobs:
        try:
            results[job["name"]] = run(job)
        except Exception:
            results[job["name"]] = {"error": traceback.format_exc()}
        if dist.is_initialized():
            dist.barrier()
    if os.environ.get("RANK", "0") == "0":
        torch.save(results, sys.argv[2])


if __name__ == "__main__":
    main()
