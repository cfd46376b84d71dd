"""The router's linear layer: f32 logits that are never rounded to the model's dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi import ops
from mindspeed_tpi.patches.vllm._versions import UNTIL, VERSIONS
from mindspeed_tpi.patching import Patch


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, x: Tensor) -> Any:
        # A router kept in f32 takes the widened input: the same products.
        logits = ops.linear(
            x.to(self.weight.dtype), self.weight, self.bias, leaves=self.tpi_leaves, out_dtype=torch.float32
        )
        return (logits, None) if self.return_bias else logits

    return forward


PATCHES = (
    Patch(
        target="vllm.model_executor.layers.fused_moe.router.gate_linear:GateLinear.forward",
        factory=_forward,
        reason="upstream rounds the router's logits to the model's dtype",
        versions=VERSIONS,
        parameters=("self", "x"),
        until=UNTIL,
        anytime=True,
    ),
)
