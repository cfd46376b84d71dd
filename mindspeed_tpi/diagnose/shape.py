"""What the shape of a difference says by itself, without a tensor of either engine.

A shape is a row of `SHAPES`: a test on a `Pair` that says which part of the difference it explains, and a cause that makes this shape. A
test is strict: it asks for a form that noise of arithmetic does not have, so that a difference which is only noise gets no cause.
Causes and tell-tales were collected from public reports; a shape narrows the search, it does not prove.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mindspeed_tpi.diagnose.columns import Floats, Integers
from mindspeed_tpi.diagnose.pair import Pair, mean_ratio

LEAST = 24  # differing tokens below which a form may be chance
EXPLAINED = 0.25  # a cause leaves at most this part of the difference's size


@dataclass(frozen=True)
class Finding:
    """One shape that a difference has.

    Attributes:
        shape: its name in `SHAPES`.
        cause: what makes it, and what to change or look at.
        evidence: the numbers that show it.
        explains: part of the differing tokens that the shape accounts for, 0 to 1.
    """

    shape: str
    cause: str
    evidence: str
    explains: float


def findings(pair: Pair) -> list[Finding]:
    """Every shape of a pair whose logdiff is not 0, most specific first; empty when there is none."""
    if not (pair.logdiff != 0).any():
        return []
    return [found for test in SHAPES if (found := test(pair)) is not None]


def noise(pair: Pair) -> str:
    """What a difference without a shape looks like, by its size."""
    d = pair.logdiff[np.isfinite(pair.logdiff)]
    ratio, error = mean_ratio(d)
    typical = float(np.median(np.abs(d[d != 0])))
    size = (
        "float32 sums in another order"
        if typical < 1e-4
        else "16-bit activations or weights, or sums in another order before a rounding"
    )
    fair = abs(ratio - 1) < 4 * error + 1e-6
    both = (
        "both signs, E[exp d] = 1 within its error"
        if fair
        else f"E[exp d] = {ratio:.4f} ± {error:.4f}: not 1, look at semantics as well"
    )
    return f"no form that a setting would make ({both}); a median of {typical:.1e} is what {size} give"


def _rms(x: Floats) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if len(x) else 0.0


def _finite(pair: Pair) -> Pair:
    return pair.where(np.isfinite(pair.logdiff))


def _parts(pair: Pair) -> list[NDArray[np.int64]]:
    """Indices of each sequence's tokens."""
    order = np.argsort(pair.sequence, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(pair.sequence[order])) + 1)


def _shifted(pair: Pair) -> Finding | None:
    p = _finite(pair)
    base = _rms(p.logdiff)
    for lag in (1, -1):
        rest: list[Floats] = []
        for part in _parts(p):
            t, r = p.train[part], p.rollout[part]
            if len(part) > 2:
                rest.append(t[1:] - r[:-1] if lag == 1 else t[:-1] - r[1:])
        moved = np.concatenate(rest) if rest else np.zeros(0)
        if len(moved) >= LEAST and _rms(moved) < EXPLAINED * base:
            side = "late" if lag == 1 else "early"
            return Finding(
                "shifted by one",
                f"training's labels are one token {side}: logits at position t score token t + 1; check the shift of the labels and of the mask",
                f"moved by one token the two agree to {_rms(moved):.1e} (rms), as they stand to {base:.1e}",
                1 - (_rms(moved) / base) ** 2,
            )
    return None


def _permuted(pair: Pair) -> Finding | None:
    p = _finite(pair)
    parts = _parts(p)
    bad = [i for i, part in enumerate(parts) if len(part) >= 4 and (p.logdiff[part] != 0).mean() > 0.5][:256]
    if len(bad) < 2:
        return None
    swapped = 0
    for i in bad:
        own = _rms(p.logdiff[parts[i]])
        t = p.train[parts[i]]
        others = (p.rollout[parts[j]] for j in bad if j != i)
        best = min((_rms(t[: min(len(t), len(r))] - r[: min(len(t), len(r))]) for r in others), default=own)
        swapped += best < 0.1 * own
    if swapped < max(2, 0.5 * len(bad)):
        return None
    return Finding(
        "other sequences",
        "sequences are paired with other prompts or responses; check the order after gathering, sorting by length, or balancing over ranks",
        f"{swapped} of the {len(bad)} sequences that differ equal another sequence of the rollout",
        swapped / len(bad),
    )


