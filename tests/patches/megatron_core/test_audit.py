"""Mode `audit` on a Megatron-core model: nothing but the loss is summed outside the contract, and a missing patch shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mindspeed_tpi import audit
from mindspeed_tpi.cli import main
from tests.patches.megatron_core.conftest import tiny_model

STEP = """
import sys
import mindspeed_tpi
from mindspeed_tpi.parity.request import Request
from mindspeed_tpi.parity.trainer import Trainer
from mindspeed_tpi.patches import megatron_core
from tests.patches.megatron_core.conftest import rollout_for

{}
trainer = Trainer(Request(sys.argv[1], ((1, 2),)))
rollout = rollout_for(trainer)
trainer.logprobs(rollout)
trainer.train_step(rollout)
"""
WITHOUT_NORMS = """
mindspeed_tpi.disable()
megatron_core.PATCHES = tuple(p for p in megatron_core.PATCHES if "WrappedTorchNorm" not in p.target)
mindspeed_tpi.enable()
"""
# Sums that nothing else is computed from: the loss that is differentiated (its gradient is its weights), and the one reported.
LOSSES = "mindspeed_tpi/parity/"


def run(tmp_path: Path, family: str, before: str = "") -> list[dict[str, Any]]:
    model = tiny_model(tmp_path / "model", family)
    env = {**os.environ, "MINDSPEED_TPI": "audit", "MINDSPEED_TPI_AUDIT": str(tmp_path / "audit")}
    subprocess.run([sys.executable, "-c", STEP.format(before), str(model)], env=env, check=True)
    return audit.merged(tmp_path / "audit")


def test_a_training_step_stays_inside_the_contract(tmp_path: Path, capsys: Any) -> None:
    calls = run(tmp_path, "qwen3")
    inside = {call["operator"] for call in calls if call["kind"] == "contract"}
    ops = (
        "linear",
        "linear_dx",
        "linear_dw",
        "attention",
        "attention_backward",
        "rms_norm",
        "rms_norm_dw",
        "embedding_dw",
    )
    assert {f"mindspeed_tpi.{name}.default" for name in ops} <= inside
    outside = [call for call in calls if call["kind"] != "contract"]
    assert {call["operator"] for call in outside} == {"aten.sum.default"}, outside
    assert all(call["caller"].startswith(LOSSES) for call in outside), outside
    assert main(["doctor", "--audit", str(tmp_path / "audit")]) == 0
    shown = capsys.readouterr().out
    assert "accumulates, outside the contract: " in shown and f"aten.sum.default  {LOSSES}" in shown
    assert main(["doctor", "--json", "--audit", str(tmp_path / "audit")]) == 0
    assert json.loads(capsys.readouterr().out) == calls


def test_a_missing_patch_shows_with_its_caller(tmp_path: Path) -> None:
    outside = [call for call in run(tmp_path, "llama", WITHOUT_NORMS) if call["kind"] == "outside"]
    squares = {call["caller"].partition(":")[0] for call in outside if call["operator"] == "aten.mean.dim"}
    layers = "megatron/core/transformer/transformer_"
    assert squares == {f"{layers}layer.py", f"{layers}block.py"}, outside


def test_no_record_is_said(tmp_path: Path, capsys: Any) -> None:
    assert main(["doctor", "--audit", str(tmp_path)]) == 2
    assert "no audit record in" in capsys.readouterr().err
