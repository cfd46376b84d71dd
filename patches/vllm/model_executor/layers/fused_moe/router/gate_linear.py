"""The router's linear layer: f32 logits that are never rounded to the model's dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi import ops
from mindspeed_tpi.errors import ParityError
from mindspeed_tpi.patches.vllm._versions import UNTIL, VERSIONS
from mindspeed_tpi.patching import Patch


def _init(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) > 4:
            raise ParityError("GateLinear with params_dtype as a positional argument is outside the numerics contract")
        # As the trainer keeps it: a checkpoint in f32 is rounded on both sides.
        original(self, *args, **kwargs | {"params_dtype": None, "force_fp32_compute": False})

    return __init__


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, x: Tensor) -> Any:
        logits = ops.linear(x, self.weight, self.bias, leaves=self.tpi_leaves, out_dtype=torch.float32)
        return (logits, None) if self.return_bias else logits

    return forward


_GATE = "vllm.model_executor.layers.fused_moe.router.gate_linear:GateLinear"
PATCHES = (
    Patch(
        target=f"{_GATE}.__init__",
        factory=_init,
        reason="upstream keeps some routers in f32 whatever the model's dtype, so that their weights differ from the trainer's",
        versions=VERSIONS,
        parameters=(
            "self",
            "input_size",
            "output_size",
            "bias",
            "out_dtype",
            "params_dtype",
            "force_fp32_compute",
            "skip_bias_add",
            "quant_config",
            "prefix",
            "return_bias",
        ),
        until=UNTIL,
        kind="wrap",
        anytime=True,
    ),
    Patch(
        target=f"{_GATE}.forward",
        factory=_forward,
        reason="upstream rounds the router's logits to the model's dtype",
        versions=VERSIONS,
        parameters=("self", "x"),
        until=UNTIL,
        anytime=True,
    ),
)
