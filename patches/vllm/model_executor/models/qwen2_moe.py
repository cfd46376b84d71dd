"""Shared expert with a sigmoid gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi import ops
from mindspeed_tpi.patches.vllm._versions import UNTIL, VERSIONS
from mindspeed_tpi.patching import Patch


def _forward(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        gate_up, _ = self.gate_up_proj(x)
        out, _ = self.down_proj(self.act_fn(gate_up))
        if self.expert_gate is None:
            return out  # type: ignore[no-any-return]
        gate = self.expert_gate
        logits = ops.linear(x, gate.weight, leaves=gate.tpi_leaves, out_dtype=torch.float32)
        return ops.sigmoid_gate(out, logits)

    return forward


PATCHES = (
    Patch(
        target="vllm.model_executor.models.qwen2_moe:Qwen2MoeMLP.forward",
        factory=_forward,
        reason="upstream rounds the gate's logit, takes the library's sigmoid, and gates a sum that is not complete",
        versions=VERSIONS,
        parameters=("self", "x"),
        until=UNTIL,
        anytime=True,
    ),
)