def _scaled(pair: Pair) -> Finding | None:
    p = _finite(pair)
    p = p.where((p.rollout != 0) & (p.train != 0))
    if len(p.train) < LEAST:
        return None
    factor = float(np.median(p.train / p.rollout))
    left, base = _rms(p.train - factor * p.rollout), _rms(p.logdiff)
    if not base or abs(factor - 1) < 1e-4 or left > 0.05 * base:
        return None
    return Finding(
        "scaled",
        f"log-probabilities, not logits, were divided by a temperature (about {max(factor, 1 / factor):.4g}) on one side; divide the logits before the softmax",
        f"training = {factor:.6g} × rollout to {left:.1e} (rms), as they stand {base:.1e}",
        1 - (left / base) ** 2,
    )


def _constant(pair: Pair) -> Finding | None:
    p = _finite(pair)
    d = p.logdiff
    if len(d) < LEAST:
        return None
    shift, base = float(np.median(d)), _rms(d)
    left = _rms(d - shift)
    if abs(shift) < 1e-4 or left > 0.05 * base:
        return None
    return Finding(
        "a constant",
        "every log-probability is off by the same number: a bias or a constant added after the softmax, or a loss that was averaged or weighted",
        f"training − rollout = {shift:.6g} to {left:.1e} (rms)",
        1 - (left / base) ** 2,
    )


def _temperature(pair: Pair) -> Finding | None:
    """Other logits temperature: flatter or steeper, so the difference falls or rises with the log-probability."""
    p = _finite(pair)
    if len(p.train) < 4 * LEAST:
        return None
    slope, offset = np.polyfit(p.rollout, p.train, 1)
    left, base = _rms(p.train - slope * p.rollout - offset), _rms(p.logdiff)
    if abs(slope - 1) < 0.05 or left > 0.75 * base:
        return None
    return Finding(
        "another temperature",
        "one side's log-probabilities are at another temperature: the engine reports raw log-probabilities (at 1) by default; set "
        "logprobs_mode='processed_logprobs' and divide the trainer's logits by the sampling temperature",
        f"training ≈ {slope:.3f} × rollout {offset:+.3f}; the line leaves {left:.1e} (rms) of {base:.1e}",
        1 - (left / base) ** 2,
    )


def _last_token(pair: Pair) -> Finding | None:
    last = np.zeros(len(pair.train), dtype=bool)
    parts = _parts(pair)
    for part in parts:
        last[part[np.argmax(pair.place[part])]] = True
    d = pair.logdiff != 0
    if len(parts) < 3 or not d.any() or (d & ~last).any() or d[last].mean() < 0.5 or last.all():
        return None
    return Finding(
        "last tokens only",
        "an end-of-sequence token was appended after a stop string, without a log-probability of its own; mask it, or score it",
        f"all {int(d.sum())} differing tokens are the last of their sequence ({len(parts)} sequences)",
        1.0,
    )


def _onset(pair: Pair) -> Finding | None:
    """Exact zeros up to one position, the same in every sequence, then differences."""
    d = pair.logdiff != 0
    firsts = [int(pair.place[part][d[part]].min()) for part in _parts(pair) if d[part].any()]
    start = min(firsts)
    reached = [part for part in _parts(pair) if pair.place[part].max() > start + 2]
    after = pair.place >= start
    if start < pair.place.min() + 8 or d[after].mean() < 0.5 or not reached:
        return None
    soon = sum(bool(d[part][pair.place[part] <= start + 2].any()) for part in reached)
    if soon < 0.8 * len(reached) or (len(firsts) < 2 and (~after).sum() < 64):
        return None
    step = max(n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192) if start % n == 0)
    near = f", a multiple of {step}: a tile, page or chunk boundary" if step >= 16 else ""
    return Finding(
        "onset at one position",
        "something changes at that position: a tile or page of attention, a chunk of prefill, a sliding window, the end of a rotary table",
        f"0 on all {int((~after).sum())} tokens before position {start}{near}, then {d[after].mean():.0%} differ ({soon} of {len(reached)} sequences start there)",
        1.0,
    )


