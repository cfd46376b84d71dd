"""Hugging Face → Megatron-core → Hugging Face, bit for bit, and checkpoints that do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mindspeed_tpi import weights
from mindspeed_tpi.errors import InputError
from mindspeed_tpi.parity.megatron import build_model, start_megatron
from mindspeed_tpi.profiles import Profile
from tests.models import FAMILIES, MOE_FAMILIES, write_model

SIZES = {
    "layers": 2,
    "hidden": 96,
    "heads": 6,
    "kv_heads": 2,
    "head_dim": 16,
    "ffn": 96,
    "vocab": 50,
    "experts": 8,
    "moe_ffn": 32,
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., tuple[Path, Any, dict[str, Tensor]]]:
    """checkpoint(family) -> (directory, an empty model for it, its tensors)."""

    def make(family: str, dtype: str = "bfloat16") -> tuple[Path, Any, dict[str, Tensor]]:
        path = write_model(tmp_path / family, family, dtype=dtype, **SIZES)  # type: ignore[arg-type]
        start_megatron()
        return path, build_model(Profile.load(path)), load_file(str(path / "model.safetensors"))

    return make


def rewrite(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: t.contiguous() for name, t in tensors.items()}, str(path / "model.safetensors"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", [*FAMILIES, *MOE_FAMILIES])
def test_round_trip(checkpoint: Any, family: str, dtype: str) -> None:
    path, model, tensors = checkpoint(family, dtype)
    weights.load(model, path)
    exported = dict(weights.hf_tensors(model))
    assert sorted(exported) == sorted(tensors)
    for name, tensor in tensors.items():
        assert exported[name].is_contiguous() and torch.equal(exported[name], tensor), name


def test_rows_are_grouped_by_kv_head(checkpoint: Any) -> None:
    path, model, tensors = checkpoint("qwen2")
    weights.load(model, path)
    attention = model.decoder.layers[1].self_attention
    prefix = "model.layers.1.self_attn."
    for kind in ("weight", "bias"):
        q, k, v = (tensors[f"{prefix}{n}_proj.{kind}"] for n in "qkv")
        rows = [t for group in zip(q.chunk(2), k.chunk(2), v.chunk(2), strict=True) for t in group]
        assert torch.equal(getattr(attention.linear_qkv, kind), torch.cat(rows))
    gate, up = (tensors[f"model.layers.1.mlp.{n}_proj.weight"] for n in ("gate", "up"))
    assert torch.equal(model.decoder.layers[1].mlp.linear_fc1.weight, torch.cat((gate, up)))


def test_shards(checkpoint: Any) -> None:
    path, model, tensors = checkpoint("qwen3")
    names = sorted(tensors)
    index = {}
    for shard in range(3):
        file = f"model-0000{shard + 1}-of-00003.safetensors"
        save_file({name: tensors[name].contiguous() for name in names[shard::3]}, str(path / file))
        index.update(dict.fromkeys(names[shard::3], file))
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    weights.load(model, path)
    assert all(torch.equal(t, tensors[name]) for name, t in weights.hf_tensors(model))
    (path / file).unlink()
    with pytest.raises(InputError, match=f"{file} is missing"):
        weights.load(model, path)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_experts_in_one_tensor(checkpoint: Any, family: str) -> None:
    """As newer writers store them: gate and up of all experts in one tensor, down in another; Mixtral's router renamed."""
    path, model, tensors = checkpoint(family)
    gate, up, down = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    packed = {n.replace("block_sparse_moe.gate", "mlp.gate"): t for n, t in tensors.items() if ".experts." not in n}
    for name in [n for n in tensors if n.endswith(f"experts.0.{gate}.weight")]:
        prefix = name.partition("experts.0.")[0] + "experts."

        def stacked(part: str, prefix: str = prefix) -> Tensor:
            return torch.stack([tensors[f"{prefix}{expert}.{part}.weight"] for expert in range(8)])

        where = prefix.replace("block_sparse_moe", "mlp")
        packed[f"{where}gate_up_proj"] = torch.cat((stacked(gate), stacked(up)), dim=1)
        packed[f"{where}down_proj"] = stacked(down)
    rewrite(path, packed)
    weights.load(model, path)
    exported = dict(weights.hf_tensors(model))
    assert sorted(exported) == sorted(tensors) and all(torch.equal(exported[n], t) for n, t in tensors.items())
    packed[f"{where}down_proj"] = packed[f"{where}down_proj"][..., :-1]
    rewrite(path, packed)
    with pytest.raises(InputError, match=r"experts\.0\.\w+\.weight is \[96, 31\], expected \[96, 32\].* and 5 more"):
        weights.load(model, path)


