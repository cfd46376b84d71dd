"""Engines of two ranks, each against the model written out for one sequence and one rank.

Starting one takes most of a minute, so each plays every scenario.
"""

import pytest

from mindspeed_tpi.errors import InputError, LayoutError
from mindspeed_tpi.parity.engine import Engine
from mindspeed_tpi.parity.request import EngineOptions, Request
from mindspeed_tpi.weights import Checkpoint
from tests.models import random_prompts, write_model
from tests.plain_model import sampled_as_written_out

SIZES = {
    "layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 256, "moe_ffn": 64, "vocab": 120,
    "max_positions": 256,
}  # fmt: skip
PROMPTS = random_prompts([5, 40, 70, 33, 1], vocab=120, shared=40)


@pytest.mark.parametrize(
    ("family", "layout", "changes"),
    [
        ("llama-tied", "tp=2", {"kv_heads": 1}),
        ("qwen2-moe", "tp=2", {}),
        ("glm4-moe", "tp=2,ep=2", {"kv_heads": 1}),
        ("qwen3-moe", "dp=2,ep=2", {}),
    ],
)
def test_two_ranks(family, layout, changes, tmp_path):
    sizes = SIZES | changes
    path, other = (write_model(tmp_path / name, family, **sizes, seed=seed) for seed, name in enumerate("ab"))
    options = EngineOptions(max_num_seqs=3, max_num_batched_tokens=32, max_model_len=192, kv_cache_blocks=8)
    request = Request(model=str(path), prompts=PROMPTS, max_new_tokens=8, rollout=layout, engine=options)
    with Engine(request) as engine:
        assert len({worker["pid"] for worker in engine.workers}) == 2
        assert {worker["fingerprint"] for worker in engine.workers} == {engine.profile.contract().fingerprint}
        first, again = engine.generate(), engine.generate()
        assert sampled_as_written_out(first, path)
        assert first.token_ids.tolist() == again.token_ids.tolist()
        assert first.logprobs.nan_to_num().tolist() == again.logprobs.nan_to_num().tolist()
        assert again.meta["counters"]["prefix_cache_hits"] > 0
        assert sampled_as_written_out(engine.generate(PROMPTS[:1], 3), path)
        scored = engine.generate(PROMPTS[1:3], 1, prompt_logprobs=True)
        scored.prompt_lengths.fill_(1)  # its prompts' logprobs are checked as if they had been sampled
        assert sampled_as_written_out(scored, path)
        engine.update_weights(Checkpoint(str(other)))
        assert sampled_as_written_out(engine.generate(), other)
        with pytest.raises(InputError, match="lacks"):
            engine.update_weights([])


@pytest.mark.parametrize(
    ("family", "changes", "layout", "named"),
    [
        ("llama", {}, "tp=8", r"tensor_parallel_size 8 .*sizes that work: 1, 2, 4"),
        ("llama", {"ffn": 250}, "tp=4", r"MLP 250; sizes that work: 1, 2$"),
        ("llama", {"hidden": 96, "heads": 6, "kv_heads": 2}, "tp=4", r"6 heads, 2 KV heads .*sizes that work: 1, 2$"),
        ("llama", {}, "dp=2", r"data_parallel_size 2 of a model without experts"),
        ("mixtral", {"moe_ffn": 50}, "tp=4", r"experts of width 50 .*sizes that work: 1, 2, or enable_expert_parallel"),
        ("mixtral", {}, "tp=2,ep=4", r"ep=4"),
    ],
)
def test_refused_before_anything_starts(family, changes, layout, named, tmp_path):
    path = write_model(tmp_path, family, **SIZES | changes)
    with pytest.raises(LayoutError, match=named):
        Engine(Request(model=str(path), prompts=PROMPTS, rollout=layout))
