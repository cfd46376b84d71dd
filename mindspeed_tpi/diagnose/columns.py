"""Log-probabilities of one side, read from the files that RL frameworks leave behind.

Formats: safetensors (this package's rollout record and trainer output among them), JSON lines (a line a sequence, a line a token, or
replies of an OpenAI-compatible server or of SGLang), parquet (the same rows), and tensors saved by `torch.save`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from mindspeed_tpi.errors import InputError

Side = Literal["train", "rollout"]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Names by which frameworks call a column; the first one found is taken. verl, TRL, OpenRLHF, slime, NeMo-RL, AReaL, prime-rl, ms-swift.
_LOGPROBS: dict[str, tuple[str, ...]] = {
    "train": (
        "old_log_probs",
        "old_logprobs",
        "train_log_probs",
        "train_logprobs",
        "trainer_logprobs",
        "actor_log_probs",
        "action_log_probs",
        "prev_logprobs",
        "prox_logp",
        "old_per_token_logps",
        "per_token_logps",
    ),
    "rollout": (
        "rollout_log_probs",
        "rollout_logprobs",
        "generation_logprobs",
        "inference_logprobs",
        "sampling_logprobs",
        "sampling_per_token_logps",
        "completion_logprobs",
        "behavior_log_probs",
        "vllm_logprobs",
        "output_token_logprobs",
        "token_logprobs",
    ),
}
_EITHER = ("logprobs", "logprob", "log_probs", "log_prob", "logps", "logp")
_FACTS: dict[str, tuple[str, ...]] = {
    "tokens": ("token_ids", "responses", "completion_ids", "response_ids", "output_ids", "tokens", "token_id", "token"),
    "positions": ("positions", "position_ids", "position"),
    "versions": ("weight_versions", "weight_version", "policy_versions", "policy_version", "model_version", "versions"),
    "cached": ("num_cached_tokens", "cached_tokens"),
    "mask": ("response_mask", "loss_mask", "loss_masks", "completion_mask", "action_mask", "token_mask"),
}
_LENGTHS = ("response_lengths", "lengths")
_OFFSETS = ("offsets", "cu_seqlens")
_SEQUENCE = ("sequence", "sequence_id", "sample", "sample_id", "request_id", "uid", "row")


@dataclass(frozen=True)
class Column:
    """Log-probabilities of one side, R sequences of N tokens in all, concatenated.

    Attributes:
        name: where they come from, for messages: file and column.
        logprobs: f64 [N], NaN where none was given. Every float32 and bfloat16 value is exact in it.
        lengths: int64 [R], tokens of each sequence; one entry where the file does not tell sequences apart.
        tokens, positions, versions: int64 [N] where the file has them.
        cached: int64 [R], prompt tokens that the engine took from its prefix cache.
    """

    name: str
    logprobs: Floats
    lengths: Integers
    tokens: Integers | None = None
    positions: Integers | None = None
    versions: Integers | None = None
    cached: Integers | None = None


def read(path: str | Path, side: Side, column: str | None = None) -> Column:
    """Read one side's log-probabilities.

    Args:
        path: a file of a format named above; the ending tells which.
        side: which names are looked for first.
        column: the column's name in the file; None: known names of `side`, then names that say nothing of a side.

    Raises:
        InputError: no such file or format, a damaged file, no column that fits, or columns that do not fit together.
    """
    path = Path(path)
    readers = {
        ".safetensors": _safetensors,
        ".jsonl": _json_lines,
        ".json": _json_lines,
        ".parquet": _parquet,
        ".pt": _torch,
        ".pth": _torch,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise InputError(f"{path}: unknown ending {path.suffix!r}; known are {', '.join(readers)}")
    if not path.is_file():
        raise InputError(f"{path} does not exist or is no file")
    return _column(path, reader(path), side, column)


# ---- files ----


def _safetensors(path: Path) -> dict[str, Any]:
    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read {path}: {error}") from None


def _torch(path: Path) -> dict[str, Any]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch names no class for a damaged file
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"cannot read {path} without running code from it ({reason}); save a dict of plain tensors, or safetensors"
        ) from None
    if not isinstance(found, Mapping):
        return {"logprobs": found}
    nested = {k: v for value in found.values() if isinstance(value, Mapping) for k, v in value.items()}
    return {**nested, **{k: v for k, v in found.items() if not isinstance(v, Mapping)}}


def _json_lines(path: Path) -> dict[str, Any]:
    rows = []
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            text = file.read()
        if path.suffix.lower() == ".json":
            document = json.loads(text)
            rows = document if isinstance(document, list) else [document]
        else:
            for written in filter(str.strip, text.split("\n")):
                rows.append(json.loads(written))
    except (OSError, ValueError) as error:
        line = f" object {len(rows) + 1}:" if isinstance(error, json.JSONDecodeError) else ""
        raise InputError(f"cannot read {path}:{line} {error}") from None
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{path} must hold JSON objects, one a line, and at least one")
    return _by_name(path, [flat for row in rows for flat in _replies(row)])


def _parquet(path: Path) -> dict[str, Any]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise InputError(f"{path}: reading parquet needs pyarrow; run: pip install 'mindspeed-tpi[parquet]'") from None
    try:
        rows = parquet.read_table(path).to_pylist()
    except Exception as error:  # pyarrow has many classes for a damaged file
        raise InputError(f"cannot read {path}: {error}") from None
    if not rows:
        raise InputError(f"{path} has no rows")
    return _by_name(path, rows)


def _replies(row: dict[str, Any]) -> list[dict[str, Any]]:
    """A row itself, or one row for each continuation of a server's reply."""
    if isinstance(row.get("choices"), list):  # OpenAI's completions and chat completions
        found = []
        for choice in row["choices"]:
            given = choice.get("logprobs") or {}
            values = given.get("token_logprobs") or [item["logprob"] for item in given.get("content") or ()]
            found.append({"token_logprobs": values, **({"token_ids": i} if (i := choice.get("token_ids")) else {})})
        return found
    meta = row.get("meta_info")
    if isinstance(meta, dict) and "output_token_logprobs" in meta:  # SGLang: [logprob, token id, text]
        entries = meta["output_token_logprobs"]
        reply = {"output_token_logprobs": [entry[0] for entry in entries], "token_ids": [entry[1] for entry in entries]}
        return [reply | ({"num_cached_tokens": meta["cached_tokens"]} if "cached_tokens" in meta else {})]
    return [row]


