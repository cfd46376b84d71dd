"""Model family → what is supported: a checkpoint's configuration as the facts that both engines must agree on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
        window: how a sliding window is switched on: `no` (a configuration with one is refused), `sliding_window` (present means
            on) or `use_sliding_window`.
        windowed: (layer, max_window_layers) → whether a layer has the window, when `layer_types` does not say.
        split: head_dim is hidden_size / num_attention_heads and nothing else.
        tied: the output projection can be tied to the embedding.
        defaults: values of absent keys, as transformers sets them.
        moe: its experts; None: dense.
    """

    qkv_bias: bool | str = False
    qk_norm: bool | str = False
    window: str = "no"
    windowed: Callable[[int, int], bool] = lambda layer, full: True
    split: bool = False
    tied: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)
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


def _upper(layer: int, full: int) -> bool:
    return layer >= full


_QWEN = {"sliding_window": 4096, "max_window_layers": 28}

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(window="sliding_window", defaults={"sliding_window": 4096, "num_key_value_heads": 8}),
    "Qwen2ForCausalLM": Family(
        qkv_bias=True,
        window="use_sliding_window",
        windowed=_upper,
        split=True,
        defaults={**_QWEN, "num_key_value_heads": 32},
    ),
    "Qwen3ForCausalLM": Family(
        qk_norm=True,
        window="use_sliding_window",
        windowed=_upper,
        defaults={**_QWEN, "num_key_value_heads": 32, "head_dim": 128},
    ),
    "Qwen3MoeForCausalLM": Family(  # the window is every layer's, whatever max_window_layers says
        qk_norm=True,
        window="use_sliding_window",
        defaults={**_QWEN, "num_key_value_heads": 4},
        moe=MoeFamily("num_experts"),
    ),
    "Qwen2MoeForCausalLM": Family(
        qkv_bias=True,
        window="use_sliding_window",
        windowed=lambda layer, full: layer % 2 == 0 and layer < full,
        split=True,
        defaults={**_QWEN, "num_key_value_heads": 16, "shared_expert_intermediate_size": 5632},
        moe=MoeFamily("num_experts", shared="shared_expert_intermediate_size", shared_gate=True),
    ),
    "MixtralForCausalLM": Family(
        window="sliding_window",
        defaults={"num_key_value_heads": 8, "rope_theta": 1e6},
        moe=MoeFamily("num_local_experts", ffn="intermediate_size", renormalize=True),
    ),
    "Glm4MoeForCausalLM": Family(
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        tied=False,  # vLLM gives it an output projection of its own in any case
        defaults={
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "num_nextn_predict_layers": 1,
        },
        moe=MoeFamily("n_routed_experts", score="sigmoid", eps=1e-20, grouped=True, shared="n_shared_experts"),
    ),
}

