"""The boundary and the random cases of every operator under AddressSanitizer: python -m tests.native.sanitized

The library is built again with -fsanitize=address into a copy of the package, in which the tests then run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "sanitized"


def main() -> int:
    for package in ("mindspeed_tpi", "patches", "tests"):
        shutil.copytree(
            ROOT / package, OUT / package, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "lib")
        )
    build = "import sys, setup; setup.build_native(setup.Path(sys.argv[1]), setup.Path(sys.argv[2]), binding=True)"
    library = OUT / "mindspeed_tpi/lib/libmindspeed_tpi.so"
    flags = {**os.environ, "TPI_FLAGS": "-O1 -g1 -fsanitize=address -fno-omit-frame-pointer"}
    subprocess.run([sys.executable, "-c", build, str(library), str(OUT / "objects")], cwd=ROOT, env=flags, check=True)
    runtime = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    environment = {
        **os.environ,
        "PYTHONPATH": str(OUT),
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:abort_on_error=0",
        "PYTHONMALLOC": "malloc",
    }
    tests = [*sys.argv[1:]] or ["tests/ops/test_boundary.py", "tests/ops/test_opcheck.py"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:faulthandler", *tests], cwd=OUT, env=environment
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
