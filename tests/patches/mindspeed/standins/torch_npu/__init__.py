"""Stands in for torch_npu, so that MindSpeed imports on a CPU: names exist, and a call of one is an error that names it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


class Absent:
    """A function, class or namespace of torch_npu that nothing on this path calls."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"the stand-in for torch_npu has no {self.__name__}")

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")


def __getattr__(name: str) -> Absent:
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent(name)


def _module(name: str, **attributes: Any) -> ModuleType:
    class Module(ModuleType):
        def __getattr__(self, attribute: str) -> Absent:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            return Absent(f"{name}.{attribute}")

    module = Module(f"torch_npu.{name}")
    module.__path__ = []
    vars(module).update(attributes)
    sys.modules[module.__name__] = module
    return module


class _Device:
    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass


class _Options:
    hccl_config: dict[str, Any] = {}


npu = _module(
    "npu",
    device=_Device,
    _lazy_call=lambda *_, **__: None,
    is_available=lambda: False,
    device_count=lambda: 1,
    current_device=lambda: 0,
    get_device_name=lambda *_: "Ascend910B",
)
contrib = _module("contrib", transfer_to_npu=_module("contrib.transfer_to_npu"))
utils = _module("utils", register_asd_hook=lambda *_: None)
_module("utils.collect_env", get_cann_version=lambda *_, **__: "8.5.0")
_module("utils.flops_count", FlopsCounter=object)
_C = SimpleNamespace(_distributed_c10d=SimpleNamespace(ProcessGroupHCCL=SimpleNamespace(Options=_Options)))
unsupported_dtype: list[torch.dtype] = []
torch.npu = npu  # type: ignore[attr-defined]
