"""Builds the native library with a plain C++ compiler (torch is not needed) and maps `patches/` into the package."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import runpy
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


def build_native(target: Path, objects: Path, binding: bool = False) -> None:
    """Compile every kernel at every level and link them; unchanged files are not compiled again.

    `CXX` and `TPI_TARGET_MACHINE` choose a cross compiler, `TPI_FLAGS` adds compiler and linker flags. With `binding` the library also
    holds what calls the kernels with torch's tensors (kernels/binding), which needs apache-tvm-ffi; the C ABI alone needs nothing.
    """
    machine = os.environ.get("TPI_TARGET_MACHINE", platform.machine())
    if machine not in LEVELS:
        raise SystemExit(f"mindspeed_tpi: no kernels for machine {machine!r}; there are some for {', '.join(LEVELS)}")
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    include = ROOT / "kernels" / "include"
    headers = b"".join(
        p.read_bytes() for p in sorted([*include.rglob("*"), *(ROOT / "kernels/cpu").glob("*.h")]) if p.is_file()
    )
    extra = shlex.split(os.environ.get("TPI_FLAGS", ""))
    jobs: list[tuple[Path, list[str]]] = []
    linked: list[str] = []
    sources = sorted((ROOT / "kernels/cpu").glob("*.cpp"))

    def add(source: Path, name: str, command: list[str], headers: bytes) -> None:
        digest = hashlib.sha256(
            headers + source.read_bytes() + " ".join(command).replace(str(ROOT), ".").encode()
        ).hexdigest()[:16]
        output = objects / f"{name}.{digest}.o"
        linked.append(str(output))
        if not output.exists():
            jobs.append((output, command))

    # Portable objects come first: the linker keeps the first copy of any inline function that two levels share.
    for level, flags in LEVELS[machine].items():
        for source in sources:
            if source.name == "dispatch.cpp" and level:
                continue
            command = [*compiler, *FLAGS, *flags, *extra, f"-DTPI_LEVEL={level}", f"-I{include}", "-c", str(source)]
            add(source, f"{source.stem}.{level}", command, headers)
    objects.mkdir(parents=True, exist_ok=True)
    libraries: list[str] = []
    if binding:
        tvm_ffi = _tvm_ffi()
        header = runpy.run_path(str(ROOT / "kernels/binding/generate.py"))["header"]().encode()
        (objects / "operators.h").write_bytes(header)
        folders = [f"-I{objects}", f"-I{include}", "-isystem", f"{tvm_ffi / 'include'}"]
        source = ROOT / "kernels/binding/operators.cpp"
        folders.append(f"-I{source.parent}")
        command = [*compiler, *FLAGS, "-O2", *extra, *folders, "-c", str(source)]
        add(source, "binding", command, headers + header + (source.parent / "binding.h").read_bytes())
        libraries = [f"-L{tvm_ffi / 'lib'}", "-ltvm_ffi"]  # resolves to the one that `import tvm_ffi` has loaded
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
    subprocess.run([*compiler, *extra, "-shared", *linked, *libraries, "-o", str(target)], check=True)


def _tvm_ffi() -> Path:
    """Where apache-tvm-ffi is installed; it is not imported, which would import torch."""
    spec = importlib.util.find_spec("tvm_ffi")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "mindspeed_tpi: the binding needs apache-tvm-ffi: pip install apache-tvm-ffi, or build with isolation"
        )
    return Path(spec.submodule_search_locations[0])


class BuildNative(build_ext):
    """Builds the C-ABI library in place of a Python extension module."""

    def build_extension(self, ext: Extension) -> None:
        build_native(Path(self.get_ext_fullpath(ext.name)), ROOT / "build" / "kernels", binding=True)

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
