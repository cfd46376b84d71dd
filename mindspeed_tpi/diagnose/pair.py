"""Two columns of log-probabilities brought onto the same tokens, and the statistics of their difference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindspeed_tpi.diagnose.columns import Column, Floats, Integers
from mindspeed_tpi.errors import InputError

QUANTILES = (0.5, 0.9, 0.99, 0.999)


@dataclass(frozen=True)
class Pair:
    """N tokens for which both sides gave a log-probability.

    Attributes:
        train, rollout: f64 [N].
        sequence: int64 [N], which sequence a token is of.
        place: int64 [N], its position: the file's, else its index in the sequence.
        tokens, versions: int64 [N], or None.
        cached: int64 [N], prompt tokens of its sequence that came from the prefix cache, or None.
        apart: tokens that only one side has a number for.
    """

    train: Floats
    rollout: Floats
    sequence: Integers
    place: Integers
    tokens: Integers | None
    versions: Integers | None
    cached: Integers | None
    apart: int

    @property
    def logdiff(self) -> Floats:
        """f64 [N], training minus rollout; 0 where the two are equal (also −inf on both sides)."""
        with np.errstate(invalid="ignore"):
            return np.where(self.train == self.rollout, 0.0, self.train - self.rollout)

    def where(self, chosen: NDArray[np.bool_]) -> Pair:
        """The chosen tokens only."""
        names = ("train", "rollout", "sequence", "place", "tokens", "versions", "cached")
        changes: dict[str, Any] = {n: v if (v := getattr(self, n)) is None else v[chosen] for n in names}
        return replace(self, **changes)


def align(train: Column, rollout: Column) -> Pair:
    """Put two columns side by side.

    Columns of equal length are taken token by token. Otherwise sequences must be as many on both sides, and the shorter of each
    two is the other's end (a response without its prompt) or, where the token ids say so, its beginning.

    Raises:
        InputError: columns that do not fit, with the first sequence that does not; other token ids; no token in common.
    """
    if len(train.logprobs) == len(rollout.logprobs):
        lengths = rollout.lengths if len(rollout.lengths) >= len(train.lengths) else train.lengths
        left = right = np.arange(len(train.logprobs))
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        index = np.concatenate([np.arange(n) for n in lengths]) if len(lengths) else np.arange(0)
    else:
        left, right, sequence, index = _matched(train, rollout)
    tokens = _same_tokens(train, rollout, left, right, sequence, index)
    both = ~(np.isnan(train.logprobs[left]) | np.isnan(rollout.logprobs[right]))
    apart = int((np.isnan(train.logprobs[left]) != np.isnan(rollout.logprobs[right])).sum())
    if not both.any():
        raise InputError(f"{train.name} and {rollout.name} have no token in common that both give a number for")
    pair = Pair(
        train.logprobs[left],
        rollout.logprobs[right],
        sequence,
        _first(
            index,
            *((c.positions[at] if c.positions is not None else None) for c, at in _sides(train, rollout, left, right)),
        ),
        tokens,
        _first(
            None,
            *((c.versions[at] if c.versions is not None else None) for c, at in _sides(train, rollout, left, right)),
        ),
        None if rollout.cached is None or len(rollout.cached) <= sequence.max() else rollout.cached[sequence],
        apart,
    )
    return pair.where(both)


def _sides(train: Column, rollout: Column, left: Integers, right: Integers) -> tuple[tuple[Column, Integers], ...]:
    return (rollout, right), (train, left)


def _first(otherwise: Any, *found: Integers | None) -> Any:
    return next((f for f in found if f is not None), otherwise)


def _matched(train: Column, rollout: Column) -> tuple[Integers, Integers, Integers, Integers]:
    """Indices into both columns, sequence and index in the longer of the two sequences, for each token in common."""
    if len(train.lengths) != len(rollout.lengths):
        raise InputError(
            f"{train.name} has {len(train.logprobs)} tokens in {len(train.lengths)} sequences, {rollout.name} {len(rollout.logprobs)} "
            f"in {len(rollout.lengths)}: they cannot be put side by side; give both the same sequences, or one value a token of the same tokens"
        )
    left, right, sequence, index = [], [], [], []
    starts = np.cumsum(train.lengths) - train.lengths, np.cumsum(rollout.lengths) - rollout.lengths
    for row, (mine, theirs) in enumerate(zip(train.lengths.tolist(), rollout.lengths.tolist(), strict=True)):
        common = min(mine, theirs)
        a, b = starts[0][row] + mine - common, starts[1][row] + theirs - common
        if mine != theirs and train.tokens is not None and rollout.tokens is not None:
            head = starts[0][row], starts[1][row]
            same = [
                np.array_equal(train.tokens[x : x + common], rollout.tokens[y : y + common]) for x, y in ((a, b), head)
            ]
            if same[1] and not same[0]:
                a, b = head
        left.append(a + np.arange(common))
        right.append(b + np.arange(common))
        sequence.append(np.full(common, row))
        index.append(max(a - starts[0][row], b - starts[1][row]) + np.arange(common))
    return np.concatenate(left), np.concatenate(right), np.concatenate(sequence), np.concatenate(index)


def _same_tokens(
    train: Column, rollout: Column, left: Integers, right: Integers, sequence: Integers, index: Integers
) -> Integers | None:
    if train.tokens is None or rollout.tokens is None:
        known = train.tokens[left] if train.tokens is not None else None
        return rollout.tokens[right] if rollout.tokens is not None else known
    differ = np.flatnonzero(train.tokens[left] != rollout.tokens[right])
    if len(differ):
        at = differ[0]
        raise InputError(
            f"the two sides have other tokens: {len(differ)} of {len(left)} differ, first in sequence {sequence[at]} at index {index[at]}: "
            f"{train.tokens[left[at]]} in training, {rollout.tokens[right[at]]} in the rollout. Log-probabilities of other tokens say "
            "nothing about numerics; look for retokenised text, another chat template, a second BOS, truncation"
        )
    return rollout.tokens[right]


def statistics(pair: Pair) -> dict[str, Any]:
    """Numbers of a difference, JSON-able; natural logarithms.

    `kl_k1`, `kl_k3`: estimates of KL(rollout ‖ training) from tokens that the rollout sampled (J. Schulman, "Approximating KL
    divergence", 2020). `ess`: (Σw)² / (n Σw²) of the ratios w = exp(logdiff), of tokens and of whole sequences. `mean_ratio` is
    E[exp(logdiff)]: 1 within its error when the rollout's numbers are those of the distribution it sampled from.
    """
    d = pair.logdiff
    finite = d[np.isfinite(d)]
    size = np.abs(finite)
    found: dict[str, Any] = {
        "tokens": len(d),
        "sequences": len(np.unique(pair.sequence)),
        "nonzero": int((d != 0).sum()),
        "not_finite": int(len(d) - len(finite)),
        "apart": pair.apart,
    }
    if not len(finite):
        return found
    sums: Any = np.bincount(pair.sequence, np.where(np.isfinite(d), d, 0.0))
    per_sequence: Floats = sums[np.unique(pair.sequence)]
    ratio, error = mean_ratio(finite)
    return found | {
        "mean_abs": float(size.mean()),
        "max_abs": float(size.max()),
        "quantiles": {str(q): float(v) for q, v in zip(QUANTILES, np.quantile(size, QUANTILES), strict=True)},
        "mean": float(finite.mean()),
        "kl_k1": float(-finite.mean()),
        "kl_k3": float((np.expm1(finite) - finite).mean()),
        "mean_ratio": ratio,
        "mean_ratio_error": error,
        "ess_tokens": _ess(finite),
        "ess_sequences": _ess(per_sequence),
    }


def mean_ratio(d: Floats) -> tuple[float, float]:
    """E[exp(d)] and its standard error."""
    with np.errstate(over="ignore", invalid="ignore"):
        w = np.exp(d)
        return float(w.mean()), float(w.std() / np.sqrt(len(w)))


def _ess(log_weights: Floats) -> float:
    w = np.exp(log_weights - log_weights.max())
    return float(w.sum() ** 2 / (len(w) * (w**2).sum()))


def by_place(pair: Pair, bins: int = 8) -> list[dict[str, Any]]:
    """Mean and largest |logdiff| over ranges of positions that hold about as many tokens each."""
    size = np.abs(pair.logdiff)
    edges = np.unique(np.quantile(pair.place, np.linspace(0, 1, bins + 1)).astype(np.int64))
    inner = edges[1:-1]
    which = np.searchsorted(inner, pair.place, side="right")
    return [
        {
            "from": int(pair.place[which == b].min()),
            "to": int(pair.place[which == b].max()),
            **_group(size[which == b]),
        }
        for b in np.unique(which)
    ]


def by_key(pair: Pair, key: Integers, most: int = 10) -> list[dict[str, Any]]:
    """The groups of equal `key` with the largest mean |logdiff|, worst first."""
    size = np.abs(pair.logdiff)
    names, which = np.unique(key, return_inverse=True)
    totals = np.bincount(which, weights=np.where(np.isfinite(size), size, 0)) / np.bincount(which)
    worst = np.argsort(-totals, kind="stable")[:most]
    return [{"key": int(names[i]), **_group(size[which == i])} for i in worst]


def _group(size: Floats) -> dict[str, Any]:
    return {
        "tokens": len(size),
        "nonzero": int((size != 0).sum()),
        "mean_abs": float(size.mean()),
        "max_abs": float(size.max()),
    }