def test_a_multi_token_prediction_layer_is_left_out(checkpoint: Any) -> None:
    path, model, tensors = checkpoint("glm4-moe")
    rewrite(path, {**tensors, "model.layers.2.eh_proj.weight": torch.ones(4)})
    weights.load(model, path)
    rewrite(path, {**tensors, "model.layers.3.eh_proj.weight": torch.ones(4)})
    with pytest.raises(InputError, match=r"unexpected model\.layers\.3\.eh_proj"):
        weights.load(model, path)


def test_the_correction_bias_stays_f32(checkpoint: Any) -> None:
    path, model, tensors = checkpoint("glm4-moe")
    weights.load(model, path)
    bias = tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    router = model.decoder.layers[1].mlp.router
    assert bias.dtype == router.expert_bias.dtype == torch.float32 and torch.equal(router.expert_bias, bias)


def test_padded_vocabulary_and_redundant_tensors(checkpoint: Any) -> None:
    path, model, tensors = checkpoint("llama")
    padded = dict(tensors)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        padded[name] = torch.cat((tensors[name], torch.ones(14, 96, dtype=torch.bfloat16)))
    padded["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    rewrite(path, padded)
    weights.load(model, path)
    assert all(torch.equal(t, tensors[name]) for name, t in weights.hf_tensors(model))


def test_a_tied_checkpoint_may_hold_a_copy(checkpoint: Any) -> None:
    path, model, tensors = checkpoint("llama-tied")
    rewrite(path, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    weights.load(model, path)
    assert "lm_head.weight" not in dict(weights.hf_tensors(model))


def test_what_does_not_fit_is_named(checkpoint: Any) -> None:
    path, model, tensors = checkpoint("llama")
    short = dict(tensors)
    del short["model.layers.1.mlp.up_proj.weight"]
    rewrite(path, {**short, "model.layers.0.self_attn.q_norm.weight": torch.ones(16)})
    with pytest.raises(
        InputError,
        match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight \[96, 96\]; has unexpected model\.layers\.0\.self_attn\.q_norm",
    ):
        weights.load(model, path)
    rewrite(path, {**tensors, "lm_head.weight": tensors["lm_head.weight"][:-1]})
    with pytest.raises(InputError, match=r"lm_head\.weight is \[49, 96\], expected \[50, 96\]"):
        weights.load(model, path)
    (path / "model.safetensors").write_bytes(b"no safetensors file")
    with pytest.raises(InputError, match="is no safetensors file"):
        weights.load(model, path)


def test_values_are_rounded_to_the_models_dtype(checkpoint: Any) -> None:
    path, _, tensors = checkpoint("llama", "float32")
    from dataclasses import replace

    model = build_model(replace(Profile.load(path), dtype="bfloat16"))
    weights.load(model, path)
    assert all(torch.equal(t, tensors[name].to(torch.bfloat16)) for name, t in weights.hf_tensors(model))


def test_rows_beyond_the_real_vocabulary_are_zero(checkpoint: Any) -> None:
    path, _, tensors = checkpoint("llama")
    model = build_model(Profile.load(path))
    for module in (model.embedding.word_embeddings, model.output_layer):
        module.weight = torch.nn.Parameter(torch.ones(56, 96, dtype=torch.bfloat16))
    weights.load(model, path)
    head = model.output_layer.weight
    assert torch.equal(head[:50], tensors["lm_head.weight"]) and not head[50:].any()
    assert dict(weights.hf_tensors(model))["lm_head.weight"].shape == (50, 96)


def test_identity_tells_checkpoints_apart(checkpoint: Any) -> None:
    path, _, tensors = checkpoint("llama")
    before = weights.identity(path)
    assert weights.identity(path) == before
    rewrite(path, {**tensors, "model.norm.weight": tensors["model.norm.weight"] * 2})
    assert weights.identity(path) != before
    with pytest.raises(InputError, match="cannot read the checkpoint"):
        weights.identity(path / "nowhere")


def test_wrapped_models_are_looked_through(checkpoint: Any) -> None:
    path, model, tensors = checkpoint("llama")
    wrapper = torch.nn.Module()
    wrapper.module = model
    weights.load(wrapper, path)
    assert all(torch.equal(t, tensors[name]) for name, t in weights.hf_tensors(wrapper))
