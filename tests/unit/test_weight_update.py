"""A weight update is checked as it streams, and takes effect as a whole or not at all; without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mindspeed_tpi.errors import InputError, ParityError
from mindspeed_tpi.profiles import Profile
from mindspeed_tpi.weights import unpacked, update
from mindspeed_tpi.weights.names import EMBEDDING, HEAD
from mindspeed_tpi.weights.names import tensors as expected_of
from tests.models import write_model

SIZES = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 128, "vocab": 120}


class Workers:
    """Two workers' memory: what is in use, what is kept beside it, and the largest file they were sent."""

    def __init__(self) -> None:
        self.in_use: dict[str, Tensor] = {}
        self.staged: dict[str, Tensor] = {}
        self.largest = 0
        self.reset = True
        self.broken = ""

    def __call__(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self, method.removeprefix("tpi_"))(*args), ""]

    def stage_weights(self, path: str) -> str:
        self.largest = max(self.largest, Path(path).stat().st_size)
        self.staged |= load_file(path)
        return self.broken

    def commit_weights(self) -> str:
        self.in_use, self.staged = self.staged, {}
        return ""

    def discard_weights(self) -> None:
        self.staged = {}

    def forget(self) -> bool:
        return self.reset


@pytest.fixture(scope="module", params=["llama", "llama-tied", "mixtral"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), request.param, **SIZES)


@pytest.fixture
def profile(model: Path) -> Profile:
    return Profile.load(model)


def test_all_of_it_arrives_in_buckets(model: Path, profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "BUCKET", 20_000)
    workers = Workers()
    update.stream(unpacked(model, profile), profile, workers, workers.forget)
    assert workers.in_use.keys() == expected_of(profile).keys()
    assert all(torch.equal(workers.in_use[name], tensor) for name, tensor in unpacked(model, profile) if name != HEAD)
    largest = max(tensor.nbytes for tensor in workers.in_use.values())
    assert largest <= workers.largest < max(largest, 20_000) + 20_000  # a header beside it


def dies(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    yield next(tensors)
    raise KeyboardInterrupt


WRONG = {
    "one lacks": (lambda t: ((n, x) for n, x in t if "layers.1" not in n or "o_proj" not in n), r"lacks .*o_proj"),
    "one too many": (lambda t: [*t, ("model.layers.2.mlp.up_proj.weight", torch.ones(2))], "does not have"),
    "shape": (lambda t: ((n, x[:-1] if "k_proj" in n else x) for n, x in t), r"k_proj.* expected \[64, 64\]"),
    "dtype": (lambda t: ((n, x.double()) for n, x in t), "float64"),
    "twice": (lambda t: [pair for p in t for pair in (p, p)], "twice"),
    "the iterator fails": (dies, "^$"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_nothing_changes_when_something_is_wrong(
    wrong: str, model: Path, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, message = WRONG[wrong]
    monkeypatch.setattr(update, "BUCKET", 20_000)
    workers = Workers()
    error = KeyboardInterrupt if change is dies else InputError
    with pytest.raises(error, match=message):
        update.stream(change(unpacked(model, profile)), profile, workers, workers.forget)
    assert not workers.in_use and not workers.staged


@pytest.mark.parametrize(("field", "value", "message"), [("reset", False, "requests are running"), ("broken", "rank 1: no", "keeps the old: rank 1: no")])  # fmt: skip
def test_what_the_engine_cannot_do(field: str, value: Any, message: str, model: Path, profile: Profile) -> None:
    workers = Workers()
    setattr(workers, field, value)
    with pytest.raises(ParityError, match=message):
        update.stream(unpacked(model, profile), profile, workers, workers.forget)
    assert not workers.in_use and not workers.staged


def test_a_tied_head_must_be_the_embedding(tmp_path: Path) -> None:
    model = write_model(tmp_path, "llama-tied", **SIZES)
    profile = Profile.load(model)
    tensors = dict(unpacked(model, profile))
    workers = Workers()
    update.stream([*tensors.items(), (HEAD, tensors[EMBEDDING].clone())], profile, workers, workers.forget)
    assert HEAD not in workers.in_use
    with pytest.raises(InputError, match="differs from"):
        update.stream([*tensors.items(), (HEAD, -tensors[EMBEDDING])], profile, workers, workers.forget)
