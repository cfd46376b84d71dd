"""Rotary position embedding with f32 tables made in float64 (contract section 4)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi.errors import InputError
from mindspeed_tpi.ops import schemas
from mindspeed_tpi.ops._autograd import needs_grad

SCALINGS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """What determines the tables.

    Attributes:
        rotary_dim: rotated elements of a head. theta: base. max_position: rows of the tables.
        scaling: one of `SCALINGS`. parameters: the scaling's numbers, as sorted (name, value) pairs.
    """

    rotary_dim: int
    theta: float
    max_position: int
    scaling: str = "default"
    parameters: tuple[tuple[str, float], ...] = ()

    def document(self) -> dict[str, Any]:
        """JSON-able form, for records."""
        return {**asdict(self), "parameters": dict(self.parameters)}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> RopeConfig:
        """Inverse of `document`.

        Raises:
            InputError: another set of fields.
        """
        names = {f.name for f in fields(cls)}
        if set(document) != names or not isinstance(document["parameters"], Mapping):
            raise InputError(f"rope {dict(document)!r} must have exactly the fields {', '.join(sorted(names))}")
        numbers = tuple(sorted((str(name), float(value)) for name, value in document["parameters"].items()))
        return cls(**{**document, "parameters": numbers})

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """From a Hugging Face `config.json`, with `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling`.

        Raises:
            InputError: a scaling this package does not implement, or one that lacks a number it needs.
        """
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        scaling = str(rope.get("rope_type", rope.get("type", "default")))
        if scaling not in SCALINGS:
            raise InputError(f"rope scaling {scaling!r} is not supported; supported: {', '.join(SCALINGS)}")
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        fraction = float(rope.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0))
        needed = {
            "default": (),
            "linear": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
            "yarn": ("factor", "original_max_position_embeddings"),
        }[scaling]
        if scaling == "yarn":
            rope.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
        missing = [name for name in needed if rope.get(name) is None]
        if missing:
            raise InputError(f"rope scaling {scaling!r} needs {', '.join(missing)} in the model's config.json")
        optional = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
        names = needed + (optional if scaling == "yarn" else ())
        return cls(
            rotary_dim=int(head_dim * fraction),
            theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            max_position=int(config["max_position_embeddings"]),
            scaling=scaling,
            parameters=tuple(sorted((name, float(rope[name])) for name in names if rope.get(name) is not None)),
        )


def _inverse_frequencies(config: RopeConfig) -> list[float]:
    """inv_freq [R/2] in float64; formulas: transformers `modeling_rope_utils.py`, YaRN (arXiv 2309.00071)."""
    half = config.rotary_dim // 2
    inv_freq = [config.theta ** (-2.0 * i / config.rotary_dim) for i in range(half)]
    p = dict(config.parameters)
    if config.scaling == "linear":
        return [f / p["factor"] for f in inv_freq]
    if config.scaling == "llama3":
        context = p["original_max_position_embeddings"]
        low, high = p["low_freq_factor"], p["high_freq_factor"]
        scaled = []
        for f in inv_freq:
            rotations = context * f / (2.0 * math.pi)
            keep = min(max((rotations - low) / (high - low), 0.0), 1.0)
            scaled.append((1.0 - keep) * f / p["factor"] + keep * f)
        return scaled
    if config.scaling == "yarn":
        context = p["original_max_position_embeddings"]

        def dimension(rotations: float) -> float:
            return config.rotary_dim * math.log(context / (rotations * 2.0 * math.pi)) / (2.0 * math.log(config.theta))

        low, high = dimension(p.get("beta_fast", 32.0)), dimension(p.get("beta_slow", 1.0))
        if p.get("truncate", 1.0):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0.0), min(high, config.rotary_dim - 1.0)
        if low == high:
            high += 0.001
        scaled = []
        for i, f in enumerate(inv_freq):
            interpolate = min(max((i - low) / (high - low), 0.0), 1.0)
            scaled.append(f / p["factor"] * interpolate + f * (1.0 - interpolate))
        return scaled
    return inv_freq


def _yarn_magnitude(config: RopeConfig) -> float:
    """Factor on cos and sin ("attention factor"); 1 for every other scaling."""
    if config.scaling != "yarn":
        return 1.0
    p = dict(config.parameters)
    if "attention_factor" in p:
        return p["attention_factor"]

    def magnitude(scale: float, m: float) -> float:
        return 1.0 if scale <= 1.0 else 0.1 * m * math.log(scale) + 1.0

    if p.get("mscale") and p.get("mscale_all_dim"):
        return magnitude(p["factor"], p["mscale"]) / magnitude(p["factor"], p["mscale_all_dim"])
    return magnitude(p["factor"], 1.0)


@lru_cache(maxsize=8)
def rope_tables(config: RopeConfig) -> tuple[Tensor, Tensor]:
    """(cos, sin), each f32 [max_position, R/2]; angles, cos, sin and yarn's factor in float64, rounded once."""
    inv_freq = torch.tensor(_inverse_frequencies(config), dtype=torch.float64)
    angles = torch.arange(config.max_position, dtype=torch.float64).unsqueeze(1) * inv_freq
    factor = _yarn_magnitude(config)
    return (angles.cos() * factor).to(torch.float32), (angles.sin() * factor).to(torch.float32)


HASHED_POSITIONS = 4096


def table_hash(config: RopeConfig) -> str:
    """SHA-256 of both tables' bytes: the contract's `rope_table`.

    It covers the same rows whatever the length of a side's tables, because that length changes no bit: a trainer built for
    shorter sequences than the engine's has the same numerics.
    """
    cos, sin = rope_tables(replace(config, max_position=HASHED_POSITIONS))
    return hashlib.sha256(cos.numpy().tobytes() + sin.numpy().tobytes()).hexdigest()


def rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """Rotate pairs (i, i + R/2) of x [T, H, D] by the tables' row of each token's position (int64 [T]).

    Raises:
        BackendError: a position outside the tables.
    """
    if needs_grad(x):
        y: Tensor = _Rope.apply(x, cos, sin, positions)
        return y
    return schemas.rope(x, cos, sin, positions, False)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin, positions)
        return schemas.rope(x, cos, sin, positions, False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return schemas.rope(grads[0], *ctx.saved_tensors, True), None, None, None


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:4])
    ctx.inverse = inputs[4]


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return schemas.rope(dy, *ctx.saved_tensors, not ctx.inverse), None, None, None, None


schemas.register_autograd("rope", _backward, _setup)
