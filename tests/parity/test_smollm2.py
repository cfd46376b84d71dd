"""logdiff is exactly 0 on a real model: SmolLM2-135M answering tasks of reasoning-gym, the model and prompts of `make demo`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from mindspeed_tpi.cli import demo
from mindspeed_tpi.parity import prompts
from mindspeed_tpi.parity.compare import compare
from mindspeed_tpi.parity.request import EngineOptions, Request
from mindspeed_tpi.parity.trainer import Trainer
from tests.parity.conftest import assert_exact, roll_out

# prompts split over chunks, prefix hits, too few pages for all of them; then whole prompts on big pages, one by one
CROWDED = EngineOptions(max_num_seqs=6, max_num_batched_tokens=48, kv_cache_blocks=8, max_model_len=128)
WHOLE = EngineOptions(max_num_seqs=1, block_size=128, enable_prefix_caching=False)


def test_logdiff_is_zero_on_smollm2(tmp_path: Path) -> None:
    model = demo.prepare(demo.default_cache())
    tasks = prompts.read(model / "prompts.jsonl", model)[-6:]  # three, each twice
    cool = Request(str(model), tuple(tasks), max_new_tokens=32, temperature=0.7, seed=5, engine=CROWDED)
    requests = {
        "cool": cool,
        "whole": replace(
            cool, prompts=cool.prompts[::4], max_new_tokens=8, temperature=1.0, prompt_logprobs=True, engine=WHOLE
        ),
    }
    cases = roll_out(requests, tmp_path)
    trainer = Trainer(cool)
    for case in cases.values():
        trainer.request = case.request
        assert_exact(case, trainer.logprobs(case.rollout))
    counters = cases["cool"].rollout.meta["counters"]
    assert counters["prompts_chunked"] and counters["prefix_cache_hits"] and counters["preemptions"], counters
    case = cases["whole"]
    assert int((~case.rollout.logprobs.isnan()).sum()) > case.expected_tokens
    with torch.no_grad():
        trainer.model.decoder.layers[0].mlp.linear_fc2.weight[0, 0] += 0.5
    changed = compare(case.rollout, trainer.logprobs(case.rollout), case.expected_tokens)
    assert changed.nonzero > changed.tokens // 2
