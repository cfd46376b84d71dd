"""Small random Hugging Face model directories that are *hard*: large weights, so that a wrong order of operations shows.

No tokenizer is written; prompts are token ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor

FAMILIES = ("llama", "llama-tied", "qwen2", "qwen3", "mistral")
MOE_FAMILIES = ("qwen3-moe", "qwen2-moe", "mixtral", "glm4-moe")
_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "llama-tied": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "mistral": ("MistralForCausalLM", "mistral"),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "qwen2-moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "mixtral": ("MixtralForCausalLM", "mixtral"),
    "glm4-moe": ("Glm4MoeForCausalLM", "glm4_moe"),
}


def write_model(
    path: str | Path,
    family: str = "llama",
    *,
    layers: int = 4,
    hidden: int = 384,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 128,
    ffn: int = 768,
    vocab: int = 500,
    dtype: str = "bfloat16",
    seed: int = 0,
    window: int = 48,
    max_positions: int = 4096,
    rope_theta: float = 1e6,
    rope_scaling: dict[str, Any] | None = None,
    std: float = 0.08,
    experts: int = 16,
    topk: int = 4,
    moe_ffn: int = 256,
    moe_changes: dict[str, Any] | None = None,
) -> Path:
    """Write `config.json` and `model.safetensors` of a random decoder.

    Weights are normal with deviation `std` (output projection twice that), norm weights 1 ± 0.2, attention biases
    (qwen2) normal with deviation 0.2. The head_dim of qwen2 and qwen2-moe is hidden / heads, whatever is asked for.
    `window` is the sliding window of mistral. In the MoE families the router rows of experts 2 and 5 are equal, so that
    their logits tie; shared experts are 2 · moe_ffn wide; glm4-moe has one dense layer, 4 groups of experts of which 2
    are used, and a correction bias. `moe_changes` goes on top of their configuration. Equal arguments give equal files.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    architecture, model_type = _ARCHITECTURES[family]
    tied = family == "llama-tied"
    if family in ("qwen2", "qwen2-moe"):  # vLLM reads no head_dim there
        head_dim = hidden // heads
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": max_positions,
        "rope_parameters": {"rope_type": "default", **(rope_scaling or {}), "rope_theta": rope_theta},
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": dtype,
        "initializer_range": std,
    }
    if family == "mistral":
        config["sliding_window"] = window
    if family.startswith("qwen"):
        config["use_sliding_window"] = False
    if family in MOE_FAMILIES:
        config.update(_moe_config(family, experts, topk, moe_ffn))
        config.update(moe_changes or {})
    (path / "config.json").write_text(json.dumps(config, indent=2))
    weights = random_weights(family, config, seed=seed)
    save_file(weights, str(path / "model.safetensors"), metadata={"format": "pt"})
    return path


def _moe_config(family: str, experts: int, topk: int, ffn: int) -> dict[str, Any]:
    if family == "mixtral":
        return {
            "num_local_experts": experts,
            "num_experts_per_tok": topk,
            "intermediate_size": ffn,
            "sliding_window": None,
        }
    config = {"num_experts_per_tok": topk, "moe_intermediate_size": ffn, "norm_topk_prob": family != "qwen2-moe"}
    if family == "glm4-moe":
        return config | {
            "n_routed_experts": experts,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        }
    config |= {"num_experts": experts, "decoder_sparse_step": 1, "mlp_only_layers": []}
    if family == "qwen2-moe":
        config["shared_expert_intermediate_size"] = 2 * ffn
    return config


