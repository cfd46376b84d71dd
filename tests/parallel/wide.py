"""Layouts on both sides, for the families beyond the grid of `test_layouts.py`: python -m tests.parallel.wide [--models NAME ...]

Runs `mindspeed-tpi parity --matrix` on hard random models, engine against engine; part of `make test-long`. Exit status: the
worst of the models'.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.models import write_model

DENSE = "tp=2,sp=1 pp=2,vpp=2 cp=2 cp=2,cp_type=a2a tp=2,sp=1,cp=2 tp=2,sp=1,dp=2 x tp=1 tp=2"
MOE = "tp=2,sp=1,etp=2 dp=2,ep=2 cp=2,ep=2 pp=2,vpp=2 tp=2,sp=1,pp=2,ep=2 tp=2,sp=1,dp=2,ep=4 x tp=1 tp=2,ep=2"
MODELS = {"llama": DENSE, "mistral": DENSE, "mixtral": MOE, "qwen2-moe": MOE, "glm4-moe": MOE}
OPTIONS = ["--num-prompts", "6", "--prompt-len", "1:130", "--max-new-tokens", "8", "--max-num-batched-tokens", "64"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--matrix", help="other layouts than all of them")
    arguments = parser.parse_args()
    worst = 0
    with tempfile.TemporaryDirectory(prefix="mindspeed-tpi-wide-") as directory:
        for name in arguments.models:
            print(f"== {name}", flush=True)
            model = write_model(Path(directory) / name, name)
            command = [sys.executable, "-m", "mindspeed_tpi", "parity", "--model", str(model)]
            command += ["--matrix", arguments.matrix or MODELS[name], *OPTIONS]
            worst = max(worst, subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main())
