"""Names and shapes of the tensors in a Hugging Face checkpoint, by family."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from mindspeed_tpi.profiles import Profile

Shapes = dict[str, tuple[int, ...]]
"""Tensor name → shape."""

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
# buffers that old checkpoints carry; made anew from the configuration by both engines
_REDUNDANT = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Names:
    """How a family names its experts.

    Attributes:
        block: the layer's module; gate, up, down: an expert's projections.
        shared: the shared experts.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"

    @classmethod
    def of_family(cls, family: str) -> Names:
        if family == "MixtralForCausalLM":
            return cls("block_sparse_moe", "w1", "w3", "w2")
        return cls(shared="shared_expert") if family == "Qwen2MoeForCausalLM" else cls()

    @classmethod
    def of_megatron(cls, config: Any) -> Names:
        """The names of the family that a TransformerConfig describes: among those with experts, only Glm4-MoE has a sigmoid
        router; of the others Qwen2-MoE has attention biases, and Qwen3-MoE query/key norms."""
        if config.moe_router_score_function == "sigmoid" or config.qk_layernorm:
            return cls()
        return cls.of_family("Qwen2MoeForCausalLM" if config.add_qkv_bias else "MixtralForCausalLM")

    def expert(self, number: int) -> tuple[str, str, str]:
        """Names of gate, up and down of one expert, inside a layer."""
        prefix = f"{self.block}.experts.{number}."
        gate, up, down = (f"{prefix}{name}.weight" for name in (self.gate, self.up, self.down))
        return gate, up, down


def tensors(profile: Profile) -> Shapes:
    """Every tensor that the engines read of a model's checkpoint."""
    hidden, dim = profile.hidden, profile.head_dim
    queries, keys = profile.heads * dim, profile.kv_heads * dim
    names = Names.of_family(profile.family)
    attention: Shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
    }
    if profile.qkv_bias:
        attention |= {f"self_attn.{n}_proj.bias": (rows,) for n, rows in (("q", queries), ("k", keys), ("v", keys))}
    if profile.qk_norm:
        attention |= {f"self_attn.{n}_norm.weight": (dim,) for n in "qk"}
    dense = _mlp("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", hidden, profile.ffn)
    sparse = _experts(profile, names)
    found: Shapes = {EMBEDDING: (profile.vocab, hidden), FINAL_NORM: (hidden,)}
    if not profile.tied:
        found[HEAD] = (profile.vocab, hidden)
    for layer in range(profile.layers):
        block = dense if profile.moe is None or layer in profile.moe.dense_layers else sparse
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in (attention | block).items()}
    return found


def _mlp(gate: str, up: str, down: str, hidden: int, ffn: int) -> Shapes:
    return {f"{gate}.weight": (ffn, hidden), f"{up}.weight": (ffn, hidden), f"{down}.weight": (hidden, ffn)}


def _experts(profile: Profile, names: Names) -> Shapes:
    """What a layer of experts holds, inside the layer."""
    moe, hidden = profile.moe, profile.hidden
    if moe is None:
        return {}
    found: Shapes = {f"{names.block}.gate.weight": (moe.experts, hidden)}
    if moe.bias:
        found[f"{names.block}.gate.e_score_correction_bias"] = (moe.experts,)
    for expert in range(moe.experts):
        gate, up, down = (name.removesuffix(".weight") for name in names.expert(expert))
        found |= _mlp(gate, up, down, hidden, moe.ffn)
    if moe.shared_ffn:
        shared = f"mlp.{names.shared}."
        found |= _mlp(f"{shared}gate_proj", f"{shared}up_proj", f"{shared}down_proj", hidden, moe.shared_ffn)
        if moe.shared_gate:
            found[f"mlp.{names.shared}_gate.weight"] = (1, hidden)
    return found


def ignored(name: str, layers: int, mtp_layers: int) -> bool:
    """Whether both engines leave a tensor out: a rotary buffer, or a part of the `mtp_layers` multi-token-prediction layers
    that follow the model's own."""
    layer = _LAYER.match(name)
    return bool(_REDUNDANT.fullmatch(name)) or bool(layer and layers <= int(layer[1]) < layers + mtp_layers)
