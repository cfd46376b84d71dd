"""`mindspeed-tpi logdiff`: files of many kinds, statistics, and the shapes of planted differences."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
import torch
from safetensors.torch import save_file

from mindspeed_tpi.cli import main
from mindspeed_tpi.diagnose import shape
from mindspeed_tpi.diagnose.columns import Column, read
from mindspeed_tpi.diagnose.pair import Pair, align, statistics
from mindspeed_tpi.errors import InputError

VOCAB, SEQUENCES, LENGTH = 200, 24, 96


class Engines:
    """Softmax over random logits, tokens sampled from it: what two engines would report, and faults planted in one of them."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        sharp = self.random.uniform(0.5, 4, (SEQUENCES, LENGTH, 1))
        self.logits = sharp * self.random.standard_normal((SEQUENCES, LENGTH, VOCAB))
        gumbel = self.random.gumbel(size=self.logits.shape)
        self.tokens = (self.logits + gumbel).argmax(-1)

    def logprobs(self, logits: np.ndarray) -> np.ndarray:
        chosen = np.take_along_axis(logits, self.tokens[..., None], -1)[..., 0]
        top = logits.max(-1)
        return chosen - top - np.log(np.exp(logits - top[..., None]).sum(-1))

    def noisy(self, size: float = 0.01) -> np.ndarray:
        return self.logprobs(self.logits + size * self.random.standard_normal(self.logits.shape))


def pair_of(engines: Engines, train: np.ndarray, rollout: np.ndarray, **facts: Any) -> Pair:
    lengths = np.full(SEQUENCES, LENGTH)
    tokens = engines.tokens.ravel()
    return align(Column("a", train.ravel(), lengths, tokens), Column("b", rollout.ravel(), lengths, tokens, **facts))


def _at(train: np.ndarray, rows: Any, columns: Any, by: float) -> np.ndarray:
    changed = train.copy()
    changed[rows, columns] += by * (
        1 + np.arange(changed[rows, columns].size).reshape(changed[rows, columns].shape) % 3
    )
    return changed


