"""What `mindspeed-tpi doctor` says of this machine, and of patches that cannot apply."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mindspeed_tpi import contract, patches
from mindspeed_tpi.cli import doctor, main
from mindspeed_tpi.patching import Patch, Status
from mindspeed_tpi.platform import cpu


def test_a_healthy_installation() -> None:
    """In a process of its own: doctor imports every upstream and applies every patch."""
    command = [sys.executable, "-m", "mindspeed_tpi", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["healthy"] and found["backend"]["name"] == "cpu" and found["backend"]["isa"]
    assert found["contract"]["fingerprint"] == contract.current().fingerprint
    assert found["versions"]["megatron-core"] and found["versions"]["torch"]
    states = {line["target"]: line["state"] for line in found["patches"]}
    assert states.keys() == {patch.target for patch in (*patches.declared(), *cpu.PATCHES)}
    absent = {target for target in states if target.startswith("mindspeed.")}  # not on PyPI
    assert all(states[target] == "pending" for target in absent)
    assert {state for target, state in states.items() if target not in absent} <= {"applied", "not needed"}


def test_a_backend_that_does_not_exist_is_said_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MINDSPEED_TPI_BACKEND", "abacus")
    monkeypatch.setattr(doctor, "patch_states", list)
    assert main(["doctor"]) == 1
    assert "backend 'abacus' is not registered" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "failures", "state", "why"),
    [
        ("absent_upstream.layers", {}, "pending", "absent_upstream is not installed"),
        ("broken.layers", {"broken.layers": "importing broken.layers failed: OSError: x"}, "refused", "OSError: x"),
    ],
)
def test_a_patch_that_did_not_apply_says_why(module: str, failures: dict[str, str], state: str, why: str) -> None:
    patch = Patch(f"{module}:f", lambda original: original, "reason", "torch", None, "never")
    explained = doctor._explained(Status(patch, "pending"), failures)
    assert explained.state == state and why in explained.why


def test_importing_a_module_says_what_went_wrong() -> None:
    assert doctor._import("json.decoder") is None
    assert doctor._import("no_such_upstream.layers") is None
    assert doctor._import("json.no_such_module") == (
        "importing json.no_such_module failed: ModuleNotFoundError: No module named 'json.no_such_module'"
    )


def test_the_text_names_what_is_refused() -> None:
    text = doctor._text(
        {
            "mindspeed_tpi": "0",
            "python": "3",
            "machine": "m",
            "versions": {"torch": "2", "vllm": None},
            "flags": {"MINDSPEED_TPI": "1"},
            "backend": {"name": "cpu", "isas": ["avx2", "portable"]},
            "contract": {"fingerprint": "f" * 64},
            "patches": [
                {"target": "a:b", "state": "applied", "why": "reason"},
                {"target": "c:d", "state": "refused", "why": "other signature"},
            ],
        }
    )
    assert "refused: c:d: other signature" in text and "1 applied, 1 refused" in text
    assert "vllm" not in text and "isas avx2 portable" in text
