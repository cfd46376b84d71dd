"""Trainers of many layouts in one job, so that Megatron-core is imported once per number of ranks.

    python -m torch.distributed.run --nproc-per-node N -m tests.parallel.trainers JOBS.json OUT.pt

JOBS holds a list of {name, model, train, micro_batch, groups, ddp, config (fields of TransformerConfig)} or {name, model, train,
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
from mindspeed_tpi.parity.batches import Batch
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
    """Of a layout: how it compares with engines' records; or log-probabilities, gradient hashes and, after an AdamW step,
    weight hashes."""
    import_megatron()
    os.environ[envs.GRADIENT_GROUPS.name] = str(job.get("groups", 0))
    with megatron_config(**job.get("config", {})):
        trainer = Trainer(Request(job["model"], ((1, 2),), dtype=job.get("dtype", "bfloat16"), train=job["train"]))
    if "rollouts" in job:
        return {"differ": {path: _compare(trainer, Rollout.load(path)) for path in job["rollouts"]}}
    lengths = LENGTHS * 2 if "groups" in job else LENGTHS
    rollout = record(random_prompts(lengths, vocab=VOCAB, seed=3), trainer.contract)
    logprobs = trainer.logprobs(rollout, micro_batch=job.get("micro_batch"))
    if job.get("ddp"):
        return {"logprobs": logprobs, "gradients": _through_ddp(trainer, rollout)}
    trainer.train_step(rollout, micro_batch=job.get("micro_batch") or 1)
    return {"logprobs": logprobs, "gradients": trainer.gradient_hashes(), "weights": trainer.weight_hashes()}


def _through_ddp(trainer: Trainer, rollout: Rollout) -> dict[str, str]:
    """Gradient hashes of a step by Megatron-core's DistributedDataParallel and finalize_model_grads, row by row."""
    from megatron.core import num_microbatches_calculator, parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    sequences, ranks = rollout.sequences, trainer.layout.dp
    num_microbatches_calculator.init_num_microbatches_calculator(0, None, len(sequences), 1, ranks)
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    wrapped = DistributedDataParallel(trainer.model.config, options, trainer.model)
    wrapped.zero_grad_buffer()
    trainer.model.train()
    weights = (rollout.generated.float() / int(rollout.generated.sum())).split(rollout.offsets.diff().tolist())
    lines = len(sequences) // ranks
    start = parallel_state.get_data_parallel_rank() * lines
    for row in range(start, start + lines):
        batch = Batch.of(sequences, [row], trainer._padded(max(map(len, sequences))))
        loss = wrapped(batch.tokens, None, None, labels=batch.labels)
        gradient = torch.zeros_like(loss)
        gradient[0, : batch.lengths[0] - 1] = weights[row][1:]
        loss.backward(gradient)
    finalize_model_grads([wrapped])
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    return trainer.gradient_hashes()


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