def _sequences(pair: Pair) -> Finding | None:
    """Some sequences differ almost everywhere, the others are exact."""
    d = pair.logdiff != 0
    parts = [part for part in _parts(pair) if len(part) >= 2]
    bad = [part for part in parts if d[part].any()]
    good = [part for part in parts if not d[part].any()]
    if not bad or not good or np.mean([d[part].mean() for part in bad]) < 0.5:
        return None
    numbers = [int(pair.sequence[part[0]]) for part in bad]
    names = ", ".join(map(str, numbers[:8])) + ("…" if len(numbers) > 8 else "")
    said = f"{len(bad)} of {len(parts)} sequences differ ({names}), the others are exact"
    if pair.cached is not None:
        hit = [bool((pair.cached[part] > 0).any()) for part in (*bad, *good)]
        if all(hit[: len(bad)]) and not any(hit[len(bad) :]):
            return Finding(
                "cache hits only",
                "the engine's prefix cache holds keys and values of other weights or other positions; reset it after every weight update",
                f"{said}; exactly those took prompt tokens from the prefix cache",
                1.0,
            )
    if numbers == list(range(len(good), len(parts))) and len(good) == 1 and len(parts) >= 3:
        return Finding(
            "all but the first sequence",
            "cumulative sequence lengths are lost in packing: only the first packed sequence attends to itself alone; pass cu_seqlens and positions",
            said,
            1.0,
        )
    shortest, longest = min(pair.place[p].max() for p in bad), max(pair.place[p].max() for p in good)
    if shortest > longest and len(parts) >= 4:
        return Finding(
            "long sequences only",
            "one side truncates, or changes its attention or rotary scaling above a length; compare max lengths and rope settings",
            f"{said}; those that differ end at position {shortest} or later, the exact ones at {longest} or before",
            1.0,
        )
    return Finding(
        "certain sequences only",
        "these sequences were computed from other inputs or weights; compare their prompts, adapters, weight versions, padding and batch",
        said,
        1.0,
    )


def _versions(pair: Pair) -> Finding | None:
    if pair.versions is None or len(np.unique(pair.versions)) < 2:
        return None
    d = np.abs(pair.logdiff)
    known = np.unique(pair.versions)
    sizes = {int(v): float(d[pair.versions == v].mean()) for v in known}
    exact = [v for v, size in sizes.items() if size == 0]
    if not exact or len(exact) == len(sizes):
        return None
    wrong = sorted(set(sizes) - set(exact))
    return Finding(
        "certain weight versions only",
        "training scored these tokens with other weights than the engine sampled them with; compare a token with the version that made it",
        f"exact for version {', '.join(map(str, exact))}; mean |logdiff| "
        + ", ".join(f"{sizes[v]:.1e} for {v}" for v in wrong),
        1.0,
    )


def _token_ids(pair: Pair) -> Finding | None:
    if pair.tokens is None:
        return None
    d = pair.logdiff != 0
    wrong, right = set(pair.tokens[d].tolist()), set(pair.tokens[~d].tolist())
    if wrong & right or int(d.sum()) < LEAST // 3 or len(wrong) > 0.1 * len(wrong | right):
        return None
    names = ", ".join(str(t) for t in sorted(wrong)[:8])
    return Finding(
        "certain token ids only",
        "a bias, a ban or another row of the output projection for these ids: logit_bias, bad_words, allowed tokens, added or resized vocabulary",
        f"all {int(d.sum())} differing tokens are of {len(wrong)} ids ({names}), which are exact nowhere",
        1.0,
    )


def _one_sided(pair: Pair) -> Finding | None:
    d = pair.logdiff
    differs = d != 0
    n = int(differs.sum())
    negative = int((d < 0).sum())
    most = max(negative, n - negative)
    if n < LEAST or most < 0.999 * n:
        return None
    if negative == most:
        return Finding(
            "one sign, training below",
            "the rollout's log-probabilities are renormalised over fewer tokens (top_p, top_k, min_p, banned tokens), or training's "
            "softmax runs over padded vocabulary columns",
            f"all {n} differing tokens have training < rollout",
            1.0,
        )
    return Finding(
        "one sign, training above",
        "training's softmax runs over fewer tokens than the rollout's: the engine counts padded vocabulary columns, or training "
        "renormalises over a filtered set",
        f"all {n} differing tokens have training > rollout",
        1.0,
    )


