"""Mode `audit`: a record of every operator that accumulates floating-point numbers, with who called it.

A torch dispatch mode of the thread that calls `mindspeed_tpi.enable()`; autograd carries it into its own threads. It sees
what runs eagerly: a graph compiled by `torch.compile` is out of its sight, and so are operators inside an extension's.
Adding two tensors is one rounding in one order, and not recorded.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from mindspeed_tpi import envs
from mindspeed_tpi.errors import InputError, ParityError

KINDS = {
    "outside": "accumulates, outside the contract",
    "extension": "an extension's operator, which may accumulate",
    "contract": "an operator of the contract",
}

# Names of the ATen operators that accumulate: one of these words …
_ACCUMULATES = re.compile(
    r"(^|_)(mm|addmm|bmm|addbmm|baddbmm|mv|addmv|dot|vdot|inner|matmul|linear|bilinear|einsum|tensordot|chain"
    r"|convolution|conv[123]d|attention|sum|nansum|cumsum|prod|cumprod|mean|nanmean|var|std|trace|trapezoid|norm|renorm"
    r"|softmax|softmin|logsumexp|logcumsumexp|loss|dist|cdist|pool[123]d)(_|$)"
    # … or one of these parts
    r"|index_(add|put|reduce)|scatter_(add|reduce)|segment_reduce|embedding_(bag|dense_backward)"
)
# vLLM's collectives over shared memory that only move numbers; its shm_allreduce adds them up.
_MOVES = ("shm_all_gather", "shm_gather", "shm_send_tensor_list", "shm_recv_tensor_list")
_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")
_TORCH = str(Path(torch.__file__).parent) + os.sep
_STRICT = str(Path(__file__).with_name("strict.py"))
_OPS = str(Path(__file__).parent / "ops") + os.sep


@cache
def kind(operator: torch._ops.OpOverload) -> str | None:
    """A key of `KINDS`, or None for an operator that moves numbers or computes each result from a fixed few."""
    name = operator._schema.name.partition("::")[2]
    if operator.namespace == "mindspeed_tpi":
        return "contract"
    if operator.namespace in _COLLECTIVES:
        return "outside" if "reduce" in name else None
    if operator.namespace in ("aten", "prims"):
        return "outside" if _ACCUMULATES.search(name) else None
    moves = operator.namespace in ("prim", "profiler") or (operator.namespace == "_C" and name in _MOVES)
    return None if moves else "extension"


class _Audit(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = kind(func)
        if found and accumulates(func, args, kwargs):
            self.calls[found, str(func), caller(found == "contract")] += 1
        return func(*args, **kwargs)

    def report(self) -> dict[str, Any]:
        """The record as a JSON-able document."""
        calls = [
            {"kind": found, "operator": operator, "caller": caller, "count": count}
            for (found, operator, caller), count in sorted(self.calls.items())
        ]
        return {"process": os.getpid(), "command": sys.argv, "calls": calls}

    def write(self) -> None:
        folder = Path(envs.AUDIT.get())
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{os.getpid()}.json").write_text(json.dumps(self.report(), indent=1), encoding="utf-8")


def accumulates(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call adds up: integers are exact in any order, and `index_put` may overwrite instead."""
    if "index_put" in func._schema.name and not (kwargs.get("accumulate") or True in args[3:4]):
        return False
    return any(isinstance(x, Tensor) and x.is_floating_point() for x in tree_leaves((args, kwargs)))


def caller(contract: bool) -> str:
    """`file:line function` of the innermost frame outside torch (and, for our operators, outside their own code); within a
    backward pass also the node that autograd is at."""
    hidden = (_TORCH, __file__, _STRICT, _OPS) if contract else (_TORCH, __file__, _STRICT)
    frame: FrameType | None = sys._getframe(1)
    while frame and (frame.f_code.co_filename.startswith(hidden) or frame.f_code.co_name == "__torch_function__"):
        frame = frame.f_back
    node = torch._C._current_autograd_node()
    within = f" in {node.name()}" if node is not None else ""
    if frame is None:
        return f"a thread of torch{within}"
    return f"{_within_package(frame)}:{frame.f_lineno} {frame.f_code.co_name}{within}"


def _within_package(frame: FrameType) -> str:
    """The file of a frame from its top package on (`megatron/core/…`), wherever that is installed; a script's whole path."""
    file, module = Path(frame.f_code.co_filename), frame.f_globals.get("__name__", "__main__")
    if module == "__main__":
        return str(file)
    return str(Path(*file.parts[-1 - module.count(".") - (file.stem == "__init__") :]))


_running: _Audit | None = None


def start() -> None:
    """Begin to record in this thread; what was recorded is written at `stop` or when the process ends. No-op while it runs."""
    global _running
    if _running is None:
        _running = _Audit()
        _running.__enter__()
        atexit.register(_running.write)


def stop() -> None:
    """End the record and write it to `MINDSPEED_TPI_AUDIT`; no-op when none is running.

    Raises:
        ParityError: another dispatch mode was entered since `start` and is still active, or this is another thread.
    """
    global _running
    if _running is None:
        return
    if _get_current_dispatch_mode() is not _running:
        raise ParityError(
            "cannot end the audit: a torch dispatch mode entered after it is still active, or this is another thread; leave "
            "that mode first, and disable in the thread that enabled"
        )
    _running.__exit__(None, None, None)
    atexit.unregister(_running.write)
    _running.write()
    _running = None


def outside() -> list[dict[str, Any]]:
    """What this process's record, if one is running, holds of operators that are none of the contract's."""
    calls = _running.report()["calls"] if _running is not None else []
    return [call for call in calls if call["kind"] != "contract"]


def merged(folder: str | Path) -> list[dict[str, Any]]:
    """The calls in all records of a folder, equal ones added, worst kind first and then most frequent.

    Raises:
        InputError: no record there, or a file that is none.
    """
    calls: Counter[tuple[str, str, str]] = Counter()
    files = sorted(Path(folder).glob("*.json"))
    if not files:
        raise InputError(
            f"no audit record in {folder}; run with MINDSPEED_TPI=audit first ({envs.AUDIT.name} names the directory)"
        )
    for file in files:
        for call in json.loads(file.read_text(encoding="utf-8"))["calls"]:
            calls[call["kind"], call["operator"], call["caller"]] += call["count"]
    rank = list(KINDS)
    return [
        {"kind": found, "operator": operator, "caller": caller, "count": count}
        for (found, operator, caller), count in sorted(calls.items(), key=lambda c: (rank.index(c[0][0]), -c[1], c[0]))
    ]
