"""Rollout records made without an engine: given token ids, no reported log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from mindspeed_tpi.contract import NumericsContract
from mindspeed_tpi.parity.rollout import Rollout


def record(
    sequences: Sequence[Sequence[int]],
    contract: NumericsContract | None,
    *,
    prompt_length: int = 1,
    versions: Sequence[int] | None = None,
    temperature: float = 1.0,
) -> Rollout:
    lengths = torch.tensor([len(s) for s in sequences])
    total = int(lengths.sum())
    return Rollout(
        token_ids=torch.tensor([t for s in sequences for t in s]),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        prompt_lengths=torch.full((len(sequences),), prompt_length),
        positions=torch.cat([torch.arange(n) for n in lengths.tolist()]),
        logprobs=torch.full((total,), float("nan")),
        weight_versions=torch.tensor(versions or [0] * len(sequences)).repeat_interleave(lengths),
        meta={
            "contract": None if contract is None else json.loads(contract.to_json()),
            "sampling": {"logprob_temperature": temperature},
        },
    )
