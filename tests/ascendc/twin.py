"""Compiles the Ascend C kernels and the twin's own test program with g++, and calls the kernels on the twin."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels" / "ascendc"
FLAGS = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-pthread"]
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
COUNTS = [
    "gm_to_ub",
    "ub_to_gm",
    "gm_to_l1",
    "l1_to_l0",
    "l0c_to_gm",
    "instructions",
    "S",
    "V",
    "M",
    "MTE1",
    "MTE2",
    "MTE3",
    "FIX",
    "critical",
]


class TwinFault(Exception):
    """A kernel did what a core must not do."""


class Run(ctypes.Structure):
    """Groups (or vector cores) of a launch, the seed of the order in which they run, a source line whose barrier is ignored."""

    _fields_ = [("blocks", ctypes.c_int32), ("seed", ctypes.c_uint64), ("skipped_barrier", ctypes.c_int32)]


def build(source: Path, *extra: str, kernels: Path = KERNELS) -> Path:
    """The compiled `source`, from build/ascendc if no source has changed since."""
    flags = [*FLAGS, f"-I{kernels / 'twin'}", *extra]
    digest = hashlib.sha256(" ".join([*FLAGS, *extra, source.name]).encode())
    for path in sorted([*kernels.rglob("*.h"), *kernels.rglob("*.cpp"), source]):
        digest.update(path.read_bytes())
    out = ROOT / "build" / "ascendc" / f"{source.stem}-{digest.hexdigest()[:16]}"
    if not out.is_file():
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = out.with_suffix(f".{os.getpid()}")
        subprocess.run(["g++", *flags, str(source), "-o", str(partial)], check=True)
        partial.replace(out)
    return out


def load(kernels: Path) -> ctypes.CDLL:
    """The kernels of one source tree."""
    return ctypes.CDLL(str(build(kernels / "twin" / "library.cpp", "-fPIC", "-shared", kernels=kernels)))


@functools.cache
def library() -> ctypes.CDLL:
    return load(KERNELS)


def _call(name: str, *arguments: object, run: Run) -> dict[str, float]:
    message, counts = ctypes.create_string_buffer(2000), (ctypes.c_double * len(COUNTS))()
    passed = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments]
    if getattr(library(), f"tpi_twin_{name}")(*passed, run, message, len(message), counts):
        raise TwinFault(message.value.decode())
    return dict(zip(COUNTS, counts, strict=True))


def rms_norm(x: Tensor, weight: Tensor, eps: float, run: Run) -> tuple[Tensor, Tensor, dict[str, float]]:
    y, rstd = torch.empty_like(x), torch.empty(x.shape[:-1])
    rows = rstd.numel()
    counts = _call("rms_norm", DTYPES[x.dtype], x, weight, y, rstd, rows, x.shape[-1], ctypes.c_float(eps), run=run)
    return y, rstd, counts


def swiglu(x: Tensor, run: Run) -> tuple[Tensor, dict[str, float]]:
    y = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    counts = _call("swiglu", DTYPES[x.dtype], x, y, y.numel() // y.shape[-1], y.shape[-1], run=run)
    return y, counts


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, leaf: int, leaves: int, out: torch.dtype | None, run: Run
) -> tuple[Tensor, dict[str, float]]:
    out = out or x.dtype
    y = torch.empty(len(x), len(weight), dtype=out)
    f32 = int(out == torch.float32)
    counts = _call(
        "linear", DTYPES[x.dtype], f32, x, weight, bias, y, len(x), len(weight), x.shape[1], leaf, leaves, run=run
    )
    return y, counts
