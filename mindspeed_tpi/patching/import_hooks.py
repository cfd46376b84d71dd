"""Run a callback right after a module has been executed, before anybody can bind its names."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Loader(Loader):
    """Delegates to the real loader and calls back once the module has run."""

    def __init__(self, inner: Loader, callback: Callable[[str], None]) -> None:
        self._inner = inner
        self._callback = callback

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        spec.loader = module.__loader__ = self._inner  # resources and reloads see the real loader
        self._inner.exec_module(module)
        self._callback(module.__name__)


class PostImportFinder(MetaPathFinder):
    """A `sys.meta_path` entry that watches a set of module names."""

    def __init__(self, callback: Callable[[str], None]) -> None:
        self.watched: set[str] = set()
        self._callback = callback
        self._searching: set[str] = set()

    def install(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.watched or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._callback)
        return spec
