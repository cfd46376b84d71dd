"""Stands in for triton, whose kernels MindSpeed decorates at import and does not launch on this path."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any


class Anything:
    """Every attribute and every result is itself; a decorator returns what it decorates."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class Lenient(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return ANYTHING


ANYTHING = Anything()
__version__ = "3.2.0"


def jit(function: Any = None, **_: Any) -> Any:
    return function if function is not None else lambda decorated: decorated


def autotune(*_: Any, **__: Any) -> Any:
    return lambda decorated: decorated


heuristics = autotune


class Config:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass


class JITFunction:  # torch asks whether things are one
    pass


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _submodules() -> None:
    names = (
        *("language", "language.extra", "language.extra.libdevice", "language.extra.cann"),
        *("runtime", "runtime.driver", "runtime.jit", "runtime.autotuner", "runtime.cache"),
        *("backends", "backends.compiler", "compiler", "compiler.compiler", "tools"),
    )
    for name in names:
        module = Lenient(f"{__name__}.{name}")
        module.__path__ = []
        sys.modules[module.__name__] = module
        setattr(sys.modules[module.__name__.rpartition(".")[0]], name.rpartition(".")[2], module)
    target = SimpleNamespace(backend="npu", arch="Ascend910B")
    driver: Any = sys.modules[f"{__name__}.runtime.driver"]
    driver.active = SimpleNamespace(get_current_target=lambda: target, utils=ANYTHING)
    for name in ("jit", "autotuner"):
        module = sys.modules[f"{__name__}.runtime.{name}"]
        module.JITFunction = module.Autotuner = JITFunction  # type: ignore[attr-defined]


_submodules()
