"""Equal hashes of every operator under each instruction set: python -m tests.native.hashes

x86-64 as this CPU has it; the AVX-512 sources with every intrinsic emulated on AVX2; aarch64, cross-compiled, under qemu-user.
Needs libsimde-dev, g++-aarch64-linux-gnu and qemu-user (Debian packages). Exit status 1 names the first lines that differ.
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
    done = subprocess.run([*run, str(driver)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{machine}: the instruction sets differ, see above")
    print(f"{machine}: done")
    return done.stdout.splitlines()


def main() -> int:
    here = lines("x86_64", "g++", [])
    equal = bool(here)
    for machine, compiler, run in (
        ("x86_64+emulated", "g++", []),
        ("aarch64", "aarch64-linux-gnu-g++", ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"]),
    ):
        there = lines(machine, compiler, run)
        differing = [pair for pair in zip(here, there, strict=False) if pair[0] != pair[1]]
        print(f"{len(here)} hashes on x86-64, {len(there)} on {machine}, {len(differing)} differ")
        for a, b in differing[:5]:
            print(f"x86-64: {a}\n{machine}: {b}")
        equal = equal and not differing and len(here) == len(there)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
