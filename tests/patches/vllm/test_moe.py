"""Mixtures of experts at one rank: the engine against the model written out, and that against Hugging Face's."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_tpi.errors import InputError
from mindspeed_tpi.parity.engine import Engine
from mindspeed_tpi.parity.request import EngineOptions, Request
from mindspeed_tpi.weights import Checkpoint
from tests.models import MOE_FAMILIES, random_prompts, write_model
from tests.plain_model import PlainModel, sampled_as_written_out

SIZES = {
    "layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 128, "moe_ffn": 64, "vocab": 120,
    "max_positions": 256,
}  # fmt: skip
SMALL = EngineOptions(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=192)


def request_for(path):
    return Request(
        model=str(path), prompts=random_prompts([5, 40, 7, 33], vocab=120, shared=20), max_new_tokens=5, engine=SMALL
    )


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_engine_equals_the_model_written_out(family, tmp_path):
    path = write_model(tmp_path / "a", family, **SIZES)
    other = write_model(tmp_path / "b", family, **SIZES, seed=1)
    with Engine(request_for(path)) as engine:
        first, again = engine.generate(), engine.generate()
        assert sampled_as_written_out(first, path)
        assert again.meta["counters"]["prefix_cache_hits"] > 0
        assert sampled_as_written_out(again, path)
        with pytest.raises(InputError, match=r"lacks .*experts"):
            engine.update_weights((n, t) for n, t in Checkpoint(str(other)) if ".experts.3." not in n)
        engine.update_weights(Checkpoint(str(other)))
        assert sampled_as_written_out(engine.generate(), other)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_model_written_out_is_that_of_transformers(family, tmp_path):
    from transformers import AutoModelForCausalLM

    path = write_model(tmp_path, family, **SIZES, dtype="float32")
    weights = load_file(str(path / "model.safetensors"))
    for name, tensor in weights.items():
        if name.endswith(("mlp.gate.weight", "moe.gate.weight")):
            tensor[5] = -tensor[5]  # no ties: transformers may break them either way
    save_file(weights, str(path / "model.safetensors"), metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.tensor(random_prompts([40], vocab=120)[0])
    with torch.no_grad():
        ours = PlainModel.load(path, torch.float32).logits(tokens)
        reference = theirs(tokens[None]).logits[0]
    assert (ours - reference).abs().max() < 2e-4
