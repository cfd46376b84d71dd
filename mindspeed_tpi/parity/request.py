"""What one parity run is asked to do: the JSON document that both driver processes read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from mindspeed_tpi.errors import InputError

DTYPES = ("bfloat16", "float16", "float32")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise InputError(message)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _reject_unknown(cls: type, data: Mapping[str, Any], what: str) -> None:
    known = {f.name for f in fields(cls)}
    unknown = sorted(set(data) - known)
    _check(not unknown, f"{what} has no field {', '.join(unknown)}; fields are {', '.join(sorted(known))}")


@dataclass(frozen=True)
class EngineOptions:
    """Settings of the rollout engine; none of them may change a bit.

    Attributes:
        max_num_seqs: requests that run in one step.
        max_num_batched_tokens: tokens in one step; a longer prompt is prefilled in chunks.
        block_size: tokens in one KV-cache page, a multiple of 32.
        enable_prefix_caching: reuse the pages of equal prompt starts.
        enforce_eager: False compiles the model with torch.compile.
        spawn: run the engine core in a process of its own.
        kv_cache_blocks: number of pages; few of them force preemptions. None: as many as the engine takes.
        max_model_len: longest sequence; None: that of the model.
    """

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    block_size: int = 32
    enable_prefix_caching: bool = True
    enforce_eager: bool = True
    spawn: bool = False
    kv_cache_blocks: int | None = None
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_blocks", "max_model_len"):
            value = getattr(self, name)
            optional = name in ("kv_cache_blocks", "max_model_len")
            _check(
                (optional and value is None) or (_is_int(value) and value > 0),
                f"engine.{name}={value!r} must be a positive integer{' or null' if optional else ''}",
            )
        for name in ("enable_prefix_caching", "enforce_eager", "spawn"):
            _check(
                isinstance(getattr(self, name), bool), f"engine.{name}={getattr(self, name)!r} must be true or false"
            )
        _check(self.block_size % 32 == 0, f"engine.block_size={self.block_size} must be a multiple of 32 (vLLM on CPU)")


@dataclass(frozen=True)
class Request:
    """One rollout and its recomputation.

    Attributes:
        model: Hugging Face model directory.
        prompts: token ids of each prompt.
        max_new_tokens: tokens to sample per prompt; the end-of-sequence token is ignored, so all lengths are equal.
        temperature: 0 is greedy (logprobs at temperature 1).
        dtype: storage dtype of weights and activations.
        train: layout of the trainer, `key=int,key=int`; empty: one rank.
        rollout: layout of the engine, likewise.
        seed: seed of the engine's sampler.
        stock: run upstream's own numerics (with `MINDSPEED_TPI=0`).
        prompt_logprobs: also report log-probabilities of the prompt tokens.
        engine: settings of the rollout engine.
        weight_updates: model directories whose weights are loaded into the running engine, one after the other; the
            prompts are rolled out once with `model` and once more after each update.
    """

    model: str
    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: int = 16
    temperature: float = 0.0
    dtype: str = "bfloat16"
    train: str = ""
    rollout: str = ""
    seed: int = 0
    stock: bool = False
    prompt_logprobs: bool = False
    engine: EngineOptions = field(default_factory=EngineOptions)
    weight_updates: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("prompts", "weight_updates"):
            _check(isinstance(getattr(self, name), list | tuple), f"{name} must be a list")
        _check(all(isinstance(p, list | tuple) for p in self.prompts), "every prompt must be a list of token ids")
        object.__setattr__(self, "prompts", tuple(tuple(p) for p in self.prompts))
        object.__setattr__(self, "weight_updates", tuple(self.weight_updates))
        for path in (self.model, *self.weight_updates):
            _check(isinstance(path, str), f"model={path!r} must be a path")
            _check(
                (Path(path) / "config.json").is_file(), f"model {path!r} is no model directory: it has no config.json"
            )
        _check(bool(self.prompts) and all(self.prompts), "prompts must hold at least one prompt, and no empty one")
        bad = [t for p in self.prompts for t in p if not _is_int(t) or t < 0]
        _check(not bad, f"prompts hold {bad[:1]}, which is no token id")
        _check(
            _is_int(self.max_new_tokens) and self.max_new_tokens > 0,
            f"max_new_tokens={self.max_new_tokens!r} must be a positive integer",
        )
        _check(
            isinstance(self.temperature, int | float) and math.isfinite(self.temperature) and self.temperature >= 0,
            f"temperature={self.temperature!r} must be a finite number, 0 or larger",
        )
        _check(self.dtype in DTYPES, f"dtype={self.dtype!r} is not one of {', '.join(DTYPES)}")
        _check(
            _is_int(self.seed) and 0 <= self.seed < 2**32, f"seed={self.seed!r} must be an integer from 0 to 2**32 - 1"
        )
        for name in ("train", "rollout"):
            _check(isinstance(getattr(self, name), str), f"{name}={getattr(self, name)!r} must be a layout string")
        for name in ("stock", "prompt_logprobs"):
            _check(isinstance(getattr(self, name), bool), f"{name}={getattr(self, name)!r} must be true or false")

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Request:
        """Inverse of `to_json`; absent fields take their defaults.

        Raises:
            InputError: not JSON, a field that does not exist or is missing, or a value it cannot have.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise InputError(f"the request is not JSON: {error}") from None
        _check(isinstance(data, dict), f"the request must be a JSON object, not {type(data).__name__}")
        _reject_unknown(cls, data, "a request")
        for name in ("model", "prompts"):
            _check(name in data, f"the request lacks {name!r}")
        engine = data.get("engine", {})
        _check(isinstance(engine, dict), f"engine={engine!r} must be a JSON object")
        _reject_unknown(EngineOptions, engine, "engine")
        return cls(**{**data, "engine": EngineOptions(**engine)})

    @classmethod
    def load(cls, path: str | Path) -> Request:
        """Read a request file.

        Raises:
            InputError: the file cannot be read, or holds no valid request.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read the request {path}: {error}") from None
        return cls.from_json(text)
