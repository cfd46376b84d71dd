"""Small random Hugging Face model directories that are *hard*: large weights, so that a wrong order of operations shows.

No tokenizer is written; prompts are token ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

FAMILIES = ("llama", "llama-tied", "qwen2", "qwen3", "mistral")
_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "llama-tied": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "mistral": ("MistralForCausalLM", "mistral"),
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
) -> Path:
    """Write `config.json` and `model.safetensors` of a random dense decoder.

    Weights are normal with deviation `std` (output projection twice that), norm weights 1 ± 0.2, attention biases
    (qwen2) normal with deviation 0.2. qwen2's head_dim is hidden / heads, whatever is asked for. `window` is the
    sliding window of mistral. Equal arguments give equal files.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    architecture, model_type = _ARCHITECTURES[family]
    tied = family == "llama-tied"
    if family == "qwen2":  # vLLM reads no head_dim there
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
    if family in ("qwen2", "qwen3"):
        config["use_sliding_window"] = False
    (path / "config.json").write_text(json.dumps(config, indent=2))
    weights = random_weights(family, config, seed=seed)
    save_file(weights, str(path / "model.safetensors"), metadata={"format": "pt"})
    return path


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
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
            "input_layernorm.weight": (norm, (hidden,)),
            "self_attn.q_proj.weight": (normal, (q_rows, hidden)),
            "self_attn.k_proj.weight": (normal, (kv_rows, hidden)),
            "self_attn.v_proj.weight": (normal, (kv_rows, hidden)),
            "self_attn.o_proj.weight": (normal, (hidden, q_rows)),
            "post_attention_layernorm.weight": (norm, (hidden,)),
            "mlp.gate_proj.weight": (normal, (ffn, hidden)),
            "mlp.up_proj.weight": (normal, (ffn, hidden)),
            "mlp.down_proj.weight": (normal, (hidden, ffn)),
        }
        weights.update({prefix + name: make(*shape) for name, (make, shape) in shapes.items()})
        if family == "qwen2":
            for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
                weights[f"{prefix}self_attn.{name}_proj.bias"] = normal(rows, scale=0.2)
        if family == "qwen3":
            weights[prefix + "self_attn.q_norm.weight"] = norm(head_dim)
            weights[prefix + "self_attn.k_norm.weight"] = norm(head_dim)
    weights["model.norm.weight"] = norm(hidden)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(config["vocab_size"], hidden, scale=2 * std)
    return weights


def random_prompts(lengths: list[int], *, vocab: int = 500, seed: int = 0, shared: int = 0) -> list[list[int]]:
    """Prompts of the given lengths (each at least 1); the first `shared` ids are the same in all of them."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(3, vocab, (shared,), generator=generator).tolist()
    return [(start + torch.randint(3, vocab, (n,), generator=generator).tolist())[:n] for n in lengths]
