"""RMSNorm of the contract as a Megatron-core norm module (contract section 4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi.parallel.norm import rms_norm
from mindspeed_tpi.patches.megatron_core.support import (
    UNTIL,
    VERSIONS,
    gradient_row_group,
    served,
    tensor_parallel_group,
)
from mindspeed_tpi.patching import Patch


class RMSNorm(torch.nn.Module):
    """Norm for a layer spec: input, pre-MLP and final norm of [s, b, h], query and key norm of [s, b, heads, h].

    The weight has the model's storage dtype, as in the checkpoint.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.eps = eps
        self.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor, copies: int = 1) -> Tensor:
        """Args:
        copies: tensor-parallel neighbours that hold the same heads (`parallel.norm.rms_norm`).
        """
        return normed(x, self.weight, self.eps, self.sequence_parallel, copies)


def normed(x: Tensor, weight: Tensor, eps: float, sequence_parallel: bool, copies: int = 1) -> Tensor:
    """The norm of [s, b, h], or of the heads of [s, b, heads, h]."""
    batch = x.shape[1] if x.dim() > 2 else 1
    ranks = {"group": tensor_parallel_group(), "row_group": gradient_row_group()}
    if x.dim() == 4:
        heads = x.flatten(0, 1)
        return rms_norm(heads, weight, eps, per_head=True, copies=copies, batch=batch, **ranks).view(x.shape)
    return rms_norm(x, weight, eps, sequence_parallel=sequence_parallel, batch=batch, **ranks)


def new(original: Any) -> Any:
    """`WrappedTorchNorm.__new__`: the contract's RMSNorm where the model is served."""

    def make(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if not served(config):
            return original.__func__(cls, config, hidden_size, eps, *args, **kwargs)  # type: ignore[no-any-return]
        return RMSNorm(config, hidden_size, eps)

    return staticmethod(make)


PATCHES: tuple[Patch, ...] = (
    Patch(
        target="megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        factory=new,
        reason="the stock norm multiplies by an f32 weight before its only rounding and sums squares in library order",
        versions=VERSIONS,
        parameters=(
            "cls",
            "config",
            "hidden_size",
            "eps",
            "persist_layer_norm",
            "zero_centered_gamma",
            "normalization",
        ),
        until=UNTIL,
    ),
)
