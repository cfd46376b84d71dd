"""Builds the native library with a plain C++ compiler (torch is not needed) and maps `patches/` into the package."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
LIBRARY = "mindspeed_tpi/lib/libmindspeed_tpi.so"
FLAGS = [
    "-std=c++17",
    "-fPIC",
    "-fopenmp",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
    "-Wno-psabi",
]
# Compiler flags of each level of kernels/include/tpi/isa.h. Level 0 is the fallback of very old CPUs: quick to compile.
LEVELS = {
    "x86_64": {
        0: ["-O1"],
        1: ["-O3", "-mavx2", "-mfma", "-mf16c", "-mtune=haswell"],
        2: [
            "-O3",
            *["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-mprefer-vector-width=512"],
        ],
    },
    "aarch64": {0: ["-O1"], 1: ["-O3"]},
}
# The AVX-512 sources on a CPU without it, every intrinsic emulated; only tests/native/hashes.py builds this. With -Og, because
# GCC 12 fails ("internal compiler error", pass esra) on the emulation with -O1 and above.
_EMULATE = ["-DTPI_EMULATE_AVX512", f"-I{ROOT / 'tests/native'}"]
LEVELS["x86_64+emulated"] = {
    0: ["-O1", *_EMULATE],
    1: LEVELS["x86_64"][1],
    2: ["-Og", "-mavx2", "-mfma", "-mf16c", *_EMULATE],
}


def build_native(target: Path, objects: Path) -> None:
    """Compile every kernel at every level and link them; unchanged files are not compiled again.

    `CXX` and `TPI_TARGET_MACHINE` choose a cross compiler.
    """
    machine = os.environ.get("TPI_TARGET_MACHINE", platform.machine())
    if machine not in LEVELS:
        raise SystemExit(f"mindspeed_tpi: no kernels for machine {machine!r}; there are some for {', '.join(LEVELS)}")
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    include = ROOT / "kernels" / "include"
    headers = b"".join(
        p.read_bytes() for p in sorted([*include.rglob("*"), *(ROOT / "kernels/cpu").glob("*.h")]) if p.is_file()
    )
    jobs: list[tuple[Path, list[str]]] = []
    linked: list[str] = []
    sources = sorted((ROOT / "kernels/cpu").glob("*.cpp"))
    # Portable objects come first: the linker keeps the first copy of any inline function that two levels share.
    for level, flags in LEVELS[machine].items():
        for source in sources:
            if source.name == "dispatch.cpp" and level:
                continue
            command = [*compiler, *FLAGS, *flags, f"-DTPI_LEVEL={level}", f"-I{include}", "-c", str(source)]
            digest = hashlib.sha256(headers + source.read_bytes() + " ".join(command).encode()).hexdigest()[:16]
            output = objects / f"{source.stem}.{level}.{digest}.o"
            linked.append(str(output))
            if not output.exists():
                jobs.append((output, command))
    objects.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)

    def compile_one(job: tuple[Path, list[str]]) -> None:
        output, command = job
        partial = output.with_suffix(f".{os.getpid()}.tmp")
        subprocess.run([*command, "-o", str(partial)], check=True)
        partial.replace(output)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done, _ in enumerate(pool.map(compile_one, jobs), 1):
            print(f"\rmindspeed_tpi kernels: {done}/{len(jobs)}", end="", file=sys.stderr, flush=True)
    # No -fopenmp here: the OpenMP symbols resolve to the runtime that torch has already loaded (one thread pool).
    subprocess.run([*compiler, "-shared", *linked, "-o", str(target)], check=True)


class BuildNative(build_ext):
    """Builds the C-ABI library in place of a Python extension module."""

    def build_extension(self, ext: Extension) -> None:
        build_native(Path(self.get_ext_fullpath(ext.name)), ROOT / "build" / "kernels")

    def get_ext_filename(self, fullname: str) -> str:
        return LIBRARY

    def get_ext_fullpath(self, ext_name: str) -> str:
        return str(Path(self.build_lib) / LIBRARY)

    def copy_extensions_to_source(self) -> None:
        """What an editable install adds: the library beside the sources, replaced in one step under running processes."""
        target = ROOT / LIBRARY
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".new")
        shutil.copy2(Path(self.build_lib) / LIBRARY, partial)
        partial.replace(target)


if __name__ == "__main__":
    patch_packages = [
        "mindspeed_tpi.patches",
        *(f"mindspeed_tpi.patches.{name}" for name in find_packages("patches")),
    ]

    setup(
        packages=[
            *find_packages(include=["mindspeed_tpi", "mindspeed_tpi.*"], exclude=["mindspeed_tpi.patches*"]),
            *patch_packages,
        ],
        package_dir={"mindspeed_tpi.patches": "patches"},
        py_modules=["mindspeed_tpi_vllm_plugin"],
        ext_modules=[Extension("mindspeed_tpi.lib.libmindspeed_tpi", sources=[])],
        cmdclass={"build_ext": BuildNative},
    )
