"""The Ascend C kernels on their CPU twin (kernels/ascendc/twin): operands on the CPU, every instruction checked, thousands of times slower than a device.

It proves the kernels' orders, not their speed: bits are those of the reference backend under `NumericsContract.ascendc()`. The library is
compiled from the checkout's sources at the first import after a change, with g++, into `build/ascendc` beside them.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi.contract import NumericsContract
from mindspeed_tpi.errors import BackendError

DEVICE = "cpu"
SLOW = True
KERNELS = Path(__file__).resolve().parents[3] / "kernels" / "ascendc"
FLAGS = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-pthread", "-fPIC")
COUNTS = (
    "gm_to_ub", "ub_to_gm", "gm_to_l1", "l1_to_l0", "l0c_to_gm", "instructions", "S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX", "critical",
)  # fmt: skip
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_MESSAGE = 2000


class Run(ctypes.Structure):
    """Groups (or vector cores) of a launch, the seed of the order in which they run, a source line whose barrier is ignored."""

    _fields_ = [("blocks", ctypes.c_int32), ("seed", ctypes.c_uint64), ("skipped_barrier", ctypes.c_int32)]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("run", Run),
        ("message", ctypes.c_char_p),
        ("length", ctypes.c_int32),
        ("counts", ctypes.POINTER(ctypes.c_double)),
    ]


run = Run(4, 0, 0)
"""How kernels are launched; no choice changes a bit (tests/ascendc)."""


def build(kernels: Path = KERNELS) -> Path:
    """The compiled host sources and kernels of one source tree, unchanged files not compiled again.

    Raises:
        BackendError: no sources (an installed wheel has none), or no compiler.
    """
    sources = sorted(kernels.glob("*/op_host/*.cpp"))
    if not sources:
        raise BackendError(
            f"{kernels} holds no kernels: the ascendc-twin backend runs from a source checkout (git clone)"
        )
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    headers = hashlib.sha256(" ".join([*compiler, *FLAGS]).encode())
    for path in sorted(kernels.rglob("*.h")):
        headers.update(path.read_bytes())
    out = KERNELS.parents[1] / "build" / "ascendc"
    out.mkdir(parents=True, exist_ok=True)

    def compiled(source: Path) -> Path:
        digest = headers.copy()
        digest.update(source.read_bytes())
        target = out / f"{source.stem}-{digest.hexdigest()[:16]}.o"
        _compile([*compiler, *FLAGS, f"-I{kernels / 'twin'}", "-c", str(source)], target)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sources))
    name = hashlib.sha256("".join(map(str, objects)).encode()).hexdigest()[:16]
    library = out / f"libtpi_ascendc_twin-{name}.so"
    _compile([*compiler, "-shared", "-pthread", *map(str, objects)], library)
    return library


def _compile(command: list[str], target: Path) -> None:
    if target.is_file():
        return
    partial = target.with_suffix(f".{os.getpid()}")
    try:
        done = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True)
    except OSError as error:
        raise BackendError(
            f"cannot run {command[0]} ({error}); the ascendc-twin backend needs a C++17 compiler, or set CXX"
        ) from None
    if done.returncode:
        raise BackendError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    partial.replace(target)


@functools.cache
def library() -> ctypes.CDLL:
    """The kernels, compiled if need be."""
    return ctypes.CDLL(str(build()))


def check(contract: NumericsContract) -> None:
    """Refuse a contract constant that the kernels do not follow.

    Raises:
        BackendError: names the field, its value and the value the kernels have.
    """
    ours = NumericsContract.ascendc()
    for name in (
        "family",
        "isa",
        "kernel_semantics",
        "leaf_order",
        "multiply_add",
        "transcendental",
        "subnormals",
        "p_dtype",
        "lanes",
    ):
        found, wanted = getattr(contract, name), getattr(ours, name)
        if found != wanted:
            raise BackendError(
                f"the Ascend C kernels have {name}={wanted!r}, the contract says {found!r}; "
                """set MINDSPEED_TPI_CONTRACT='{"family": "ascendc"}', or take another MINDSPEED_TPI_BACKEND"""
            )


def describe() -> dict[str, Any]:
    """The library and how kernels are launched."""
    return {"library": str(build()), "verified_by": "cpu twin of Ascend C; npu: not yet run", "blocks": run.blocks}


counted: dict[str, float] = {}
"""What the last operator cost: bytes by path, instructions, cycles by pipe (kernels/ascendc/README.md)."""


def _call(name: str, *arguments: object) -> None:
    """One C function: tensors by address, None as null, int and float as 32 bits.

    Raises:
        BackendError: a fault, in the twin's words.
    """
    message, counts = ctypes.create_string_buffer(_MESSAGE), (ctypes.c_double * len(COUNTS))()
    launch = _Launch(run, ctypes.cast(message, ctypes.c_char_p), _MESSAGE, counts)
    passed: list[Any] = [ctypes.byref(launch)]
    for a in arguments:
        if isinstance(a, Tensor):
            passed.append(ctypes.c_void_p(a.data_ptr()))
        elif isinstance(a, float):
            passed.append(ctypes.c_float(a))
        else:
            passed.append(None if a is None else ctypes.c_uint32(a))  # type: ignore[arg-type]
    if getattr(library(), f"tpi_ascendc_{name}")(*passed):
        raise BackendError(f"{name}: {message.value.decode()}")
    counted.clear()
    counted.update(zip(COUNTS, counts, strict=True))


def _dense(*tensors: Tensor | None) -> list[Any]:
    """Detached, dense, and not empty."""
    return [None if x is None else x.detach().contiguous() for x in tensors]


def _rows(x: Tensor) -> tuple[int, int]:
    """(rows, columns) of [*, columns]."""
    return (x.numel() // x.shape[-1] if x.numel() else 0), x.shape[-1]


# ---- operators: docs/op-schemas.md ----


def residual_add(x: Tensor, y: Tensor) -> Tensor:
    x, y = _dense(x, y)
    out = torch.empty_like(x)
    if x.numel():
        _call("residual_add", _DTYPES[x.dtype], x, y, out, *_rows(x))
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x, weight = _dense(x, weight)
    y, rstd = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    if x.numel():
        _call("rms_norm", _DTYPES[x.dtype], x, weight, y, rstd, *_rows(x), float(eps))
    return y, rstd


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    total = residual_add(x, residual)
    y, rstd = rms_norm(total, weight, eps)
    return y, total, rstd


def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, dskip: Tensor | None) -> Tensor:
    dy, x, weight, rstd, dskip = _dense(dy, x, weight, rstd, dskip)
    dx = torch.empty_like(x)
    if x.numel():
        _call("rms_norm_backward", _DTYPES[x.dtype], dy, x, weight, rstd, dskip, dx, *_rows(x))
    return dx


def _token_sums(
    dy: Tensor, x: Tensor | None, rstd: Tensor | None, grad: Tensor, batch: int, row_offsets: Tensor | None, spans: int
) -> None:
    dy, x, rstd = _dense(dy, x, rstd)
    rows = batch if row_offsets is None else len(row_offsets) - 1
    if not dy.numel() or not rows:
        return
    columns = dy.shape[1]
    workspace = dy.new_empty(rows, spans, columns, dtype=torch.float32)
    offsets = None if row_offsets is None else row_offsets.contiguous()
    total = grad.detach()
    _call("token_sums", _DTYPES[dy.dtype], dy, x, rstd, offsets, workspace, total, len(dy), columns, rows, spans)


def linear_db(dy: Tensor, grad: Tensor, batch: int, row_offsets: Tensor | None, spans: int) -> None:
    _token_sums(dy, None, None, grad, batch, row_offsets, spans)


def rms_norm_dw(
    dy: Tensor, x: Tensor, rstd: Tensor, grad: Tensor, batch: int, row_offsets: Tensor | None, spans: int
) -> None:
    if x.dim() == 3:
        linear_db(head_terms(dy, x, rstd), grad, batch, row_offsets, spans)
    else:
        _token_sums(dy, x, rstd, grad, batch, row_offsets, spans)


def head_terms(dy: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
    dy, x, rstd = _dense(dy, x, rstd)
    terms = x.new_empty(len(x), x.shape[2], dtype=torch.float32)
    if x.numel():
        _call("head_terms", _DTYPES[x.dtype], dy, x, rstd, terms, *x.shape)
    return terms


def swiglu(x: Tensor) -> Tensor:
    (x,) = _dense(x)
    y = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    if y.numel():
        _call("swiglu", _DTYPES[x.dtype], x, y, *_rows(y))
    return y


def swiglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    dy, x = _dense(dy, x)
    dx = torch.empty_like(x)
    if dy.numel():
        _call("swiglu_backward", _DTYPES[x.dtype], dy, x, dx, *_rows(dy))
    return dx


def sigmoid_gate(y: Tensor, logits: Tensor) -> Tensor:
    y, logits = _dense(y, logits)
    out = torch.empty_like(y)
    if y.numel():
        _call("sigmoid_gate", _DTYPES[y.dtype], y, logits, out, *_rows(y))
    return out


def sigmoid_gate_backward(dout: Tensor, y: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    dout, y, logits = _dense(dout, y, logits)
    dy, dlogits = torch.empty_like(y), torch.empty_like(logits)
    if y.numel():
        _call("sigmoid_gate_backward", _DTYPES[y.dtype], dout, y, logits, dy, dlogits, *_rows(y))
    return dy, dlogits


def expert_weight_backward(g: Tensor, a: Tensor, weights: Tensor, leaf: int, leaves: int) -> tuple[Tensor, Tensor]:
    g, a, weights = _dense(g, a, weights)
    dweights, da = torch.empty_like(weights), torch.empty_like(a)
    if a.numel():
        _call("expert_weight_backward", _DTYPES[a.dtype], g, a, weights, dweights, da, *_rows(a), leaf, leaves)
    return dweights, da


def tree_sum(parts: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    parts, bias = _dense(parts, bias)
    y = parts.new_empty(parts.shape[1:], dtype=out_dtype)
    if y.numel():
        kind = 0 if bias is None else _DTYPES[bias.dtype]
        _call("tree_sum", kind, _DTYPES[out_dtype], parts, bias, y, len(parts), *_rows(y))
    return y


def exp(x: Tensor) -> Tensor:
    (x,) = _dense(x)
    y = torch.empty_like(x)
    if x.numel():
        _call("exp", x, y, x.numel())
    return y


def log(x: Tensor) -> Tensor:
    (x,) = _dense(x)
    y = torch.empty_like(x)
    if x.numel():
        _call("log", x, y, x.numel())
    return y