def _repeated(pair: Pair) -> Finding | None:
    if pair.tokens is None:
        return None
    seen_before = np.zeros(len(pair.tokens), dtype=bool)
    for part in _parts(pair):
        known: set[int] = set()
        for i in part[np.argsort(pair.place[part], kind="stable")]:
            seen_before[i] = int(pair.tokens[i]) in known
            known.add(int(pair.tokens[i]))
    size = np.abs(_zero_infinite(pair.logdiff))
    if min(seen_before.sum(), (~seen_before).sum()) < LEAST:
        return None
    again, new = float(size[seen_before].mean()), float(size[~seen_before].mean())
    if again < 4 * new or again == 0:
        return None
    return Finding(
        "repeated tokens",
        "a repetition, presence or frequency penalty is in one side's logits, perhaps from generation_config.json; set it to its neutral value",
        f"mean |logdiff| {again:.1e} on tokens that occurred before in their sequence, {new:.1e} on the others",
        float(size[seen_before].sum() / size.sum()),
    )


def _with_position(pair: Pair) -> Finding | None:
    p = _finite(pair)
    size = np.abs(p.logdiff)
    if len(size) < 8 * LEAST or len(np.unique(p.place)) < 16:
        return None
    rho = _spearman(size, p.place)
    low, high = np.quantile(p.place, (0.25, 0.75))
    early, late = float(size[p.place <= low].mean()), float(size[p.place >= high].mean())
    if rho > 0.3 and late > 3 * early:
        return Finding(
            "grows with position",
            "rotary embedding: scaling (YaRN, linear), base, or a table in 16 bits on one side; or an error that a cache carries on",
            f"mean |logdiff| {early:.1e} in the first quarter of positions, {late:.1e} in the last (rank correlation {rho:.2f})",
            1.0,
        )
    if rho < -0.3 and early > 3 * late:
        return Finding(
            "fades with position",
            "the beginnings differ: a second BOS, a missing system prompt, other padding before the prompt",
            f"mean |logdiff| {early:.1e} in the first quarter of positions, {late:.1e} in the last (rank correlation {rho:.2f})",
            1.0,
        )
    return None


def _rounded(pair: Pair) -> Finding | None:
    """One side's numbers lie on the grid of a 16-bit type, the other's do not."""
    for name, bits in (("bfloat16", 16), ("float16", 13)):
        share = {side: float(_on_grid(getattr(pair, side), bits).mean()) for side in ("train", "rollout")}
        for side, other in (("train", "rollout"), ("rollout", "train")):
            if share[side] > 0.999 and share[other] < 0.5 and len(pair.train) >= LEAST:
                who = "training" if side == "train" else "the rollout"
                return Finding(
                    f"{name} log-probabilities",
                    f"{who}'s log-probabilities were rounded to {name}; keep logits' softmax and its result in float32",
                    f"every value of {who} is a {name} number, {share[other]:.0%} of the other side's are",
                    1.0,
                )
    return None


def _tail(pair: Pair) -> Finding | None:
    size = np.abs(_zero_infinite(pair.logdiff))
    if (size != 0).sum() < LEAST or len(size) < 500:
        return None
    largest = np.sort(size)[::-1]
    few = max(1, len(size) // 100)
    share = float(largest[:few].sum() / largest.sum())
    if share < 0.5:
        return None
    return Finding(
        "a few heavy tokens",
        "in a mixture of experts: the router chooses other experts on these tokens (router in 16 bits, other ties); else tokens near a "
        "threshold of sampling",
        f"1 % of the tokens hold {share:.0%} of the difference; the median |logdiff| is {float(np.median(size)):.1e}",
        share,
    )


def _zero_infinite(d: Floats) -> Floats:
    return np.where(np.isfinite(d), d, 0.0)


def _on_grid(x: Floats, low_bits: int) -> NDArray[np.bool_]:
    """Whether f32 values have no bits below a 16-bit type's."""
    on_grid: NDArray[np.bool_] = (x.astype(np.float32).view(np.uint32) & np.uint32((1 << low_bits) - 1)) == 0
    return on_grid


def _spearman(a: Floats, b: Integers) -> float:
    def ranks(x: NDArray[np.float64] | Integers) -> Floats:
        _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2)[inverse]

    x, y = ranks(a), ranks(b)
    spread = x.std() * y.std()
    return 0.0 if spread == 0 else float(((x - x.mean()) * (y - y.mean())).mean() / spread)


SHAPES: tuple[Callable[[Pair], Finding | None], ...] = (
    _shifted,
    _permuted,
    _scaled,
    _constant,
    _last_token,
    _versions,
    _sequences,
    _onset,
    _token_ids,
    _repeated,
    _temperature,
    _one_sided,
    _rounded,
    _with_position,
    _tail,
)
