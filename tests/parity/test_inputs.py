"""logdiff is exactly 0 for checkpoints that users have and that one side could read differently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_tpi.parity.request import Request
from mindspeed_tpi.parity.trainer import Trainer
from tests.models import random_prompts, write_model
from tests.parity.conftest import Case, assert_exact, roll_out

WINDOWED = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
SIZES: dict[str, Any] = {"layers": 2, "hidden": 96, "heads": 6, "kv_heads": 2, "head_dim": 16, "ffn": 96, "moe_ffn": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "head_dim 16": ("llama", {}),
    "head_dim 40": ("llama", {"head_dim": 40}),
    "head_dim 72": ("qwen3", {"head_dim": 72}),
    "head_dim 120": ("llama-tied", {"head_dim": 120}),
    "f32, served in bf16": ("glm4-moe", {"dtype": "float32"}),
    "window in every layer": ("qwen3-moe", {"moe_changes": WINDOWED}),
    "stale files": ("llama", {}),
}


def scatter(model: Path) -> None:
    """Two shards with an index, and beside them what a converter or an earlier save has left: other values."""
    held = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + ('mlp' in name)}-of-00002.safetensors" for name in held}
    for file in set(files.values()):
        save_file({name: t for name, t in held.items() if files[name] == file}, model / file)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    other = {name: t.flip(0).contiguous() for name, t in held.items()}
    for file in ("consolidated.safetensors", "model-00003-of-00003.safetensors"):
        save_file(other, model / file)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    directory = tmp_path_factory.mktemp("inputs")
    prompts = tuple(map(tuple, random_prompts([3, 20, 45], seed=3)))
    requests = {}
    for name, (family, changes) in MODELS.items():
        model = write_model(directory / name, family, **{**SIZES, **changes})
        updates: tuple[str, ...] = ()
        if name == "stale files":
            scatter(model)
            updates = (str(write_model(directory / "update", family, seed=1, **SIZES)),)
            scatter(Path(updates[0]))
        requests[name] = Request(
            str(model), prompts, max_new_tokens=6, temperature=1.0, seed=7, weight_updates=updates
        )  # fmt: skip
    return roll_out(requests, directory)


@pytest.mark.parametrize("name", MODELS)
def test_logdiff_is_zero(cases: dict[str, Case], name: str) -> None:
    case = cases[name]
    assert_exact(case, Trainer(case.request).logprobs(case.rollout))


def test_the_models_say_something(cases: dict[str, Case]) -> None:
    """The update was taken, and the f32 router has values that bf16 rounds."""
    versions = cases["stale files"].rollout.weight_versions
    assert set(versions.tolist()) == {0, 1}
    held = load_file(Path(cases["f32, served in bf16"].request.model) / "model.safetensors")
    gate = held["model.layers.1.mlp.gate.weight"]
    assert gate.dtype == torch.float32 and not torch.equal(gate.bfloat16().float(), gate)
