"""SwiGLU (contract section 4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi.ops import schemas
from mindspeed_tpi.ops._autograd import needs_grad


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) · up, rounded once; x [*, 2F] holds gate, then up → [*, F]."""
    if needs_grad(x):
        y: Tensor = _SwiGLU.apply(x)
        return y
    return schemas.swiglu(x)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return schemas.swiglu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _backward(ctx, grads[0])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _backward(ctx: Any, dy: Tensor) -> Tensor:
    return schemas.swiglu_backward(dy, *ctx.saved_tensors)


schemas.register_autograd("swiglu", _backward, _setup)
