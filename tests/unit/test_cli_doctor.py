"""What `mindspeed-tpi doctor` says of this machine, and of patches that cannot apply."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from mindspeed_tpi import contract, patches
from mindspeed_tpi.cli import doctor
from mindspeed_tpi.patching import Patch, Status
from mindspeed_tpi.platform import cpu


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: doctor imports every upstream and applies every patch."""
    command = [sys.executable, "-m", "mindspeed_tpi", "doctor", "--json"]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=300)


def test_a_healthy_installation() -> None:
    done = run()
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["healthy"] and found["backend"]["name"] == "cpu" and found["backend"]["isa"]
    assert found["contract"]["fingerprint"] == contract.current().fingerprint
    assert found["versions"]["megatron-core"] and found["versions"]["torch"]
    states = {line["target"]: line["state"] for line in found["patches"]}
    assert states.keys() == {patch.target for patch in (*patches.declared(), *cpu.PATCHES)}
    assert set(states.values()) <= {"applied", "not needed"}


def test_a_backend_that_does_not_exist_is_said_and_fails() -> None:
    done = run(MINDSPEED_TPI_BACKEND="abacus")
    assert done.returncode == 1
    assert "backend 'abacus' is not registered" in json.loads(done.stdout)["backend"]["refused"]


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
