"""Log-probabilities of two engines on the same tokens, compared bit by bit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi.errors import InputError
from mindspeed_tpi.parity.rollout import Rollout


@dataclass(frozen=True)
class Comparison:
    """Outcome over the tokens that the rollout engine sampled.

    Attributes:
        tokens: sampled tokens.
        nonzero: tokens whose two log-probabilities have different bits (NaN and missing ones included).
        max_abs: largest |logdiff| in float64; NaN if any logdiff is NaN or there is no token.
        mean_abs: mean |logdiff|, likewise.
        nan: tokens for which either side gave NaN.
        missing: values that were asked for and not delivered, or delivered and not asked for, by either side.
        logdiff: f32 [tokens], training minus rollout log-probability, NaN where there is no such number.
        first: (sequence, position in it) of the first token that differs; None if none does.
    """

    tokens: int
    nonzero: int
    max_abs: float
    mean_abs: float
    nan: int
    missing: int
    logdiff: Tensor
    first: tuple[int, int] | None = None

    @property
    def exact(self) -> bool:
        """Whether every token that was asked for is there and has equal bits on both sides."""
        return self.tokens > 0 and not (self.nonzero or self.nan or self.missing)

    def to_json(self) -> dict[str, Any]:
        """The numbers; NaN and infinity, which JSON lacks, become null."""
        numbers = {name: getattr(self, name) for name in ("tokens", "nonzero", "max_abs", "mean_abs", "nan", "missing")}
        return {name: value if math.isfinite(value) else None for name, value in numbers.items()} | {
            "exact": self.exact
        }


def compare(rollout: Rollout, logprobs: Tensor, expected: int) -> Comparison:
    """Compare the trainer's log-probabilities with those in the rollout record.

    Args:
        rollout: what the engine sampled, N tokens in all.
        logprobs: f32 [N], the trainer's value for each of the record's tokens. Another length counts as missing.
        expected: how many tokens the engine was asked to sample.

    Raises:
        InputError: `logprobs` is not a 1-D float32 tensor.
    """
    if logprobs.dtype != torch.float32 or logprobs.dim() != 1:
        raise InputError(f"training logprobs must be 1-D float32, got {logprobs.dtype} {tuple(logprobs.shape)}")
    total = rollout.token_ids.numel()
    missing = abs(total - logprobs.numel()) + abs(expected - int(rollout.generated.sum()))
    aligned = torch.full((total,), math.nan)
    common = min(total, logprobs.numel())
    aligned[:common] = logprobs[:common]
    train, engine = aligned[rollout.generated], rollout.logprobs[rollout.generated]
    nan = train.isnan() | engine.isnan()
    equal = (train.view(torch.int32) == engine.view(torch.int32)) & ~nan
    logdiff = torch.where(equal, torch.zeros(()), train - engine)
    size = logdiff.double().abs()
    where = rollout.generated.nonzero().flatten()[~equal]
    return Comparison(
        tokens=train.numel(),
        nonzero=int((~equal).sum()),
        max_abs=float(size.max()) if len(size) else math.nan,
        mean_abs=float(size.mean()) if len(size) else math.nan,
        nan=int(nan.sum()),
        missing=missing,
        logdiff=logdiff,
        first=_place(rollout, int(where[0])) if len(where) else None,
    )


def _place(rollout: Rollout, token: int) -> tuple[int, int]:
    """(sequence, position) of one of a record's tokens."""
    sequence = int(torch.searchsorted(rollout.offsets, token, right=True)) - 1
    return sequence, token - int(rollout.offsets[sequence])
