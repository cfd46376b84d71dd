"""Which checkpoints are supported, and what is read from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mindspeed_tpi import contract
from mindspeed_tpi.errors import InputError
from mindspeed_tpi.ops import table_hash
from mindspeed_tpi.profiles import Moe, Profile
from tests.models import FAMILIES, write_model


def config(family: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    base = {
        "architectures": [family],
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 100,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
        "hidden_act": "silu",
        "dtype": "bfloat16",
    }
    return {**base, **changes}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(tmp_path: Path, family: str) -> None:
    profile = Profile.load(write_model(tmp_path, family, layers=1, hidden=96, ffn=96))
    head_dim = 16 if family == "qwen2" else 128
    assert (profile.heads, profile.kv_heads, profile.head_dim, profile.vocab) == (6, 2, head_dim, 500)
    assert profile.qkv_bias == (family == "qwen2") and profile.qk_norm == (family == "qwen3")
    assert profile.tied == (family == "llama-tied") and profile.window == (48 if family == "mistral" else 0)
    assert profile.rope.theta == 1e6 and profile.rope.rotary_dim == head_dim
    assert profile.contract().rope_table == table_hash(profile.rope)
    assert contract.current().rope_table == ""


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_and_json_agree(tmp_path: Path, family: str) -> None:
    transformers = pytest.importorskip("transformers")
    path = write_model(tmp_path, family, layers=1, hidden=96, ffn=96)
    full = transformers.AutoConfig.from_pretrained(path).to_dict()
    assert Profile.from_hf({**full, "dtype": "bfloat16"}) == Profile.load(path)


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
)
def test_defaults_are_those_of_transformers(architecture: str) -> None:
    """A config.json that says little means the same to transformers and to us."""
    transformers = pytest.importorskip("transformers")
    little = config(architecture)
    cls = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    full = cls(**{k: v for k, v in little.items() if k not in ("architectures", "dtype")}).to_dict()
    assert Profile.from_hf({**full, "architectures": [architecture], "dtype": "bfloat16"}) == Profile.from_hf(little)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}, 0),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, 8),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4}, 0),
        ({"use_sliding_window": True, "sliding_window": 8}, 0),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, 0),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"] * 4}, 8),
    ],
)
def test_qwen2_windows(changes: dict[str, Any], window: int) -> None:
    assert Profile.from_hf(config("Qwen2ForCausalLM", **changes)).window == window


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["DeepseekV3ForCausalLM"]},
            "DeepseekV3ForCausalLM is not supported; supported: Glm4MoeForCausalLM, LlamaForCausalLM",
        ),
        ({"architectures": None}, "architecture none"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'.*only silu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_local_experts": 8}, "num_local_experts=8.*dense"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads=3"),
        ({"dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn"),
    ],
)
def test_refusals_name_what_they_refuse(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Profile.from_hf(config(**changes))


def test_mixed_windows_are_refused() -> None:
    with pytest.raises(InputError, match="max_window_layers=2"):
        Profile.from_hf(config("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=8, max_window_layers=2))


def test_partial_rotary() -> None:
    profile = Profile.from_hf(config(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}))
    assert profile.rope.rotary_dim == 8 and profile.head_dim == 16


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        Profile.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1])[:-1])
    with pytest.raises(InputError, match="cannot read"):
        Profile.load(tmp_path)


MOE = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "norm_topk_prob": True}


def test_moe_families() -> None:
    qwen3 = Profile.from_hf(config("Qwen3MoeForCausalLM", **MOE)).moe
    assert qwen3 == Moe(16, 4, 64, "softmax", True, 0.0, 1, 1, False, 1.0, 0, False, ())
    qwen2 = Profile.from_hf(
        config("Qwen2MoeForCausalLM", **MOE | {"norm_topk_prob": False, "shared_expert_intermediate_size": 96})
    )
    assert qwen2.qkv_bias and qwen2.moe is not None
    assert (qwen2.moe.renormalize, qwen2.moe.shared_ffn, qwen2.moe.shared_gate) == (False, 96, True)
    mixtral = Profile.from_hf(config("MixtralForCausalLM", num_local_experts=8, num_experts_per_tok=2))
    assert mixtral.moe is not None and mixtral.moe.ffn == mixtral.ffn and mixtral.moe.renormalize
    glm = Profile.from_hf(
        config(
            "Glm4MoeForCausalLM",
            n_routed_experts=16,
            num_experts_per_tok=4,
            moe_intermediate_size=64,
            n_shared_experts=2,
            n_group=4,
            topk_group=2,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            first_k_dense_replace=1,
            attention_bias=True,
            use_qk_norm=True,
        )
    )
    assert glm.qkv_bias and glm.qk_norm
    assert glm.moe == Moe(16, 4, 64, "sigmoid", True, 1e-20, 4, 2, True, 2.5, 128, False, (0,))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("Qwen3MoeForCausalLM", {}, "lacks num_experts, moe_intermediate_size, num_experts_per_tok"),
        ("Qwen3MoeForCausalLM", MOE | {"num_experts_per_tok": 17}, "17 of 16 experts"),
        ("Qwen3MoeForCausalLM", MOE | {"decoder_sparse_step": 9}, "no layer with experts"),
        ("LlamaForCausalLM", {"num_local_experts": 8}, "num_local_experts=8 is not supported: this family is dense"),
    ],
)
def test_moe_refusals(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Profile.from_hf(config(family, **changes))


def test_number_of_experts_under_transformers_name() -> None:
    renamed = {key: value for key, value in MOE.items() if key != "num_experts"} | {"num_local_experts": 16}
    assert Profile.from_hf(config("Qwen3MoeForCausalLM", **renamed)) == Profile.from_hf(
        config("Qwen3MoeForCausalLM", **MOE)
    )
    with pytest.raises(InputError, match="num_experts=16, num_local_experts=8: these are names of one number"):
        Profile.from_hf(config("Qwen3MoeForCausalLM", **MOE, num_local_experts=8))
