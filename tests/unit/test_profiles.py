"""Which checkpoints are supported, and what is read from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mindspeed_tpi import contract, profiles
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


OPTIONAL = {  # keys that may be absent, and a value that differs from every default
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rope_theta": 5e5,
    "partial_rotary_factor": 0.75,
    "sliding_window": 8,
    "max_window_layers": 0,
    "tie_word_embeddings": True,
    "norm_topk_prob": True,
    "shared_expert_intermediate_size": 96,
    "n_shared_experts": 3,
    "first_k_dense_replace": 2,
    "routed_scaling_factor": 2.5,
    "decoder_sparse_step": 2,
    "attention_bias": True,
    "use_qk_norm": True,
}


@pytest.mark.parametrize("present", [None, *OPTIONAL])
@pytest.mark.parametrize("architecture", profiles.FAMILIES)
def test_defaults_are_those_of_transformers(architecture: str, present: str | None) -> None:
    """A config.json that says little means the same to transformers, from which vLLM reads, and to us."""
    transformers = pytest.importorskip("transformers")
    given = little(architecture, use_sliding_window=True)
    given = {key: value for key, value in given.items() if key not in OPTIONAL}
    given |= {} if present is None else {present: OPTIONAL[present]}
    given |= {"num_attention_heads": 32, "hidden_size": 512}  # some families have 32 KV heads by default
    if architecture in ("LlamaForCausalLM", "Glm4MoeForCausalLM"):
        given["sliding_window"] = None
    cls = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    full = cls(**{k: v for k, v in given.items() if k not in ("architectures", "dtype")}).to_dict()
    answers = [_answer(given), _answer({**full, "architectures": [architecture], "dtype": "bfloat16"})]
    assert answers[0] == answers[1]


def _answer(config: dict[str, Any]) -> Profile | type[InputError]:
    try:
        return Profile.from_hf(config)
    except InputError:
        return InputError


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
        ({"architectures": "LlamaForCausalLM"}, "architecture none"),
        ({"compression_config": {}}, "compression_config"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers='4'.*positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"vocab_size": 100.5}, "vocab_size=100.5"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6'.*positive number"),
        ({"num_key_value_heads": True}, "num_key_value_heads=True"),
        ({"hidden_size": 66}, "hidden_size=66 to be a multiple of num_attention_heads=4"),
        ({"head_dim": 20}, "head_dim=20 .*multiples of 8 up to 256"),
        ({"head_dim": 264}, "head_dim=264 .*multiples of 8 up to 256"),
        ({"sliding_window": 8}, "sliding_window=8 .*set sliding_window to null"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window=None .*vLLM applies it"),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn' is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one set of numbers for all layers"),
        ({"rope_parameters": {"mrope_section": [8, 8]}}, "mrope_section"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "two"}}, "could not convert"),
        ({"partial_rotary_factor": 0.2}, "rotates 3 of head_dim=16"),
        ({"partial_rotary_factor": 1.5}, "rotates 24 of head_dim=16"),
        ({"rope_theta": -1.0}, "rope_theta=-1.0"),
    ],
)
def test_refusals_name_what_they_refuse(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Profile.from_hf(config(**changes))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("Qwen2ForCausalLM", {"head_dim": 8}, "head_dim must be hidden_size / num_attention_heads"),
        ("Qwen2ForCausalLM", {"qkv_bias": False}, "qkv_bias=False"),
        ("Qwen3ForCausalLM", {"attention_bias": True}, "attention_bias=True"),
        ("Glm4MoeForCausalLM", {"sliding_window": 8}, "sliding_window=8 .*set sliding_window to null"),
        ("Glm4MoeForCausalLM", {"tie_word_embeddings": True}, "vLLM does not tie it"),
        ("Glm4MoeForCausalLM", {"n_shared_experts": 0}, "n_shared_experts=0 .*without shared experts"),
        (
            "Qwen2MoeForCausalLM",
            {"shared_expert_intermediate_size": 0},
            "shared_expert_intermediate_size=0 .*without shared",
        ),
        (
            "Qwen2MoeForCausalLM",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4},
            "mixes sliding-window and full-attention layers",
        ),
    ],
)
def test_refusals_of_a_family(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        Profile.from_hf(little(family, **changes))
    assert len(str(caught.value)) < 400


def little(family: str, **changes: Any) -> dict[str, Any]:
    """A configuration with what each family needs and no more."""
    moe = {
        "Qwen3MoeForCausalLM": MOE,
        "Qwen2MoeForCausalLM": MOE | {"shared_expert_intermediate_size": 96},
        "MixtralForCausalLM": {"num_local_experts": 8, "num_experts_per_tok": 2},
        "Glm4MoeForCausalLM": {"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64},
    }
    return config(family, **{**moe.get(family, {}), **changes})


@pytest.mark.parametrize("layers", [2, 4, 100])
def test_qwen3_moe_has_its_window_in_every_layer(layers: int) -> None:
    """As transformers and vLLM have it, whatever max_window_layers says (vllm#15705)."""
    windowed = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": layers}
    assert Profile.from_hf(little("Qwen3MoeForCausalLM", **windowed)).window == 8
    assert Profile.from_hf(little("Qwen3MoeForCausalLM", **windowed | {"use_sliding_window": False})).window == 0


def test_mixed_windows_are_refused() -> None:
    with pytest.raises(InputError, match="max_window_layers=2"):
        Profile.from_hf(config("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=8, max_window_layers=2))


def test_partial_rotary() -> None:
    profile = Profile.from_hf(config(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}))
    assert profile.rope.rotary_dim == 8 and profile.head_dim == 16


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no model directory: it has no config.json"):
        Profile.load(tmp_path)
    for text, said in (
        ("[1", "cannot read"),
        ("[1]", "holds no JSON object"),
        ("version https://git-lfs", "cannot read"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(InputError, match=said):
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
