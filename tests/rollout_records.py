"""Rollout records made without an engine: given token ids, no reported log-probabilities."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from mindspeed_tpi.contract import NumericsContract
from mindspeed_tpi.ops import RopeConfig
from mindspeed_tpi.parity.rollout import Rollout

ROPE = RopeConfig(rotary_dim=32, theta=10000.0, max_position=64)


def identity(contract: NumericsContract | None) -> dict[str, Any] | None:
    """What an engine under `contract` reports; None for a stock engine."""
    if contract is None:
        return None
    return {
        "mode": "strict",
        "model": "random",
        "dtype": "bfloat16",
        "layout": "tp=1",
        "logprobs_mode": "processed_logprobs",
        "backend": "cpu",
        "contract": json.loads(contract.to_json()),
        "fingerprint": contract.fingerprint,
        "rope": ROPE.document(),
        "coverage": [],
        "versions": {},
    }


def record(
    sequences: Sequence[Sequence[int]],
    contract: NumericsContract | None,
    *,
    prompt_length: int = 1,
    versions: Sequence[int] | None = None,
    temperature: float = 1.0,
) -> Rollout:
    return Rollout.from_tokens(
        [s[:prompt_length] for s in sequences],
        [s[prompt_length:] for s in sequences],
        [[math.nan] * (len(s) - prompt_length) for s in sequences],
        identity(contract),
        sampling={"temperature": temperature},
        weight_versions=0 if versions is None else list(versions),
    )
