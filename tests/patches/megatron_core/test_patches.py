"""Undo, refusals and single replacements."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_tpi.errors import InputError, LayoutError, ParityError
from mindspeed_tpi.parity.megatron import build_model
from mindspeed_tpi.parity.recompute import main
from mindspeed_tpi.parity.request import Request
from mindspeed_tpi.parity.trainer import Trainer
from mindspeed_tpi.patches.megatron_core import PATCHES, support
from mindspeed_tpi.platform import cpu
from tests.patches.megatron_core.conftest import VOCAB, rollout_for, same_bits, tiny_model
from tests.rollout_records import record

ROOT = Path(__file__).resolve().parents[3]
Build = Callable[..., Trainer]


def run(code: str, mode: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "MINDSPEED_TPI": mode, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


LATE = """
import importlib, sys
from mindspeed_tpi.patching import Registry, resolve
from mindspeed_tpi.patches.megatron_core import PATCHES
from mindspeed_tpi.platform import cpu
patches = (*cpu.PATCHES, *PATCHES)
for p in patches:
    importlib.import_module(p.module)
def snapshot():
    return [resolve.stored(*resolve.holder(p.target)) for p in patches]
before = snapshot()
registry = Registry(patches)
registry.apply()
assert all(s.state == "applied" for s in registry.status()), registry.status()
during = snapshot()
assert all(a is not b for a, b in zip(before, during))
registry.apply()
assert all(a is b for a, b in zip(during, snapshot()))
registry.revert()
assert all(a is b for a, b in zip(before, snapshot()))
"""

EARLY = """
import sys, types
import mindspeed_tpi
from mindspeed_tpi.platform import cpu
cpu.enable()
import megatron.core.models.gpt, megatron.core.models.gpt.gpt_layer_specs, megatron.core.distributed
import megatron.core.models.common.embeddings, megatron.core.optimizer
from mindspeed_tpi.patches.megatron_core import PATCHES
states = {s.patch.target: s.state for s in (*mindspeed_tpi.patch_status(), *cpu.status())}
assert all(states[p.target] == "applied" for p in (*PATCHES, *cpu.PATCHES)), states
mindspeed_tpi.disable()
cpu.disable()
def ours(value):
    return str(getattr(getattr(value, "__func__", value), "__module__", "")).startswith("mindspeed_tpi")
left = []
for name, module in list(sys.modules.items()):
    if name.split(".")[0] in ("megatron",) or name in ("torch.cuda", "torch.distributed"):
        for key, value in list(vars(module).items()):
            if ours(value):
                left.append(f"{name}:{key}")
            if isinstance(value, type):
                left += [f"{name}:{key}.{k}" for k, v in list(vars(value).items()) if ours(v)]
