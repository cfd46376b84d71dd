"""A user's training loop on Megatron-core's own DistributedDataParallel, optimizers, clipping and schedule: equal to vLLM's record
and, by hash, over layouts and options."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mindspeed_tpi.parity.rollout import Rollout
from tests.models import MOE_FAMILIES, random_prompts, random_weights, write_model
from tests.parity.conftest import run_jobs

LENGTH = 48
PLAIN, OVERLAP = {"distributed": False}, {"overlap": True}
REPLICATED_OVERLAP = {"distributed": False, "overlap": True}
KINDS = {  # name in the scenarios → family
    "dense": "qwen3", "moe": "qwen3-moe", "llama": "llama", "qwen2": "qwen2", "mistral": "mistral", "mixtral": "mixtral",
    "qwen2-moe": "qwen2-moe", "glm4-moe": "glm4-moe",
}  # fmt: skip
SCENARIOS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "dense": {"kind": "dense", "layout": {}},
        "dense 20 tokens": {"kind": "dense", "layout": {}, "length": 20, "steps": 1},
        "moe": {"kind": "moe", "layout": {}},
        "dense TransformerEngine spec": {"kind": "dense", "layout": {}, "te": True},
        "dense grouped": {"kind": "dense", "layout": {}, "groups": 4},
        "moe grouped": {"kind": "moe", "layout": {}, "groups": 4},
    },
    2: {
        "dense tp=2": {"kind": "dense", "layout": {"tp": 2}, "initialize": False},
        "dense 20 tokens tp=2": {"kind": "dense", "layout": {"tp": 2}, "length": 20, "steps": 1},
        "dense tp=2 without distributed optimizer": {"kind": "dense", "layout": {"tp": 2}, "options": PLAIN},
        "moe tp=2,ep=2": {"kind": "moe", "layout": {"tp": 2, "ep": 2}, "options": OVERLAP},
        "moe tp=2,etp=2": {"kind": "moe", "layout": {"tp": 2, "etp": 2}, "options": PLAIN, "initialize": False},
        "moe tp=2 copies": {"kind": "moe", "layout": {"tp": 2}},
        "moe tp=2 copies, uninitialised": {"kind": "moe", "layout": {"tp": 2}, "options": PLAIN, "initialize": False},
        "dense TransformerEngine spec tp=2": {"kind": "dense", "layout": {"tp": 2}, "te": True},
        "moe TransformerEngine spec tp=2,ep=2": {"kind": "moe", "layout": {"tp": 2, "ep": 2}, "te": True},
        "moe TransformerEngine spec tp=2,etp=2, grouped GEMM": {
            "kind": "moe",
            "layout": {"tp": 2, "etp": 2},
            "te": True,
            "fields": {"moe_grouped_gemm": True},
        },
        "dense grouped dp=2": {"kind": "dense", "layout": {}, "groups": 4, "options": OVERLAP},
        "dense grouped dp=2 replicated": {"kind": "dense", "layout": {}, "groups": 4, "options": REPLICATED_OVERLAP},
        "moe grouped dp=2": {"kind": "moe", "layout": {}, "groups": 4},
        "moe grouped dp=2,ep=2": {"kind": "moe", "layout": {"ep": 2}, "groups": 4, "options": OVERLAP},
        "moe grouped dp=2,etp=2": {"kind": "moe", "layout": {"etp": 2}, "groups": 4},
        "head": {"kind": "dense", "layout": {"tp": 2}, "head": True},
    },
    4: {
        "dense grouped dp=4": {"kind": "dense", "layout": {}, "groups": 4},
        "dense grouped tp=2,dp=2": {"kind": "dense", "layout": {"tp": 2}, "groups": 4, "options": OVERLAP},
        "moe grouped tp=2,dp=2,ep=2": {"kind": "moe", "layout": {"tp": 2, "ep": 2}, "groups": 4},
        "moe grouped dp=4,ep=4": {"kind": "moe", "layout": {"ep": 4}, "groups": 4, "options": OVERLAP},
        "moe grouped tp=2,dp=2,etp=2,ep=2": {"kind": "moe", "layout": {"tp": 2, "ep": 2, "etp": 2}, "groups": 4},
    },
}
for kind in list(KINDS)[2:]:  # the other families: one step on half of the rows, in every layout of two ranks
    shared = {"kind": kind, "groups": 4, "rows": 4, "steps": 1}
    experts = KINDS[kind] in MOE_FAMILIES
    SCENARIOS[1][f"{kind} grouped"] = shared | {"layout": {}}
    SCENARIOS[2] |= {
        f"{kind} grouped tp=2{',ep=2' * experts}": shared
        | {"layout": {"tp": 2, "ep": 1 + experts}, "options": OVERLAP},
        f"{kind} grouped dp=2": shared | {"layout": {}},
    }
    if kind == "glm4-moe":  # a dense layer, shared experts
        SCENARIOS[2][f"{kind} grouped TransformerEngine spec dp=2,ep=2"] = shared | {"layout": {"ep": 2}, "te": True, "fields": {"moe_grouped_gemm": True}}  # fmt: skip
    if experts:
        SCENARIOS[2][f"{kind} grouped dp=2,ep=2"] = shared | {"layout": {"ep": 2}, "options": OVERLAP}


def equal_to(name: str) -> str:
    """The scenario that has the same bits."""
    kind = "moe tp=2 copies" if "copies" in name else name.split(" ")[0]
    return kind + (
        " 20 tokens" if "20 tokens" in name else " grouped" if " grouped" in name and "grouped GEMM" not in name else ""
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    directory = tmp_path_factory.mktemp("user")
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 96, "vocab": 100}
    jobs = []
    for kind, family in KINDS.items():
        topk = 4 if family == "glm4-moe" else 2
        model = write_model(
            directory / kind, family, **sizes, max_positions=64, experts=8, topk=topk, moe_ffn=64, window=16
        )  # type: ignore[arg-type]
        if kind == "dense":
            hf = json.loads((model / "config.json").read_text()) | {"tie_word_embeddings": True}
            (model / "config.json").write_text(json.dumps(hf))
            tensors = random_weights(family, hf, seed=0)
            tensors["model.embed_tokens.weight"] *= 0.1  # else the tied head is sure of every token
            save_file(tensors, str(model / "model.safetensors"), metadata={"format": "pt"})
        request = {
            "model": str(model),
            "prompts": random_prompts([1, 5, 33, 12, 20, 40, 9, 27], vocab=100, seed=5),
            "max_new_tokens": 8,
            "temperature": 1.0,
            "engine": {"max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 32, "max_model_len": 64},
        }
        jobs.append({"request": request, "out": str(directory / f"{kind}.safetensors")})
    run_jobs(jobs, directory)
    for kind in KINDS:
        torch.save(_padded(Rollout.load(directory / f"{kind}.safetensors")), directory / f"{kind}.pt")
    done: dict[int, dict[str, Any]] = {}

    def of(world: int) -> dict[str, Any]:
        if world not in done:
            done[world] = _launch(directory, world)
        return done[world]

    return of


def _padded(rollout: Rollout) -> dict[str, torch.Tensor]:
    """Tokens [rows, LENGTH], which of them the engine sampled, and its log-probabilities."""
    lengths = rollout.offsets.diff().tolist()
    whole = {"tokens": rollout.token_ids, "scored": rollout.generated, "logprobs": rollout.logprobs}
    return {
        name: torch.stack([torch.nn.functional.pad(x, (0, LENGTH - len(x))) for x in values.split(lengths)])
        for name, values in whole.items()
    }


def _launch(directory: Path, world: int) -> dict[str, Any]:
    jobs = [
        {**job, "name": name, "model": str(directory / job["kind"]), "record": str(directory / f"{job['kind']}.pt")}
        for name, job in SCENARIOS[world].items()
    ]
    asked, out = directory / f"{world}.json", directory / f"{world}.pt"
    asked.write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    environment = {**os.environ, "MINDSPEED_TPI": "strict", "OMP_NUM_THREADS": "1"}
    command += ["-m", "tests.user.loop", str(asked), str(out)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return torch.load(out, weights_only=False)  # type: ignore[no-any-return]


TRAINED = [(world, name) for world, jobs in SCENARIOS.items() for name, job in jobs.items() if "head" not in job]


@pytest.mark.parametrize(("world", "name"), TRAINED, ids=[name for _, name in TRAINED])
def test_the_record_and_the_other_layouts(results: Callable[[int], dict[str, Any]], world: int, name: str) -> None:
    got, wanted = results(world)[name], results(2 if "copies" in name else 1)[equal_to(name)]
    assert "error" not in got, got["error"]
    assert got["differ"] == 0
    assert all(norm > 0.5 for norm in got["norms"])  # clipped
    assert got == wanted


def test_copies_of_experts_are_counted_once(results: Callable[[int], dict[str, Any]]) -> None:
    """Another tree than one rank's, so near and not equal."""
    one, two = results(1)["moe"]["norms"][0], results(2)["moe tp=2 copies"]["norms"][0]
    assert one != two and math.isclose(one, two, rel_tol=1e-6)


def test_a_users_own_parameters_keep_their_sums(results: Callable[[int], dict[str, Any]]) -> None:
    assert results(2)["head"] == {"value": 3.0, "averaged": 1.5, "q_layernorm": 3.0, "plain": 1.0}
