"""Lets Megatron-core run where there is no accelerator: device calls that mean nothing on a CPU become no-ops.

Nothing here decides bits of a served model. The patches apply only where no accelerator is found.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi.patching import Patch, Registry, Status
from mindspeed_tpi.versions import MEGATRON_CORE

UNTIL = "Megatron-core asks torch.accelerator for its device"


def accelerator() -> str | None:
    """Why the shim is not wanted here, or None where only a CPU is present."""
    npu = getattr(torch, "npu", None)
    if torch.cuda.is_available() or (npu is not None and npu.is_available()):
        return "an accelerator is present"
    return None


class Stream:
    """Stands for torch.cuda.Stream and Event: work on a CPU is complete when its call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or Stream()

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


@contextmanager
def _nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def get_default_causal_mask(sq: int) -> Tensor:
    """True where a key lies in the query's future; [sq, sq]."""
    return ~torch.ones(sq, sq, dtype=torch.bool).tril()


def get_sliding_window_causal_mask(sq: int, skv: int, window_size: tuple[int, int]) -> Tensor:
    """True where a key is outside [query − left, query + right]; [sq, skv], ends aligned."""
    distance = torch.arange(sq).unsqueeze(1) + (skv - sq) - torch.arange(skv)
    return ~((distance <= window_size[0]) & (distance >= -window_size[1]))