def _by_name(path: Path, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    absent = {name: i for i, row in enumerate(rows) for name in names if name not in row}
    wanted = {n for group in (*_LOGPROBS.values(), _EITHER, *_FACTS.values()) for n in group}
    if broken := [n for n in absent if n in wanted]:
        raise InputError(f"{path}: row {absent[broken[0]] + 1} has no {broken[0]!r}, other rows have")
    return {name: [row[name] for row in rows] for name in names if name not in absent}


# ---- columns ----


def _column(path: Path, data: dict[str, Any], side: Side, column: str | None) -> Column:
    name = column or _choose(path, data, side)
    if name not in data:
        raise InputError(f"{path} has no column {name!r}; it has {_listed(data)}")
    values, lengths = _values(path, name, data[name], np.float64)
    padded = lengths is not None and getattr(data[name], "ndim", 0) == 2
    lengths = _lengths(path, data, len(values)) if lengths is None else lengths
    facts = {
        fact: _fact(path, data, n, len(values), lengths)
        for fact, names in _FACTS.items()
        if (n := next((n for n in names if n in data and n != name), None))
    }
    cached = facts.pop("cached", None)
    mask = facts.pop("mask", None)
    keep = np.ones(len(values), dtype=bool) if mask is None else mask != 0
    if padded and mask is None:
        keep = ~_trailing_zeros(values, lengths)
    kept = np.array([int(part.sum()) for part in np.split(keep, np.cumsum(lengths)[:-1])], dtype=np.int64)
    return Column(
        f"{path.name}:{name}",
        values[keep],
        kept,
        **{fact: found[keep] for fact, found in facts.items() if found is not None and len(found) == len(keep)},
        cached=cached if cached is not None and len(cached) == len(kept) else None,
    )


def _choose(path: Path, data: Mapping[str, Any], side: Side) -> str:
    for name in (*_LOGPROBS[side], *_EITHER):
        if name in data:
            return name
    raise InputError(
        f"{path}: none of the names known for {side} log-probabilities; name the column with --{side}-column. It has {_listed(data)}"
    )


def _listed(data: Iterable[str]) -> str:
    return ", ".join(map(repr, data)) or "no columns"


def _values(path: Path, name: str, raw: Any, dtype: Any) -> tuple[NDArray[Any], Integers | None]:
    """All values in one line, and the lengths of the sequences where the form tells them."""
    try:
        if isinstance(raw, torch.Tensor):
            numbers = (raw.double() if raw.is_floating_point() else raw.long()).numpy().astype(dtype)
            if numbers.ndim not in (1, 2):
                raise InputError(
                    f"{path}: column {name!r} has shape {tuple(raw.shape)}; it must have 1 or 2 dimensions"
                )
            return numbers.reshape(-1), None if numbers.ndim == 1 else np.full(len(numbers), numbers.shape[1])
        if not isinstance(raw, Sequence) or isinstance(raw, str):
            raise TypeError(f"it is a {type(raw).__name__}")
        if raw and isinstance(raw[0], torch.Tensor | Sequence | np.ndarray) and not isinstance(raw[0], str):
            parts = [np.array([_number(v) for v in part], dtype=dtype) for part in raw]
            return np.concatenate(parts), np.array([len(part) for part in parts], dtype=np.int64)
        return np.array([_number(v) for v in raw], dtype=dtype), None
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: column {name!r} does not hold numbers: {error}") from None


def _number(value: Any) -> Any:
    return float("nan") if value is None else value


def _lengths(path: Path, data: Mapping[str, Any], total: int) -> Integers:
    """Lengths of the sequences in a flat column."""
    for name in _OFFSETS:
        if name in data:
            offsets, _ = _values(path, name, data[name], np.int64)
            return _checked(path, name, np.diff(offsets), total)
    for name in _LENGTHS:
        if name in data:
            return _checked(path, name, _values(path, name, data[name], np.int64)[0], total)
    for name in _SEQUENCE:
        if name in data and len(data[name]) == total:
            labels = [str(v) for v in (data[name].tolist() if isinstance(data[name], torch.Tensor) else data[name])]
            starts = [i for i in range(total) if i == 0 or labels[i] != labels[i - 1]]
            if len(starts) != len(set(labels)):
                raise InputError(f"{path}: tokens of one {name} must follow each other; sort the rows by it")
            return np.diff([*starts, total]).astype(np.int64)
    return np.array([total], dtype=np.int64)


def _checked(path: Path, name: str, lengths: Integers, total: int) -> Integers:
    if int(lengths.sum()) != total or bool((lengths < 0).any()):
        raise InputError(f"{path}: {name!r} adds to {int(lengths.sum())} tokens, the log-probabilities are {total}")
    return lengths


def _fact(path: Path, data: Mapping[str, Any], name: str, total: int, lengths: Integers) -> Integers | None:
    """A column that goes with the log-probabilities, a value a token (one a sequence is repeated, but for the cache's)."""
    if isinstance(data[name], list) and data[name] and isinstance(data[name][0], str):
        return None  # text of tokens
    values, _ = _values(path, name, data[name], np.float64)
    if len(values) == total or name in _FACTS["cached"]:
        return _whole(values)
    if len(values) == len(lengths):
        return _whole(np.repeat(values, lengths))
    return None


def _whole(values: Floats) -> Integers:
    whole: Integers = np.nan_to_num(values, nan=-1).astype(np.int64)
    return whole


def _trailing_zeros(values: Floats, lengths: Integers) -> NDArray[np.bool_]:
    """Padding of a [B, T] column that comes without a mask: a log-probability of exactly 0 at a row's end."""
    rows = np.split(values == 0, np.cumsum(lengths)[:-1])
    return np.concatenate([np.logical_and.accumulate(row[::-1])[::-1] for row in rows])
