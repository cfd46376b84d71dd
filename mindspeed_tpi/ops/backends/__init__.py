"""Which implementation serves the operators: named backends, of which one serves each type of device in a process.

A backend is a module with

- one function per operator of `ops/table.py` that it serves, with the row's positional parameters;
- `DEVICE`: the `torch.device` type of the operands it takes;
- `CHECKS_OPERANDS` (optional, default False): its functions refuse by themselves what `ops/checks.py` refuses;
- `SLOW` (optional, default False): too slow for a real model's sizes, so that `verify` does not ask for them;
- `check(contract)`: raise `BackendError` for a contract constant it cannot follow;
- `describe() -> dict`: what it runs on (library, CPU features), for reports.

Others register under the entry-point group `mindspeed_tpi.backends` (name = module path).
"""

from __future__ import annotations

import importlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any

from mindspeed_tpi import contract, envs
from mindspeed_tpi.errors import BackendError
from mindspeed_tpi.ops.backends import record
from mindspeed_tpi.ops.checks import checked

logger = logging.getLogger("mindspeed_tpi")

ENTRY_POINTS = "mindspeed_tpi.backends"


@dataclass(frozen=True)
class Backend:
    """A loaded backend."""

    name: str
    module: ModuleType

    @property
    def device(self) -> str:
        """The `torch.device` type it serves."""
        served: str = self.module.DEVICE
        return served

    def describe(self) -> dict[str, Any]:
        """What it runs on."""
        description: dict[str, Any] = self.module.describe()
        return {"name": self.name, **description}


def available() -> dict[str, str]:
    """Name to module path of every registered backend."""
    return {point.name: point.value for point in metadata.entry_points(group=ENTRY_POINTS)} | {
        "ascendc-twin": "mindspeed_tpi.ops.backends.ascendc_twin",
        "cpu": "mindspeed_tpi.ops.backends.cpu",
        "reference": "mindspeed_tpi.ops.backends.reference",
    }


_active: dict[str, Backend] = {}  # by type of device
_kernels: dict[tuple[str, str], Callable[..., Any]] = {}  # by operator and type of device
_counts: Counter[str] = Counter()


def load(name: str) -> Backend:
    """Load one backend and check that it follows this process's contract.

    Raises:
        BackendError: unknown name, missing native library, or a contract constant it cannot follow.
    """
    modules = available()
    if name not in modules:
        raise BackendError(f"backend {name!r} is not registered; registered: {', '.join(sorted(modules))}")
    module = importlib.import_module(modules[name])
    module.check(contract.current())
    return Backend(name, module)


def use(name: str) -> Backend:
    """Make a backend the one of its type of device in this process.

    Raises:
        BackendError: as `load`; in strict mode also a backend that needs a record of `mindspeed-tpi verify` and has none that holds.
    """
    backend = load(name)
    if envs.strict():
        record.require(name, backend.module, contract.current())
    _active[backend.device] = backend
    _kernels.clear()
    return backend


def active(device: str = "cpu") -> Backend:
    """The backend of a type of device; the first call chooses it by `MINDSPEED_TPI_BACKEND`.

    Raises:
        BackendError: there is none, or it cannot be loaded. With `auto` outside strict mode the reference backend takes over
            on the CPU, with a warning.
    """
    if device in _active:
        return _active[device]
    name = envs.BACKEND.get()
    if name != "auto" and load(name).device == device:
        return use(name)
    if device != "cpu":
        for candidate in sorted(available().keys() - {"ascendc-twin", "cpu", "reference"}):
            if load(candidate).device == device:
                return use(candidate)
        raise BackendError(
            f"no backend serves operands on {device!r}; registered: {', '.join(sorted(available()))}. Move them to the CPU"
        )
    try:
        return use("cpu")
    except BackendError as error:
        if envs.strict():
            raise
        logger.warning("%s; running the reference backend, thousands of times slower", error)
        return use("reference")


def kernel(name: str, device: str) -> Callable[..., Any]:
    """The implementation of one operator for operands on one type of device, behind its checks; counts a call.

    Raises:
        BackendError: no backend serves that device, or it lacks the operator.
    """
    _counts[name] += 1
    found = _kernels.get((name, device))
    if found is None:
        backend = active(device)
        function = getattr(backend.module, name, None)
        if function is None:
            raise BackendError(f"the {backend.name} backend has no operator {name!r}; see docs/operators.md")
        found = function if getattr(backend.module, "CHECKS_OPERANDS", False) else checked(name, function)
        _kernels[name, device] = found
    return found


def call_counts() -> dict[str, int]:
    """How often each operator ran in this process since the last `reset_counts`."""
    return dict(sorted(_counts.items()))


def reset_counts() -> None:
    """Start counting anew."""
    _counts.clear()
