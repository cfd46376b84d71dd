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
        qkv_bias, qk_norm: the attention has them; a string is the key that says so.
        head_dim: default of `head_dim`; 0: hidden_size / num_attention_heads.
        window: how a sliding window is switched on: `no`, `sliding_window` (present means on) or `use_sliding_window`.
        sliding_window: its default length.
        moe: its experts; None: dense.
    """

    qkv_bias: bool | str = False
    qk_norm: bool | str = False
    head_dim: int = 0
    window: str = "no"
    sliding_window: int | None = None
    moe: MoeFamily | None = None


@dataclass(frozen=True)
class MoeFamily:
    """Names under which an architecture's configuration holds its experts.

    Attributes:
        experts: key of the number of experts. ffn: key of an expert's width.
        score: router's score function. renormalize: whether chosen weights sum to 1; None: `norm_topk_prob` says it.
        eps: added to the denominator of a renormalised sigmoid router.
        grouped: the router limits itself to groups, adds a bias and scales (DeepSeek-V3).
        shared: key of the shared experts' total width, or of their number (then multiplied by `ffn`); empty: none.
        shared_gate: the shared experts have a sigmoid gate.
    """

    experts: str
    ffn: str = "moe_intermediate_size"
    score: str = "softmax"
    renormalize: bool | None = None
    eps: float = 0.0
    grouped: bool = False
    shared: str = ""
    shared_gate: bool = False


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(window="sliding_window", sliding_window=4096),
    "Qwen2ForCausalLM": Family(qkv_bias=True, window="use_sliding_window", sliding_window=4096),
    "Qwen3ForCausalLM": Family(qk_norm=True, head_dim=128, window="use_sliding_window", sliding_window=4096),
    "Qwen3MoeForCausalLM": Family(qk_norm=True, window="use_sliding_window", moe=MoeFamily("num_experts")),
    "Qwen2MoeForCausalLM": Family(
        qkv_bias=True,
        window="use_sliding_window",
        moe=MoeFamily("num_experts", shared="shared_expert_intermediate_size", shared_gate=True),
    ),
    "MixtralForCausalLM": Family(
        window="sliding_window", moe=MoeFamily("num_local_experts", ffn="intermediate_size", renormalize=True)
    ),
    "Glm4MoeForCausalLM": Family(
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        head_dim=128,
        moe=MoeFamily("n_routed_experts", score="sigmoid", eps=1e-20, grouped=True, shared="n_shared_experts"),
    ),
}

_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": ((None, "silu"), "only silu is served"),
    "mlp_bias": ((None, False), "only layers without these biases are served"),
    "attention_bias": ((None, False), "only layers without an output-projection bias are served"),
    "quantization_config": ((None,), "convert the checkpoint to bfloat16, float16 or float32"),
    "attn_logit_softcapping": ((None,), "logit soft-capping is not served"),
    "final_logit_softcapping": ((None,), "logit soft-capping is not served"),
    "rope_interleaved": ((None, False), "only rotary halves are served, not interleaved pairs"),
    "logit_scale": ((None, 1.0), "scaled logits are not served"),
}
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
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
class Moe:
    """Mixture of experts (contract section 5).

    Attributes:
        experts, topk, ffn: number of experts, experts per token, width of an expert.
        score: `softmax` or `sigmoid`. renormalize: chosen weights are divided by their sum (plus `eps`).
        groups, topk_groups: groups of experts and how many a token may use; 1, 1: no groups.
        bias: selection adds a per-expert f32 bias.
        scaling: multiplies the weights.
        shared_ffn: width of the shared expert, 0: none. shared_gate: it has a sigmoid gate.
        dense_layers: layers with an ordinary MLP of the profile's `ffn`.
    """

    experts: int
    topk: int
    ffn: int
    score: str
    renormalize: bool
    eps: float
    groups: int
    topk_groups: int
    bias: bool
    scaling: float
    shared_ffn: int
    shared_gate: bool
    dense_layers: tuple[int, ...]


@dataclass(frozen=True)
class Profile:
    """A decoder as both engines build it.

    Attributes:
        family: Hugging Face architecture.
        hidden, layers, heads, kv_heads, head_dim, ffn, vocab: sizes; `vocab` counts real rows, never padding.
        eps: epsilon of every norm.
        rope: rotary tables.
        window: keys visible to a query, itself included; 0: all.
        qkv_bias, qk_norm, tied: biases of Q, K and V; query/key norms; output projection tied to the embedding.
        dtype: dtype of the checkpoint, `bfloat16`, `float16` or `float32`.
        moe: its experts; None: dense.
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
    moe: Moe | None = None

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
            if config.get(key) not in neutral and key not in (family.qkv_bias, family.qk_norm):
                raise InputError(f"{name} with {key}={config[key]!r} is not supported: {remedy}")
        config = _one_expert_count(name, family, config)
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
            qkv_bias=_flag(family.qkv_bias, config),
            qk_norm=_flag(family.qk_norm, config),
            tied=bool(config.get("tie_word_embeddings", False)),
            dtype=dtype,
            moe=None if family.moe is None else _moe(name, family.moe, config),
        )