class TorchOnCpu:
    """The torch module as Megatron-core's pipeline schedules see it: `device="cuda"` means the CPU."""

    def __init__(self, torch_module: Any) -> None:
        self._torch = torch_module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def zeros(self, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        return torch.zeros(*args, device="cpu" if device == "cuda" else device, **kwargs)


def on_cpu(original: Any) -> Any:
    """The same function (or classmethod) whose constants name the CPU: `device="cuda"`, `type() == "torch.cuda.FloatTensor"`."""
    function: FunctionType = getattr(original, "__func__", original)
    code = function.__code__.replace(co_consts=_cpu_names(function.__code__.co_consts))
    twin = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    twin.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(twin, function)
    twin.__module__ = __name__
    return classmethod(twin) if isinstance(original, classmethod) else twin


def _cpu_names(constant: Any) -> Any:
    if isinstance(constant, tuple):
        return tuple(_cpu_names(part) for part in constant)
    if isinstance(constant, CodeType):
        return constant.replace(co_consts=_cpu_names(constant.co_consts))
    if isinstance(constant, str) and (constant == "cuda" or constant.startswith("torch.cuda.")):
        return "cpu" if constant == "cuda" else constant.replace("torch.cuda.", "torch.")
    return constant


def all_to_all_single(original: Callable[..., Any]) -> Callable[..., Any]:
    """gloo takes lists of int; Megatron-core passes whatever its dispatcher counted with."""

    def call(
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[Any] | None = None,
        input_split_sizes: Sequence[Any] | None = None,
        **options: Any,
    ) -> Any:
        splits = [None if s is None else [int(n) for n in s] for s in (output_split_sizes, input_split_sizes)]
        return original(output, input, *splits, **options)

    return call


def _optimizer(target: str) -> Patch:
    return Patch(
        target=f"megatron.core.optimizer.{target}",
        factory=on_cpu,
        reason="allocates on a CUDA device, or asks for tensors of one, by name",
        versions=MEGATRON_CORE,
        parameters=None,  # only passed through
        until=UNTIL,
        applies=accelerator,
    )


def _te_general_gemm_defined() -> str | None:
    module = sys.modules.get("megatron.core.transformer.moe.moe_utils")
    if module is not None and hasattr(module, "te_general_gemm"):
        return "upstream defines it"
    return accelerator()


def _torch(name: str, value: Any, kind: Any = "replace") -> Patch:
    return Patch(
        target=f"torch:{name}" if name.startswith("Tensor.") else f"torch.cuda:{name}",
        factory=lambda original: value,
        reason="raises without an accelerator",
        versions="torch>=2.4",
        parameters=None,
        until=UNTIL,
        kind=kind,
        applies=accelerator,
        anytime=True,
    )


def _megatron(target: str, value: Any, parameters: tuple[str, ...], optional: bool = False) -> Patch:
    return Patch(
        target=f"megatron.core.{target}",
        factory=lambda original: value,
        reason="asks for a CUDA device by name",
        versions=MEGATRON_CORE,
        parameters=parameters,
        until=UNTIL,
        applies=accelerator,
        optional=optional,
    )


PATCHES: tuple[Patch, ...] = (
    _torch("current_device", lambda: torch.device("cpu")),
    _torch("synchronize", lambda device=None: None),
    _torch("Stream", Stream),
    _torch("Event", Stream),
    _torch("current_stream", lambda device=None: Stream()),
    _torch("default_stream", lambda device=None: Stream()),
    _torch("stream", _nothing),
    _torch("Tensor.cuda", lambda self, *args, **kwargs: self, kind="add"),
    Patch(
        target="torch.distributed:all_to_all_single",
        factory=all_to_all_single,
        reason="gloo refuses split sizes that are not Python integers",
        versions="torch>=2.4",
        parameters=("output", "input", "output_split_sizes", "input_split_sizes", "group", "async_op"),
        until=UNTIL,
        kind="wrap",
        applies=accelerator,
        anytime=True,
    ),
    _megatron("tensor_parallel.random:CudaRNGStatesTracker.fork", _nothing, ("self", "name")),
    _megatron(
        "tensor_parallel.random:_get_cuda_rng_state",
        lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state(),
        ("device", "clone", "graph_safe"),
    ),
    _megatron(
        "tensor_parallel.random:_set_cuda_rng_state",
        lambda new_state, device=-1, graph_safe=False: None,
        ("new_state", "device", "graph_safe"),
    ),
    _megatron("fusions.fused_softmax:get_default_causal_mask", get_default_causal_mask, ("sq",)),
    _megatron(
        "fusions.fused_softmax:get_sliding_window_causal_mask",
        get_sliding_window_causal_mask,
        ("sq", "skv", "window_size"),
        optional=True,  # from 0.15 on
    ),
    Patch(
        target="megatron.core.pipeline_parallel.schedules:torch",
        factory=TorchOnCpu,
        reason="counts tokens on a CUDA device by name",
        versions=MEGATRON_CORE,
        parameters=None,
        until=UNTIL,
        applies=accelerator,
    ),
    _optimizer("optimizer:MixedPrecisionOptimizer.__init__"),
    _optimizer("optimizer:Float16OptimizerWithFloat16Params.__init__"),
    _optimizer("optimizer:FP32Optimizer.__init__"),
    _optimizer("distrib_optimizer:DistributedOptimizer._build_model_and_main_param_groups"),
    _optimizer("grad_scaler:MegatronGradScaler.__init__"),
    _optimizer("grad_scaler:DynamicGradScaler.__init__"),
    _optimizer("clip_grads:clip_grad_by_total_norm_fp32"),
    _optimizer("clip_grads:count_zeros_fp32"),
    Patch(
        target="megatron.core.transformer.moe.moe_utils:te_general_gemm",
        factory=lambda original: None,
        reason="the router reads the name, which only an import of Transformer Engine binds",
        versions=MEGATRON_CORE,
        parameters=None,
        until="Megatron-core binds te_general_gemm to None without Transformer Engine",
        kind="add",
        applies=_te_general_gemm_defined,
    ),
)

_registry = Registry(PATCHES)


def enable() -> None:
    """Apply the shim in this process, where there is no accelerator. Enabling again is a no-op."""
    _registry.apply()


def disable() -> None:
    """Undo the shim: every target is its original again."""
    _registry.revert()


def status() -> list[Status]:
    """State of every patch of the shim."""
    return _registry.status()