assert not left, left
"""


@pytest.mark.parametrize(("code", "mode"), [(LATE, "0"), (EARLY, "strict")], ids=["late", "early"])
def test_every_target_is_its_original_again(code: str, mode: str) -> None:
    result = run(code, mode)
    assert result.returncode == 0, result.stderr[-3000:]


def test_patches_are_declared_in_full() -> None:
    for patch in (*PATCHES, *cpu.PATCHES):
        assert patch.reason and patch.until and patch.versions, patch.target


def _config(**changes: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    served: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
    }
    config = TransformerConfig(**served)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("mtp_num_layers", 1),
        ("moe_shared_expert_overlap", True),
        ("overlap_moe_expert_parallel_comm", True),
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("moe_aux_loss_coeff", 0.01),
        ("moe_aux_loss_coeff", [0.0, 0.01]),
        ("moe_z_loss_coeff", 1e-3),
        ("moe_input_jitter_eps", 0.1),
        ("moe_expert_capacity_factor", 1.0),
        ("moe_router_force_load_balancing", True),
        ("moe_latent_size", 32),
        ("moe_router_num_groups", 2),
        ("multi_latent_attention", True),
        ("hidden_dropout", 0.1),
        ("attention_dropout", 0.1),
        ("normalization", "LayerNorm"),
        ("activation_func", torch.nn.functional.gelu),
        ("rotary_interleaved", True),
        ("softmax_type", "learnable"),
        ("cross_entropy_loss_fusion", True),
        ("fp8", "e4m3"),
    ],
)
def test_what_is_not_served_is_refused_by_name(setting: str, value: Any) -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    assert support.unsupported(_config()) == []
    with pytest.raises(ParityError, match=f"{setting}=.*\\("):
        GPTModel(_config(**{setting: value}), get_gpt_layer_local_spec(normalization="RMSNorm"), 64, 64)


def test_outside_strict_mode_it_runs_as_upstream_wrote_it(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setenv("MINDSPEED_TPI", "1")
    config = _config(hidden_dropout=0.25)
    with caplog.at_level("WARNING"):
        assert not support.served(config) and not support.served(config)
    assert caplog.text.count("hidden_dropout=0.25 (set it to 0.0") == 1


def test_masks_and_packing(trainer: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    t = trainer("llama")
    tokens = torch.arange(6).unsqueeze(0)
    causal = torch.ones(1, 1, 6, 6, dtype=torch.bool).triu(1)
    with torch.no_grad():
        assert same_bits(t.model(tokens, tokens, causal), t.model(tokens, tokens, None))
        with pytest.raises(ParityError, match="attention mask that is not the causal one"):
            t.model(tokens, tokens, causal.roll(1, -1))
        from megatron.core.packed_seq_params import PackedSeqParams

        with pytest.raises(ParityError, match="packed sequences"):
            packed = PackedSeqParams(qkv_format="sbhd", max_seqlen_q=6, max_seqlen_kv=6)
            t.model(tokens, tokens, None, packed_seq_params=packed)


def test_a_sequence_beyond_the_rotary_table(trainer: Build) -> None:
    t = trainer("llama")
    with pytest.raises(InputError, match="65 tokens exceeds the model's 64 positions"):
        t.logprobs(rollout_for(t, [65]))


def test_label_smoothing_is_refused(trainer: Build) -> None:
    trainer("llama")
    from megatron.core import tensor_parallel

    with pytest.raises(ParityError, match=r"label_smoothing=0\.1"):
        tensor_parallel.vocab_parallel_cross_entropy(torch.zeros(2, 1, 4), torch.zeros(2, 1, dtype=torch.int64), 0.1)


def test_residual_add_with_dropout_is_refused(trainer: Build) -> None:
    t = trainer("llama")
    x = torch.zeros(2, 1, 4)
    add = t.model.decoder.layers[0].mlp_bda(True, True)
    with pytest.raises(ParityError, match=r"dropout=0\.5"):
        add((x, None), x, 0.5)


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "glm4-moe"])
def test_parity_spec_gives_the_same_model(trainer: Build, family: str) -> None:
    t = trainer(family)
    from megatron.core.models.gpt.gpt_model import GPTModel

    from mindspeed_tpi import weights
    from mindspeed_tpi.patches.megatron_core.models.gpt.gpt_layer_specs import get_gpt_layer_parity_spec

    rope = t.profile.rope
    model = GPTModel(
        t.model.config,
        get_gpt_layer_parity_spec(t.model.config),
        VOCAB,
        rope.max_position,
        position_embedding_type="rope",
        rotary_base=rope.theta,  # type: ignore[arg-type]
        rotary_percent=rope.rotary_dim / t.profile.head_dim,
    )
    assert model.rotary_pos_emb.rope_config == rope
    weights.load(model, t.request.model)
    tokens = torch.arange(7).unsqueeze(0)
    with torch.no_grad():
        assert same_bits(model(tokens, tokens, None), t.model(tokens, tokens, None))


@pytest.mark.parametrize("scaling", ["yarn", "llama3", "linear"])
def test_rope_config_from_megatron_arguments(tmp_path: Path, scaling: str) -> None:
    from mindspeed_tpi.parity.megatron import start_megatron
    from mindspeed_tpi.patches.megatron_core.models.gpt import gpt_model
    from mindspeed_tpi.profiles import Profile

    numbers = {
        "yarn": {
            "factor": 4.0,
            "original_max_position_embeddings": 16.0,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": 1.0,
        },
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192.0,
        },
        "linear": {"factor": 2.0},
    }[scaling]
    start_megatron()
    profile = Profile.load(tiny_model(tmp_path, "llama", rope_scaling={"rope_type": scaling, **numbers}))
    found = []
    original = gpt_model.rope_config

    def spy(*args: Any) -> Any:
        found.append(original(*args))
        return found[-1]

    gpt_model.rope_config = spy
    try:
        build_model(profile)
    finally:
        gpt_model.rope_config = original
    assert found == [profile.rope]


def test_trainer_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    model = str(tiny_model(tmp_path / "m", "llama"))
    with pytest.raises(LayoutError, match="tp=2"):
        Trainer(Request(model, ((1,),), train="tp=2"))
    with pytest.raises(InputError, match="a stock run needs MINDSPEED_TPI=0"):
        Trainer(Request(model, ((1,),), stock=True))


def test_weight_versions(trainer: Build, tmp_path: Path) -> None:
    first = trainer("llama")
    other = tiny_model(tmp_path / "other", "llama", seed=7)
    t = Trainer(Request(first.request.model, ((1,),), weight_updates=(str(other),)))
    sequences = [[3, 4, 5, 6]] * 2
    both = t.logprobs(record(sequences, t.contract, versions=[1, 0]))
    assert not same_bits(both[1:4], both[5:8])
    assert same_bits(both[4:], first.logprobs(record(sequences[:1], t.contract)))
    with pytest.raises(InputError, match="weight version 2"):
        t.logprobs(record(sequences[:1], t.contract, versions=[2]))


def test_the_process(trainer: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from safetensors import safe_open

    t = trainer("llama")
    rollout = rollout_for(t)
    request, asked, out = tmp_path / "q.json", tmp_path / "r.safetensors", tmp_path / "o.safetensors"
    request.write_text(t.request.to_json())
    rollout.save(asked)
    assert main([str(request), str(asked), str(out)]) == 0
    with safe_open(str(out), framework="pt") as file:
        assert same_bits(file.get_tensor("logprobs"), t.logprobs(rollout))
        assert '"fingerprint"' in file.metadata()["meta"]
    record([[1, 2]], None).save(asked)
    assert main([str(request), str(asked), str(out)]) == 3
    assert "carries no numerics contract" in capsys.readouterr().err
    assert main([str(tmp_path / "none.json"), str(asked), str(out)]) == 2


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_stock_process(trainer: Build, tmp_path: Path, temperature: float) -> None:
    """`MINDSPEED_TPI=0`: Megatron-core's own numerics through the same driver, near ours and not equal."""
    import json
    from dataclasses import replace

    from safetensors import safe_open

    t = trainer("llama")
    rollout = rollout_for(t, temperature=temperature)
    request, asked, out = (str(tmp_path / name) for name in ("q.json", "r.safetensors", "o.safetensors"))
    Path(request).write_text(replace(t.request, stock=True).to_json())
    record([s.tolist() for s in rollout.sequences], None, temperature=temperature).save(asked)
    command = [sys.executable, "-m", "mindspeed_tpi.parity.recompute", request, asked, out]
    env = {**os.environ, "MINDSPEED_TPI": "0", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    with safe_open(out, framework="pt") as file:
        stock, meta = file.get_tensor("logprobs"), json.loads(file.metadata()["meta"])
    ours = t.logprobs(rollout)
    assert meta["op_calls"] == {} and meta["fingerprint"] is None
    assert not same_bits(stock, ours)
    torch.testing.assert_close(stock, ours, atol=0.3, rtol=0, equal_nan=True)