def _flag(value: bool | str, config: Mapping[str, Any]) -> bool:
    return bool(config.get(value, False)) if isinstance(value, str) else value


def _one_expert_count(name: str, family: Family, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration with its number of experts under the family's key; transformers writes it under another name."""
    counts = {key: config[key] for key in _EXPERT_COUNTS if config.get(key)}
    shown = ", ".join(f"{key}={value!r}" for key, value in counts.items())
    if counts and family.moe is None:
        raise InputError(f"{name} with {shown} is not supported: this family is dense")
    if len(set(counts.values())) > 1:
        raise InputError(f"{name} with {shown}: these are names of one number; keep one of them")
    return {**config, family.moe.experts: next(iter(counts.values()))} if family.moe and counts else config


def _moe(name: str, family: MoeFamily, config: Mapping[str, Any]) -> Moe:
    missing = [key for key in (family.experts, family.ffn, "num_experts_per_tok") if not config.get(key)]
    if missing:
        raise InputError(f"the config.json of a {name} lacks {', '.join(missing)}")
    experts, topk, ffn = int(config[family.experts]), int(config["num_experts_per_tok"]), int(config[family.ffn])
    groups, topk_groups, scaling = 1, 1, 1.0
    if family.grouped:
        groups, topk_groups = int(config.get("n_group") or 1), int(config.get("topk_group") or 1)
        scaling = float(config.get("routed_scaling_factor") or 1.0)
    if topk > experts or experts % groups or not topk_groups <= groups or topk > topk_groups * (experts // groups):
        raise InputError(
            f"{name}: {topk} of {experts} experts in {topk_groups} of {groups} groups is impossible; "
            "check num_experts_per_tok, n_group and topk_group"
        )
    shared = int(config.get(family.shared) or 0) if family.shared else 0
    layers = int(config["num_hidden_layers"])
    step = int(config.get("decoder_sparse_step") or 1)
    only = set(config.get("mlp_only_layers") or ())
    dense = [
        i for i in range(layers) if i in only or (i + 1) % step or i < int(config.get("first_k_dense_replace") or 0)
    ]
    if len(dense) == layers:
        raise InputError(f"{name} has no layer with experts; use the dense family")
    return Moe(
        experts=experts,
        topk=topk,
        ffn=ffn,
        score=family.score,
        renormalize=bool(config.get("norm_topk_prob", False)) if family.renormalize is None else family.renormalize,
        eps=family.eps,
        groups=groups,
        topk_groups=topk_groups,
        bias=family.grouped,
        scaling=scaling,
        shared_ffn=shared * ffn if family.shared.startswith("n_") else shared,
        shared_gate=family.shared_gate,
        dense_layers=tuple(dense),
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
