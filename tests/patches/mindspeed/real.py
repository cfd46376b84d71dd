"""The real MindSpeed on a CPU: a training step under it has the same bits as plain Megatron-core's under this package.

    python -m tests.patches.mindspeed.real MINDSPEED_CHECKOUT      # branch core_r0.16.0; it stays outside this repository

Needs scipy, which MindSpeed imports. torch_npu, torchair and triton are stood in for (`standins/`).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
STANDINS = Path(__file__).resolve().parent / "standins"


def step(*options: str, mindspeed: Path | None = None, site: Path | None = None) -> subprocess.CompletedProcess[str]:
    """One training step of `training_step.py` in a process of its own."""
    path = [ROOT, *((STANDINS, mindspeed, site) if mindspeed and site else ())]
    given = filter(None, [os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "MINDSPEED_TPI": "strict", "PYTHONPATH": os.pathsep.join([*map(str, path), *given])}
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("training_step.py")), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mindspeed", type=Path, metavar="MINDSPEED_CHECKOUT")
    checkout = parser.parse_args().mindspeed.resolve()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        facts = site / "mindspeed-0.16.0.dist-info"  # a checkout on the path has none
        facts.mkdir()
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: mindspeed\nVersion: 0.16.0\n", encoding="utf-8")
        for kind in ("dense", "moe"):
            for case in ((), ("--repatch",), ("--te",)):
                plain = step("--kind", kind, *(option for option in case if option != "--repatch"))
                under = step("--kind", kind, "--mindspeed", *case, mindspeed=checkout, site=site)
                ok = (
                    plain.returncode == under.returncode == 0
                    and plain.stdout.splitlines()[-1] == under.stdout.splitlines()[-1]
                )
                failed += not ok
                print(
                    f"{kind} {' '.join(case) or 'adaptor'}: {'equal' if ok else 'DIFFERS'} {under.stdout.splitlines()[-1:]}"
                )
                if not ok:
                    print(plain.stderr[-2000:], under.stderr[-2000:], file=sys.stderr)
        refused = step("--mindspeed", "--moe-zero-memory", "level0", mindspeed=checkout, site=site)
        named = "drop --moe-zero-memory" in refused.stderr and refused.returncode != 0
        known = step("--mindspeed", "--features", mindspeed=checkout, site=site)
        print(
            f"a refused option: {'named' if named else 'NOT NAMED'}; features: {(known.stdout + known.stderr).splitlines()[-1]}"
        )
        failed += not named or known.returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
