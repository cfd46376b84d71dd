"""The native CPU backend: the kernels of `kernels/cpu`, called through `kernels/binding` and apache-tvm-ffi.

The binding checks every call against its row of `ops/table.py` in C++, passes pointers and strides, and allocates the results.
Weights are read in place in their row-major form. An operand that no kernel can read where it lies is copied here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import tvm_ffi

from mindspeed_tpi.contract import KERNEL_SEMANTICS, NumericsContract, default
from mindspeed_tpi.errors import BackendError
from mindspeed_tpi.ops import checks
from mindspeed_tpi.ops.table import OPERATORS, Attribute, Operator

DEVICE = "cpu"
CHECKS_OPERANDS = True
LIBRARY_PATH = Path(__file__).resolve().parents[2] / "lib" / "libmindspeed_tpi.so"

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_STATUS = {
    1: "a dtype the kernels do not have; use float32, bfloat16 or float16",
    2: "sizes outside the operator's schema; see docs/op-schemas.md",
    3: "an id, slot, page or position outside its table; check the token ids and the block table",
    4: "a NaN among the router logits; the hidden states are already broken upstream of the router",
    5: "no memory for scratch space; use smaller batches or fewer threads",
}


def _openmp_runtime() -> str:
    """The OpenMP library already in this process (torch's), so that there is one thread pool; else the system's."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        loaded = dict.fromkeys(line.split()[-1] for line in maps)
    runtimes = [p for p in loaded if Path(p).name.startswith(("libgomp", "libomp", "libiomp5"))]
    torch_home = str(Path(torch.__file__).parent)  # other packages (sentencepiece) bring runtimes of their own
    for path in sorted(runtimes, key=lambda p: not p.startswith(torch_home)):
        return path
    return "libgomp.so.1"


def _load() -> ctypes.CDLL:
    if not LIBRARY_PATH.is_file():
        raise BackendError(
            f"the native library {LIBRARY_PATH} is missing; build it with `pip install .` or `pip install -e .` (needs a C++17 compiler)"
        )
    ctypes.CDLL(_openmp_runtime(), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(LIBRARY_PATH))
    library.tpi_isa.restype = ctypes.c_char_p
    library.tpi_isa_available.restype = ctypes.c_char_p
    library.tpi_set_isa.argtypes = [ctypes.c_char_p]
    return library


def _load_operators() -> Any:
    """The operators as functions of torch tensors."""
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        raise BackendError(
            f"torch {torch.__version__} cannot hand tensors over to C; install torch 2.10 or later, or the package "
            "torch-c-dlpack-ext, or set MINDSPEED_TPI_BACKEND=reference"
        )
    module = tvm_ffi.load_module(LIBRARY_PATH)
    missing = [name for name in OPERATORS if not module.implements_function(name)]
    if missing:
        raise BackendError(f"the native library {LIBRARY_PATH} lacks {', '.join(missing)}: rebuild it (pip install .)")
    return module


_lib = _load()
_module = _load_operators()
_pending = _module.pending


def check(contract: NumericsContract) -> None:
    """Refuse a contract constant that the kernels do not follow.

    Raises:
        BackendError: names the field, its value, the value the kernels have, and the backend that can.
    """
    fixed = {
        "family": "cpu",
        "isa": default().isa,
        "kernel_semantics": _lib.tpi_kernel_semantics(),
        "kv_block": _lib.tpi_kv_block(),
        "lanes": _lib.tpi_lanes(),
        "leaf_order": "chain",
        "attention_gradient": "add",
        "multiply_add": "fma",
        "transcendental": "polynomial",
        "subnormals": "flush",
        "p_dtype": "float32",
    }
    if fixed["kernel_semantics"] != KERNEL_SEMANTICS:
        raise BackendError(
            f"the native library has kernel semantics {fixed['kernel_semantics']}, this package needs {KERNEL_SEMANTICS}: rebuild it (pip install .)"
        )
    for name, value in fixed.items():
        if getattr(contract, name) != value:
            raise BackendError(
                f"the cpu backend has {name}={value!r}, the contract says {getattr(contract, name)!r}; "
                "drop that override of MINDSPEED_TPI_CONTRACT, or set MINDSPEED_TPI_BACKEND=reference"
            )


def isas() -> list[str]:
    """Instruction sets of this build that run on this CPU, narrowest first. All give the same bits."""
    found: list[str] = []
    while (name := _lib.tpi_isa_available(len(found))) is not None:
        found.append(name.decode())
    return found


def set_isa(name: str) -> None:
    """Use another instruction set than the widest (for tests)."""
    if _lib.tpi_set_isa(name.encode()):
        raise BackendError(f"instruction set {name!r} is not available here; available: {', '.join(isas())}")


def describe() -> dict[str, Any]:
    """Library, instruction set in use and available ones, threads."""
    return {
        "library": str(LIBRARY_PATH),
        "isa": _lib.tpi_isa().decode(),
        "isas": isas(),
        "threads": torch.get_num_threads(),
        "openmp": Path(_openmp_runtime()).name,
    }


# ---- operators ----


def _bound(row: Operator) -> Callable[..., Any]:
    """One operator: the native function checks its operands by itself; Python is asked only where something is amiss."""
    native, name = getattr(_module, row.name), row.name
    codes = [i for i, p in enumerate(row.parameters) if isinstance(p, Attribute) and p.kind == "dtype"]
    code_at = codes[0] if codes else None
    more = range(1, len(row.results))

    def call(*args: Any) -> Any:
        passed = args
        try:
            if code_at is not None and args[code_at] is not None:
                passed = (*args[:code_at], _DTYPES.get(args[code_at], -1), *args[code_at + 1 :])
            result = native(*passed)
        except Exception as error:
            raise _refusal(name, args, f"{type(error).__name__}: {error}") from error
        if type(result) is int:
            result = _settle(name, native, args, list(passed), result)
        if more:
            return (result, *[_pending(i, args[0]) for i in more])
        return result

    call.__name__ = name
    return call


def _settle(name: str, native: Callable[..., Any], args: tuple[Any, ...], passed: list[Any], result: Any) -> Any:
    """What to do with an int: 0 is done; below 0 asks for a contiguous copy of one operand; above it is a refusal."""
    while type(result) is int and result < 0:
        passed[-1 - result] = passed[-1 - result].clone(memory_format=torch.contiguous_format)
        result = native(*passed)
    if type(result) is int:
        if result:
            raise _refusal(name, args, _STATUS.get(result, f"status {result}"))
        return None
    return result


def _refusal(name: str, args: tuple[Any, ...], problem: str) -> BackendError:
    """The refusal that `checks.check` words with the operand, what was found and what is expected; else the given problem."""
    try:
        checks.check(name, args)
    except BackendError as error:
        return error
    return BackendError(f"{name}: {problem}")


globals().update({name: _bound(row) for name, row in OPERATORS.items()})
