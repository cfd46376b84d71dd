"""RMSNorm: the residual is added and rounded before the norm reads it (upstream takes the variance of the unrounded sum)."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from mindspeed_tpi import ops
from mindspeed_tpi.errors import ParityError


@cache
def rms_norm_class() -> type[Any]:
    """The class that stands in for vLLM's `RMSNorm`."""
    from vllm.model_executor.layers.layernorm import RMSNorm

    class ContractRMSNorm(RMSNorm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if not self.has_weight or self.variance_size_override is not None:
                raise ParityError("RMSNorm without a weight, or over part of a row, is outside the numerics contract")

        def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
            if residual is None:
                return ops.rms_norm(x, self.weight, self.variance_epsilon)
            return ops.add_rms_norm(x, residual, self.weight, self.variance_epsilon)

        forward_cpu = forward_native

    return ContractRMSNorm
