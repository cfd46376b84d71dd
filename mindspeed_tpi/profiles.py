"""Model family → what is supported: a checkpoint's configuration as the facts that both engines must agree on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mindspeed_tpi import contract
from mindspeed_tpi.contract import NumericsContract
from mindspeed_tpi.errors import InputError
from mindspeed_tpi.ops import RopeConfig, table_hash


@dataclass(frozen=True)
class Family:
    """What a Hugging Face architecture fixes by its code rather than its configuration.

    Attributes:
        qkv_bias, qk_norm: the attention has them.
        head_dim: default of `head_dim`; 0: hidden_size / num_attention_heads.
        window: how a sliding window is switched on: `no`, `sliding_window` (present means on) or `use_sliding_window`.
        sliding_window: its default length.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int = 0
    window: str = "no"
    sliding_window: int | None = None


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(window="sliding_window", sliding_window=4096),
    "Qwen2ForCausalLM": Family(qkv_bias=True, window="use_sliding_window", sliding_window=4096),
    "Qwen3ForCausalLM": Family(qk_norm=True, head_dim=128, window="use_sliding_window", sliding_window=4096),
}

_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": ((None, "silu"), "only silu is served"),
    "mlp_bias": ((None, False), "only layers without these biases are served"),
    "attention_bias": ((None, False), "only layers without an output-projection bias are served"),
    "quantization_config": ((None,), "convert the checkpoint to bfloat16, float16 or float32"),
    "num_experts": ((None, 0), "only dense models are served"),
    "num_local_experts": ((None, 0), "only dense models are served"),
    "attn_logit_softcapping": ((None,), "logit soft-capping is not served"),
    "final_logit_softcapping": ((None,), "logit soft-capping is not served"),
    "rope_interleaved": ((None, False), "only rotary halves are served, not interleaved pairs"),
    "logit_scale": ((None, 1.0), "scaled logits are not served"),
}
_NEEDED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
)
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Profile:
    """A dense decoder as both engines build it.

    Attributes:
        family: Hugging Face architecture.
        hidden, layers, heads, kv_heads, head_dim, ffn, vocab: sizes; `vocab` counts real rows, never padding.
        eps: epsilon of every norm.
        rope: rotary tables.
        window: keys visible to a query, itself included; 0: all.
        qkv_bias, qk_norm, tied: biases of Q, K and V; query/key norms; output projection tied to the embedding.
        dtype: dtype of the checkpoint, `bfloat16`, `float16` or `float32`.
    """

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    eps: float
    rope: RopeConfig
    window: int
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    def contract(self) -> NumericsContract:
        """This process's contract with the model's rotary tables in it."""
        return contract.current().overridden({"rope_table": table_hash(self.rope)})

    @classmethod
    def load(cls, model: str | Path) -> Profile:
        """Profile of a Hugging Face model directory.

        Raises:
            InputError: no readable `config.json`, or a family or feature that is not supported.
        """
        path = Path(model) / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read {path}: {error}") from None
        return cls.from_hf(config)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Profile:
        """Profile of a Hugging Face configuration: parsed `config.json`, or `AutoConfig.from_pretrained(…).to_dict()`.

        Raises:
            InputError: a family or feature that is not supported; names it and what would work.
        """
        name = (config.get("architectures") or ["none"])[0]
        family = FAMILIES.get(name)
        if family is None:
            raise InputError(f"architecture {name} is not supported; supported: {', '.join(sorted(FAMILIES))}")
        for key, (neutral, remedy) in _NEUTRAL.items():
            if config.get(key) not in neutral:
                raise InputError(f"{name} with {key}={config[key]!r} is not supported: {remedy}")
        missing = [key for key in _NEEDED if config.get(key) is None]
        if missing:
            raise InputError(f"the model's config.json lacks {', '.join(missing)}")
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        hidden = int(config["hidden_size"])
        head_dim = int(config.get("head_dim") or family.head_dim or hidden // heads)
        if heads % kv_heads:
            raise InputError(f"num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}")
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
        if dtype not in _DTYPES:
            raise InputError(f"dtype {dtype} is not supported; supported: {', '.join(_DTYPES)}")
        return cls(
            family=name,
            hidden=hidden,
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
            eps=float(config["rms_norm_eps"]),
            rope=RopeConfig.from_hf({**config, "head_dim": head_dim}),
            window=_window(name, family, config),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            tied=bool(config.get("tie_word_embeddings", False)),
            dtype=dtype,
        )


def _window(name: str, family: Family, config: Mapping[str, Any]) -> int:
    """Window of every layer, 0 for none; layers that differ are refused."""
    layers = int(config["num_hidden_layers"])
    if family.window == "no" or (family.window == "use_sliding_window" and not config.get("use_sliding_window", False)):
        return 0
    length = config.get("sliding_window", family.sliding_window)
    if not length:
        return 0
    types = config.get("layer_types")
    if types is None and family.window == "use_sliding_window":
        full = min(int(config.get("max_window_layers", 28)), layers)
        types = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    kinds = set(types or ["sliding_attention"])
    if len(kinds) > 1:
        raise InputError(
            f"{name} mixes sliding-window and full-attention layers (use_sliding_window with max_window_layers="
            f"{config.get('max_window_layers')}, or layer_types), which is not supported: set use_sliding_window to false, or "
            "one window for all layers"
        )
    return int(length) if kinds == {"sliding_attention"} else 0