def _top_p(e: Engines) -> np.ndarray:
    """Renormalised over the smallest set with 95 % of the probability (and the sampled token)."""
    p = np.exp(e.logits - e.logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    order = np.argsort(-p, -1)
    kept = np.take_along_axis(p, order, -1).cumsum(-1) - np.take_along_axis(p, order, -1) < 0.95
    mask = np.zeros_like(kept)
    np.put_along_axis(mask, order, kept, -1)
    np.put_along_axis(mask, e.tokens[..., None], True, -1)
    return e.logprobs(np.where(mask, e.logits, -np.inf))


def _penalised(e: Engines) -> np.ndarray:
    logits = e.logits.copy()
    for row, tokens in enumerate(e.tokens):
        for t in range(1, LENGTH):
            seen = np.unique(tokens[:t])
            value = logits[row, t, seen]
            logits[row, t, seen] = np.where(value > 0, value / 1.3, value * 1.3)
    return e.logprobs(logits)


def _biased(e: Engines) -> np.ndarray:
    """A bias that only the sampled ids 3, 4 and 5 show."""
    return e.logprobs(e.logits) + 0.5 * np.isin(e.tokens, (3, 4, 5))


def _router(e: Engines) -> np.ndarray:
    noise = np.where(e.random.random(e.tokens.shape) < 0.004, e.random.standard_normal(e.tokens.shape), 0)
    return e.noisy(1e-5) + noise


CAUSES: dict[str, Callable[[Engines], np.ndarray]] = {
    "shifted by one": lambda e: np.roll(e.logprobs(e.logits), 1, axis=1),
    "other sequences": lambda e: np.roll(e.logprobs(e.logits), 1, axis=0),
    "scaled": lambda e: e.logprobs(e.logits) / 0.7,
    "a constant": lambda e: e.logprobs(e.logits) + 0.25,
    "another temperature": lambda e: e.logprobs(e.logits / 0.7),
    "last tokens only": lambda e: _at(e.logprobs(e.logits), slice(None), -1, 0.4),
    "onset at one position": lambda e: _at(e.logprobs(e.logits), slice(None), slice(64, None), 0.01),
    "all but the first sequence": lambda e: _at(e.logprobs(e.logits), slice(1, None), slice(None), 0.01),
    "certain sequences only": lambda e: _at(e.logprobs(e.logits), slice(3, None, 5), slice(None), 0.01),
    "certain token ids only": _biased,
    "one sign, training above": _top_p,
    "repeated tokens": _penalised,
    "grows with position": lambda e: e.logprobs(
        e.logits + np.linspace(0, 0.3, LENGTH)[:, None] ** 2 * e.random.standard_normal(e.logits.shape)
    ),
    "fades with position": lambda e: e.logprobs(
        e.logits + np.geomspace(0.3, 1e-3, LENGTH)[:, None] * e.random.standard_normal(e.logits.shape)
    ),
    "a few heavy tokens": _router,
    "bfloat16 log-probabilities": lambda e: torch.tensor(e.logprobs(e.logits)).bfloat16().double().numpy(),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_planted_difference_is_named_first(cause: str) -> None:
    engines = Engines()
    pair = pair_of(engines, CAUSES[cause](engines), engines.logprobs(engines.logits))
    assert shape.findings(pair)[0].shape == cause


@pytest.mark.parametrize("cause", ["scaled", "another temperature", "shifted by one", "one sign, training above"])
def test_a_cause_on_top_of_bfloat16_noise_is_still_named_or_not_at_all(cause: str) -> None:
    engines = Engines(1)
    noise = engines.noisy(0.02) - engines.logprobs(engines.logits)
    pair = pair_of(engines, CAUSES[cause](engines) + noise, engines.logprobs(engines.logits))
    names = [found.shape for found in shape.findings(pair)]
    assert names[:1] in ([cause], []) and not (cause == "shifted by one" and not names)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("size", [1e-6, 1e-3, 0.02, 0.1])
def test_noise_gets_no_cause(seed: int, size: float) -> None:
    engines = Engines(seed)
    pair = pair_of(engines, engines.noisy(size), engines.logprobs(engines.logits))
    assert not shape.findings(pair) and "no form" in shape.noise(pair)


def test_facts_beside_the_numbers_name_the_cause() -> None:
    engines = Engines()
    exact = engines.logprobs(engines.logits)
    stale = _at(exact, slice(0, None, 2), slice(None), 0.01)
    cached = np.where(np.arange(SEQUENCES) % 2 == 0, 32, 0)
    assert shape.findings(pair_of(engines, stale, exact, cached=cached))[0].shape == "cache hits only"
    versions = np.tile(np.where(np.arange(LENGTH) < 50, 3, 4), SEQUENCES)
    newer = _at(exact, slice(None), slice(50, None), 0.01)
    assert shape.findings(pair_of(engines, newer, exact, versions=versions))[0].shape == "certain weight versions only"


def test_statistics_against_their_definitions() -> None:
    engines = Engines()
    pair = pair_of(engines, engines.noisy(0.1), engines.logprobs(engines.logits))
    d = pair.train - pair.rollout
    found = statistics(pair)
    w = np.exp(d)
    assert found["kl_k1"] == pytest.approx(-d.mean()) and found["kl_k3"] == pytest.approx((w - 1 - d).mean())
    assert found["ess_tokens"] == pytest.approx(w.sum() ** 2 / len(w) / (w**2).sum())
    sums = np.exp(d.reshape(SEQUENCES, LENGTH).sum(1))
    assert found["ess_sequences"] == pytest.approx(sums.sum() ** 2 / SEQUENCES / (sums**2).sum())
    assert abs(found["mean_ratio"] - 1) < 4 * found["mean_ratio_error"]
    assert found["quantiles"]["0.5"] == pytest.approx(np.median(abs(d))) and found["max_abs"] == abs(d).max()


def test_differences_near_probability_one_are_not_lost() -> None:
    """exp(logprob) would show nothing of these."""
    column = Column("a", np.array([-1e-12, -2e-12]), np.array([2]))
    assert statistics(align(column, Column("b", np.array([-1e-12, -3e-12]), np.array([2]))))["nonzero"] == 1


# ---- files ----


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_the_same_numbers_from_every_kind_of_file(tmp_path: Path) -> None:
    values = torch.tensor([[-0.5, -1.25, -2.0], [-0.75, -3.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    ids = torch.tensor([[5, 6, 7], [8, 9, 0]])
    kept = [-0.5, -1.25, -2.0, -0.75, -3.0]
    save_file({"old_log_probs": values, "response_mask": mask, "responses": ids}, tmp_path / "verl.safetensors")
    save_file({"log_probs": values}, tmp_path / "padded.safetensors")
    torch.save({"batch": {"per_token_logps": values, "completion_mask": mask}}, tmp_path / "trl.pt")
    flat = {"logprobs": values[mask == 1], "offsets": torch.tensor([0, 3, 5]), "token_ids": ids[mask == 1]}
    save_file(flat, tmp_path / "record.safetensors")
    rows = [{"train_logprobs": kept[:3], "token_ids": [5, 6, 7]}, {"train_logprobs": kept[3:], "token_ids": [8, 9]}]
    _write(tmp_path / "sequences.jsonl", rows)
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "sequences.parquet")
    tokens = [{"sample": "ab"[i > 2], "logprob": v} for i, v in enumerate(kept)]
    _write(tmp_path / "tokens.jsonl", tokens)
    replies = [
        {
            "choices": [
                {"logprobs": {"token_logprobs": kept[:3]}},
                {"logprobs": {"content": [{"logprob": v} for v in kept[3:]]}},
            ]
        }
    ]
    _write(tmp_path / "openai.jsonl", replies)
    entries = [[v, t, None] for v, t in zip(kept, [5, 6, 7, 8, 9], strict=True)]
    sglang = [
        {"meta_info": {"output_token_logprobs": part, "cached_tokens": n}}
        for part, n in ((entries[:3], 4), (entries[3:], 0))
    ]
    _write(tmp_path / "sglang.jsonl", sglang)
    for file in sorted(tmp_path.iterdir()):
        for side in ("rollout",) if file.stem in ("openai", "sglang") else ("train",):
            found = read(file, side)  # type: ignore[arg-type]
            assert found.logprobs.tolist() == kept and found.lengths.tolist() == [3, 2], file
    assert read(tmp_path / "sglang.jsonl", "rollout").cached.tolist() == [4, 0]  # type: ignore[union-attr]


def test_a_response_meets_the_end_of_prompt_and_response(tmp_path: Path) -> None:
    both = _write(tmp_path / "r.jsonl", [{"logprobs": [None, -1.0, -2.0, -3.0]}, {"logprobs": [None, -4.0, -5.0]}])
    response = _write(tmp_path / "t.jsonl", [{"logprobs": [-2.0, -3.5]}, {"logprobs": [-5.0]}])
    pair = align(read(response, "train"), read(both, "rollout"))
    assert pair.logdiff.tolist() == [0.0, -0.5, 0.0] and pair.place.tolist() == [2, 3, 2]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("absent.jsonl", None, "does not exist"),
        ("a.csv", "1,2", "unknown ending '.csv'"),
        ("a.jsonl", "[1, 2]\n", "must hold JSON objects"),
        ("b.jsonl", '{"logprobs": [1]}\n{"logp', "object 2:"),
        ("c.jsonl", '{"scores": [1.0]}\n', "It has 'scores'"),
        ("d.jsonl", '{"logprobs": "high"}\n', "does not hold numbers"),
        ("e.jsonl", '{"logprobs": [-1.0]}\n{"other": 1}\n', "row 2 has no 'logprobs'"),
        ("f.safetensors", "no such thing", "cannot read"),
        ("g.pt", "no such thing", "without running code"),
        ("h.parquet", "no such thing", "cannot read"),
    ],
)
def test_bad_files_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | None, says: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content, encoding="utf-8")
    good = _write(tmp_path / "good.jsonl", [{"logprobs": [-1.0]}])
    assert main(["logdiff", str(tmp_path / name), str(good)]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def test_other_tokens_are_not_a_numerical_difference() -> None:
    lengths, values = np.array([2]), np.array([-1.0, -2.0])
    with pytest.raises(
        InputError, match="1 of 2 differ, first in sequence 0 at index 1: 7 in training, 9 in the rollout"
    ):
        align(Column("a", values, lengths, np.array([5, 7])), Column("b", values, lengths, np.array([5, 9])))


def test_the_command_ends_with_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engines = Engines()
    exact = torch.tensor(engines.logprobs(engines.logits)).float()

    def run(train: torch.Tensor, *options: str) -> int:
        save_file({"old_log_probs": train.contiguous(), "rollout_log_probs": exact}, tmp_path / "batch.safetensors")
        return main(["logdiff", str(tmp_path / "batch.safetensors"), *options])

    assert run(exact.clone()) == 0 and capsys.readouterr().out.startswith("no difference on 2304 tokens")
    noisy = torch.tensor(engines.noisy()).float()
    assert run(noisy, "--report", str(tmp_path / "r.html"), "--json", str(tmp_path / "r.json")) == 4
    assert capsys.readouterr().out.startswith("no cause from the shape (2304 of 2304 tokens differ)")
    assert "data:image/png" in (tmp_path / "r.html").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["statistics"]["tokens"] == 2304
    assert run(exact / 0.7) == 1 and capsys.readouterr().out.startswith("cause: scaled (2304 of 2304 tokens differ)")


def test_one_file_with_one_column_is_not_compared_with_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["logdiff", str(_write(tmp_path / "x.jsonl", [{"logprobs": [-1.0]}]))]) == 2
    assert "compared with itself" in capsys.readouterr().err
