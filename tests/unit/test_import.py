"""What importing the package does, in fresh interpreters."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MINDSPEED_TPI")}
    return subprocess.run([sys.executable, "-c", code], env={**clean, **env}, capture_output=True, text=True)


def test_zero_changes_nothing() -> None:
    code = "import sys; before=list(sys.meta_path); import mindspeed_tpi; assert sys.meta_path == before; assert not mindspeed_tpi.patch_status()"
    assert run(code, MINDSPEED_TPI="0").returncode == 0


def test_the_vllm_entry_point_is_inert_when_the_flag_is_unset() -> None:
    code = "import sys, mindspeed_tpi_vllm_plugin as p; p.register(); assert 'mindspeed_tpi' not in sys.modules"
    assert run(code).returncode == 0
    assert run(code, MINDSPEED_TPI="0").returncode == 0


def test_import_needs_no_upstream() -> None:
    block = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('megatron', 'vllm', 'transformers'): raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "import mindspeed_tpi\n"
        "assert mindspeed_tpi.patch_status() and all(s.state in ('pending', 'not needed', 'applied') for s in mindspeed_tpi.patch_status())\n"
        "assert not any(m.startswith('mindspeed_tpi.parity') for m in sys.modules)\n"
        "assert mindspeed_tpi.Rollout.load and mindspeed_tpi.check and mindspeed_tpi.logprobs and mindspeed_tpi.contract_of\n"
        "mindspeed_tpi.disable()"
    )
    result = run(block, MINDSPEED_TPI="strict")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("mode", ["1", "strict"])
def test_too_late(mode: str) -> None:
    code = "import megatron.core.tensor_parallel, mindspeed_tpi"
    result = run(code, MINDSPEED_TPI=mode)
    if mode == "strict":
        assert result.returncode and "imported too late" in result.stderr
    else:
        assert result.returncode == 0 and "applies late to" in result.stderr


def test_a_bad_flag_is_named() -> None:
    result = run("import mindspeed_tpi", MINDSPEED_TPI="yes")
    assert "MINDSPEED_TPI='yes' is not one of 0, 1, strict, audit" in result.stderr


def test_a_second_copy_of_the_patches_is_refused() -> None:
    result = run("import patches")
    assert result.returncode and "import mindspeed_tpi.patches" in result.stderr