_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": ((None, "silu"), "only silu is served"),
    "mlp_bias": ((None, False), "only layers without these biases are served"),
    "bias": ((None, False), "only layers without these biases are served"),
    "attention_bias": ((None, False), "only layers without an output-projection bias are served"),
    "qkv_bias": ((None, True), "only attention with these biases is served"),
    "qk_norm": ((None, False), "this family is served without query and key norms"),
    "is_causal": ((None, True), "only causal attention is served"),
    "quantization_config": ((None,), "convert the checkpoint to bfloat16, float16 or float32"),
    "compression_config": ((None,), "convert the checkpoint to bfloat16, float16 or float32"),
    "attn_logit_softcapping": ((None,), "logit soft-capping is not served"),
    "final_logit_softcapping": ((None,), "logit soft-capping is not served"),
    "rope_interleaved": ((None, False), "only rotary halves are served, not interleaved pairs"),
    "dual_chunk_attention_config": ((None,), "only plain causal attention is served"),
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
_HEAD_MULTIPLE, _LARGEST_HEAD = 8, 256
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
        mtp_layers: multi-token-prediction layers that the checkpoint holds after its own; neither engine uses them.
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
    mtp_layers: int = 0

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
        if not path.is_file():
            raise InputError(
                f"model {str(model)!r} is no model directory: it has no config.json; give a local Hugging Face directory"
            )
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read {path}: {error}") from None
        if not isinstance(config, dict):
            raise InputError(f"{path} holds no JSON object; give the directory of a text-only causal language model")
        return cls.from_hf(config)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Profile:
        """Profile of a Hugging Face configuration: parsed `config.json`, or `AutoConfig.from_pretrained(…).to_dict()`.

        Raises:
            InputError: a family or feature that is not supported; names it and what would work.
        """
        architectures = config.get("architectures")
        name = str(architectures[0]) if isinstance(architectures, list) and architectures else "none"
        family = FAMILIES.get(name)
        if family is None:
            raise InputError(f"architecture {name} is not supported; supported: {', '.join(sorted(FAMILIES))}")
        for key, (neutral, remedy) in _NEUTRAL.items():
            if config.get(key) not in neutral and key not in (family.qkv_bias, family.qk_norm):
                raise InputError(f"{name} with {key}={config[key]!r} is not supported: {remedy}")
        config = {**family.defaults, **_one_expert_count(name, family, config)}
        missing = [key for key in _NEEDED if config.get(key) is None]
        if missing:
            raise InputError(f"the model's config.json lacks {', '.join(missing)}")
        heads, hidden = _integer(config, "num_attention_heads"), _integer(config, "hidden_size")
        kv_heads = _integer(config, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise InputError(f"num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}")
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
        if dtype not in _DTYPES:
            raise InputError(f"dtype {dtype} is not supported; supported: {', '.join(_DTYPES)}")
        tied = bool(config.get("tie_word_embeddings", False))
        if tied and not family.tied:
            raise InputError(
                f"{name} with tie_word_embeddings=true is not supported: vLLM does not tie it; store lm_head.weight and set it to "
                "false"
            )
        head_dim = _head_dim(name, family, config)
        return cls(
            family=name,
            hidden=hidden,
            layers=_integer(config, "num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=_integer(config, "intermediate_size"),
            vocab=_integer(config, "vocab_size"),
            eps=_number(config, "rms_norm_eps"),
            rope=_rope(name, {**config, "head_dim": head_dim}),
            window=_window(name, family, config),
            qkv_bias=_flag(family.qkv_bias, config),
            qk_norm=_flag(family.qk_norm, config),
            tied=tied,
            dtype=dtype,
            moe=None if family.moe is None else _moe(name, family.moe, config),
            mtp_layers=int(config.get("num_nextn_predict_layers") or 0) if family.moe and family.moe.grouped else 0,
        )


def _integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer; absent or null: `default`."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{key}={value!r} in the model's config.json must be a positive integer")
    return value


def _number(config: Mapping[str, Any], key: str) -> float:
    value = config[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise InputError(f"{key}={value!r} in the model's config.json must be a positive number")
    return float(value)


def _head_dim(name: str, family: Family, config: Mapping[str, Any]) -> int:
    """Elements of a head, which the kernels serve."""
    heads, hidden = _integer(config, "num_attention_heads"), _integer(config, "hidden_size")
    if name == "LlamaForCausalLM" and hidden % heads:
        raise InputError(
            f"{name}: transformers wants hidden_size={hidden} to be a multiple of num_attention_heads={heads}"
        )
    head_dim = _integer(config, "head_dim", hidden // heads)
    if (family.split or config.get("head_dim") is None) and head_dim * heads != hidden:
        raise InputError(
            f"{name} with head_dim={head_dim}, hidden_size={hidden} and num_attention_heads={heads} is not supported: "
            "head_dim must be hidden_size / num_attention_heads"
        )
    if head_dim % _HEAD_MULTIPLE or head_dim > _LARGEST_HEAD:
        raise InputError(
            f"{name} with head_dim={head_dim} is not supported: the attention kernels take multiples of {_HEAD_MULTIPLE} up to "
            f"{_LARGEST_HEAD}"
        )
    return head_dim


def _rope(name: str, config: Mapping[str, Any]) -> RopeConfig:
    """The rotary tables; what `RopeConfig` does not read is refused."""
    for key in ("rope_parameters", "rope_scaling"):
        found = config.get(key) or {}
        nested = [k for k, v in found.items() if isinstance(v, dict | list)] if isinstance(found, dict) else [key]
        if nested:
            raise InputError(
                f"{name} with {key}={found!r} is not supported: one set of numbers for all layers is served"
            )
    try:
        rope = RopeConfig.from_hf(config)
    except (TypeError, ArithmeticError) as error:
        raise InputError(f"the rotary embedding in the model's config.json cannot be read: {error}") from None
    except ValueError as error:
        raise InputError(str(error)) from None
    if rope.rotary_dim % 2 or not 0 < rope.rotary_dim <= config["head_dim"] or not 0 < rope.theta < math.inf:
        raise InputError(
            f"{name}: partial_rotary_factor rotates {rope.rotary_dim} of head_dim={config['head_dim']} elements with rope_theta="
            f"{rope.theta}; an even number of them up to head_dim is served, and a positive rope_theta"
        )
    return rope


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
    experts, topk, ffn = (_integer(config, key) for key in (family.experts, "num_experts_per_tok", family.ffn))
    groups, topk_groups, scaling = 1, 1, 1.0
    if family.grouped:
        groups, topk_groups = _integer(config, "n_group", 1), _integer(config, "topk_group", 1)
        scaling = _number({"routed_scaling_factor": 1.0, **config}, "routed_scaling_factor")
    if topk > experts or experts % groups or not topk_groups <= groups or topk > topk_groups * (experts // groups):
        raise InputError(
            f"{name}: {topk} of {experts} experts in {topk_groups} of {groups} groups is impossible; "
            "check num_experts_per_tok, n_group and topk_group"
        )
    if family.shared and not config.get(family.shared):
        raise InputError(
            f"{name} with {family.shared}={config.get(family.shared)!r} is not supported: vLLM cannot load this family without "
            "shared experts"
        )
    shared = _integer(config, family.shared) if family.shared else 0
    layers = _integer(config, "num_hidden_layers")
    step = _integer(config, "decoder_sparse_step", 1)
    only = set(config.get("mlp_only_layers") or ())
    first = int(config.get("first_k_dense_replace") or 0) if family.grouped else 0
    dense = [i for i in range(layers) if i in only or (i + 1) % step or i < first]
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
    """Window of every layer as vLLM applies it, 0 for none; layers that differ are refused."""
    layers, types = _integer(config, "num_hidden_layers"), config.get("layer_types")
    if family.window == "no":
        if config.get("sliding_window") or "sliding_attention" in (types or ()):
            raise InputError(
                f"{name} with sliding_window={config.get('sliding_window')!r} is not supported: transformers has no window in this "
                "family, vLLM applies it to every layer; set sliding_window to null in config.json"
            )
        return 0
    if family.window == "use_sliding_window" and not config.get("use_sliding_window", False):
        return 0
    if not config.get("sliding_window"):
        return 0
    length, full = _integer(config, "sliding_window"), int(config.get("max_window_layers") or 0)
    windows = (
        [kind == "sliding_attention" for kind in types] if types else [family.windowed(i, full) for i in range(layers)]
    )
    if any(windows) != all(windows):
        raise InputError(
            f"{name} mixes sliding-window and full-attention layers (use_sliding_window with max_window_layers="
            f"{config.get('max_window_layers')}, or layer_types), which is not supported: set use_sliding_window to false, or "
            "one window for all layers"
        )
    return length if all(windows) else 0