def random_weights(family: str, config: dict[str, Any], *, seed: int) -> dict[str, Tensor]:
    """Every HF tensor of the model that `config` describes, in the config's dtype."""
    generator = torch.Generator().manual_seed(seed)
    dtype: torch.dtype = getattr(torch, config["dtype"])
    std: float = config["initializer_range"]

    def normal(*shape: int, scale: float = std) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    def norm(size: int) -> Tensor:
        return (1 + 0.4 * (torch.rand(size, generator=generator) - 0.5)).to(dtype)

    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_rows, kv_rows = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    weights = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden, scale=1.0)}
    sparse = family in MOE_FAMILIES
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
            "input_layernorm.weight": (norm, (hidden,)),
            "self_attn.q_proj.weight": (normal, (q_rows, hidden)),
            "self_attn.k_proj.weight": (normal, (kv_rows, hidden)),
            "self_attn.v_proj.weight": (normal, (kv_rows, hidden)),
            "self_attn.o_proj.weight": (normal, (hidden, q_rows)),
            "post_attention_layernorm.weight": (norm, (hidden,)),
        }
        if not sparse or layer < config.get("first_k_dense_replace", 0):
            shapes |= _mlp(normal, "mlp.", ("gate_proj", "up_proj", "down_proj"), hidden, ffn)
        weights.update({prefix + name: make(*shape) for name, (make, shape) in shapes.items()})
        if sparse and layer >= config.get("first_k_dense_replace", 0):
            weights.update(_moe_weights(prefix, config, normal))
        if family in ("qwen2", "qwen2-moe", "glm4-moe"):
            for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
                weights[f"{prefix}self_attn.{name}_proj.bias"] = normal(rows, scale=0.2)
        if family in ("qwen3", "qwen3-moe", "glm4-moe"):
            weights[prefix + "self_attn.q_norm.weight"] = norm(head_dim)
            weights[prefix + "self_attn.k_norm.weight"] = norm(head_dim)
    weights["model.norm.weight"] = norm(hidden)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(config["vocab_size"], hidden, scale=2 * std)
    return weights


def _mlp(
    make: Callable[..., Tensor], prefix: str, names: tuple[str, str, str], hidden: int, ffn: int
) -> dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]]:
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    return {gate: (make, (ffn, hidden)), up: (make, (ffn, hidden)), down: (make, (hidden, ffn))}


def _moe_weights(prefix: str, config: dict[str, Any], normal: Callable[..., Tensor]) -> dict[str, Tensor]:
    """Router, experts and shared experts of one layer."""
    hidden = config["hidden_size"]
    mixtral = "num_local_experts" in config
    experts = config.get("num_local_experts") or config.get("num_experts") or config["n_routed_experts"]
    block, names = (
        ("block_sparse_moe.", ("w1", "w3", "w2")) if mixtral else ("mlp.", ("gate_proj", "up_proj", "down_proj"))
    )
    ffn = config["intermediate_size"] if mixtral else config["moe_intermediate_size"]
    block = prefix + block
    router = normal(experts, hidden)
    router[5] = router[2]
    weights = {block + "gate.weight": router}
    if "n_routed_experts" in config:
        weights[block + "gate.e_score_correction_bias"] = normal(experts, scale=0.2).float()
    shapes = {}
    for expert in range(experts):
        shapes |= _mlp(normal, f"{block}experts.{expert}.", names, hidden, ffn)
    if "n_shared_experts" in config:
        shapes |= _mlp(normal, block + "shared_experts.", names, hidden, config["n_shared_experts"] * ffn)
    if "shared_expert_intermediate_size" in config:
        shapes |= _mlp(normal, block + "shared_expert.", names, hidden, config["shared_expert_intermediate_size"])
        shapes[block + "shared_expert_gate.weight"] = (normal, (1, hidden))
    return weights | {name: make(*shape) for name, (make, shape) in shapes.items()}


def random_prompts(lengths: list[int], *, vocab: int = 500, seed: int = 0, shared: int = 0) -> list[list[int]]:
    """Prompts of the given lengths (each at least 1); the first `shared` ids are the same in all of them."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(3, vocab, (shared,), generator=generator).tolist()
    return [(start + torch.randint(3, vocab, (n,), generator=generator).tolist())[:n] for n in lengths]


@contextmanager
def megatron_config(**fields: Any) -> Iterator[None]:
    """Every TransformerConfig constructed inside has these fields instead of those asked for."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    original = TransformerConfig.__init__
    with mock.patch.object(TransformerConfig, "__init__", lambda self, **asked: original(self, **{**asked, **fields})):
        yield
