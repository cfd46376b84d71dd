"""Equal hashes of every operator on x86-64 and, cross-compiled under qemu-user, on aarch64: python -m tests.native.hashes

Needs g++-aarch64-linux-gnu and qemu-user (Debian packages). Exit status 1 names the first line that differs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "hashes"


def lines(machine: str, compiler: str, run: list[str]) -> list[str]:
    """Build the library and the driver for one machine and return what the driver prints."""
    out = OUT / machine
    out.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "CXX": compiler, "TPI_TARGET_MACHINE": machine}
    build = "import sys, setup; setup.build_native(setup.Path(sys.argv[1]), setup.Path(sys.argv[2]))"
    library = out / "libmindspeed_tpi.so"
    subprocess.run([sys.executable, "-c", build, str(library), str(out)], cwd=ROOT, env=environment, check=True)
    driver = out / "abi_hashes"
    command = [compiler, "-std=c++17", "-O1", "-fopenmp", "-Wno-psabi", f"-I{ROOT / 'kernels/include'}"]
    sources = [str(ROOT / "tests/native/abi_hashes.cpp"), str(library), f"-Wl,-rpath,{out}"]
    subprocess.run([*command, *sources, "-o", str(driver)], check=True)
    done = subprocess.run([*run, str(driver)], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def main() -> int:
    here = lines("x86_64", "g++", [])
    there = lines("aarch64", "aarch64-linux-gnu-g++", ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"])
    differing = [pair for pair in zip(here, there, strict=False) if pair[0] != pair[1]]
    print(f"{len(here)} hashes on x86-64, {len(there)} on aarch64, {len(differing)} differ")
    for a, b in differing[:5]:
        print(f"x86-64 : {a}\naarch64: {b}")
    return 1 if differing or len(here) != len(there) or not here else 0


if __name__ == "__main__":
    sys.exit(main())
