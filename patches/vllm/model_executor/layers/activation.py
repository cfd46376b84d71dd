"""SwiGLU: upstream rounds silu(gate) before it multiplies."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from mindspeed_tpi import ops


@cache
def silu_and_mul_class() -> type[Any]:
    """The class that stands in for vLLM's `SiluAndMul`."""
    from vllm.model_executor.layers.activation import SiluAndMul

    class ContractSiluAndMul(SiluAndMul):  # type: ignore[misc]
        @staticmethod
        def forward_native(x: Tensor) -> Tensor:
            return ops.swiglu(x)

        def forward_cpu(self, x: Tensor) -> Tensor:
            return ops.swiglu(x)

        def maybe_compile(self, fn: Any, *, enable: bool = True) -> Any:
            return fn  # one operator: there is nothing to compile

    return ContractSiluAndMul
