"""Which implementation serves the operators: a registry of named backends, of which one is active in a process.

A backend is a module with one function per operator schema, plus

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

logger = logging.getLogger("mindspeed_tpi")

ENTRY_POINTS = "mindspeed_tpi.backends"


@dataclass(frozen=True)
class Backend:
    """A loaded backend."""

    name: str
    module: ModuleType

    def describe(self) -> dict[str, Any]:
        """What it runs on."""
        description: dict[str, Any] = self.module.describe()
        return {"name": self.name, **description}


def available() -> dict[str, str]:
    """Name to module path of every registered backend."""
    return {point.name: point.value for point in metadata.entry_points(group=ENTRY_POINTS)} | {
        "cpu": "mindspeed_tpi.ops.backends.cpu",
        "reference": "mindspeed_tpi.ops.backends.reference",
    }


_active: Backend | None = None
_kernels: dict[str, Callable[..., Any]] = {}
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
    """Make a backend the active one of this process."""
    global _active
    _active = load(name)
    _kernels.clear()
    return _active


def active() -> Backend:
    """The active backend; the first call chooses it by `MINDSPEED_TPI_BACKEND`.

    Raises:
        BackendError: it cannot be loaded. With `auto` outside strict mode the reference backend takes over, with a warning.
    """
    if _active is not None:
        return _active
    name = envs.BACKEND.get()
    if name != "auto":
        return use(name)
    try:
        return use("cpu")
    except BackendError as error:
        if envs.strict():
            raise
        logger.warning("%s; running the reference backend, thousands of times slower", error)
        return use("reference")


def call(name: str, args: tuple[Any, ...]) -> Any:
    """Run one operator on the active backend and count the call."""
    kernel = _kernels.get(name)
    if kernel is None:
        kernel = _kernels[name] = getattr(active().module, name)
    _counts[name] += 1
    return kernel(*args)


def call_counts() -> dict[str, int]:
    """How often each operator ran in this process since the last `reset_counts`."""
    return dict(sorted(_counts.items()))


def reset_counts() -> None:
    """Start counting anew."""
    _counts.clear()
