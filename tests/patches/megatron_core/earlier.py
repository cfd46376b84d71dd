"""The patches' tests against earlier versions of Megatron-core, each installed into a directory of its own.

    python -m tests.patches.megatron_core.earlier [VERSION …]

Left out by name: what an earlier version does not have (YaRN without mscale, a gated shared expert and router replay before
0.16; a sliding window before 0.15).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

SINCE_0_16 = ("yarn", "qwen2-moe", "selective_recompute", "router_replay")
SINCE_0_15 = ("mistral",)
LACKS = {"0.15.3": SINCE_0_16, "0.14.0": SINCE_0_16 + SINCE_0_15, "0.13.1": SINCE_0_16 + SINCE_0_15}
FILES = ("test_model", "test_patches", "test_moe", "test_packed")
HERE = Path(__file__).resolve().parent


def run(version: str) -> int:
    """Exit status of pytest with this version in front of the installed one."""
    print(f"Megatron-core {version}, without {', '.join(LACKS[version])}", flush=True)
    with tempfile.TemporaryDirectory(prefix="mindspeed-tpi-megatron-") as directory:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", directory]
        subprocess.run([*pip, f"megatron-core=={version}"], check=True)
        without = " and ".join(f"not {name}" for name in LACKS[version])
        files = [str(HERE / f"{name}.py") for name in FILES]
        command = [sys.executable, "-m", "pytest", "-q", "-k", without, *files]
        path = os.pathsep.join((directory, *filter(None, [os.environ.get("PYTHONPATH")])))
        return subprocess.run(command, cwd=HERE.parents[2], env={**os.environ, "PYTHONPATH": path}).returncode


if __name__ == "__main__":
    sys.exit(max(run(version) for version in sys.argv[1:] or LACKS))
