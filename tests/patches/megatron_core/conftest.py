"""Tiny models, small enough for the reference backend, and their trainers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mindspeed_tpi.parity.request import Request
from mindspeed_tpi.parity.rollout import Rollout
from mindspeed_tpi.parity.trainer import Trainer
from tests.models import random_prompts, write_model
from tests.rollout_records import record

VOCAB = 100
LENGTHS = [9, 20, 5, 1]


def tiny_model(path: Path, family: str, **options: object) -> Path:
    sizes = {"layers": 2, "hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 96, "vocab": VOCAB}
    return write_model(path, family, **{**sizes, "window": 6, "max_positions": 64, **options})  # type: ignore[arg-type]


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[..., Trainer]:
    """trainer(family, dtype="bfloat16", **sizes): a strict Trainer of a tiny model."""

    def build(family: str, dtype: str = "bfloat16", **options: object) -> Trainer:
        model = tiny_model(tmp_path / f"{family}-{dtype}", family, dtype=dtype, **options)
        return Trainer(Request(str(model), ((1, 2),), dtype=dtype))

    return build


def rollout_for(trainer: Trainer, lengths: list[int] = LENGTHS, seed: int = 1, temperature: float = 1.0) -> Rollout:
    sequences = random_prompts(lengths, vocab=VOCAB, seed=seed)
    return record(sequences, trainer.contract, temperature=temperature)


def same_bits(a: Tensor, b: Tensor) -> bool:
    words = {2: torch.int16, 4: torch.int32}
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(words[a.element_size()]), b.contiguous().view(words[b.element_size()]))
    )


def main_grads(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of all f32 main gradients; they are zeroed for the next backward pass."""
    grads = {}
    for name, parameter in trainer.model.named_parameters():
        grads[name] = parameter.main_grad.clone()
        parameter.main_grad.zero_()
    return grads
