"""SwiGLU MLP on the contract's operators (contract section 4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mindspeed_tpi import ops
from mindspeed_tpi.patches.megatron_core.support import UNTIL, VERSIONS, by_version, served
from mindspeed_tpi.patches.megatron_core.tensor_parallel.layers import PAIRED
from mindspeed_tpi.patching import Patch


def forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """`MLP.forward`: linear_fc1, silu(gate) · up, linear_fc2; [s, b, h] → ([s, b, h], None)."""

    def mlp_forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not served(self.config):
            return original(self, hidden_states, *args, **kwargs)
        setattr(self.linear_fc1, PAIRED, True)
        gate_up, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(ops.swiglu(gate_up))

    return mlp_forward


PATCHES: tuple[Patch, ...] = (
    Patch(
        target="megatron.core.transformer.mlp:MLP.forward",
        factory=forward,
        reason="stock SwiGLU uses library exp and rounds silu(gate) before the product, or not, as fusion decides",
        versions=VERSIONS,
        parameters=by_version(
            ("0.16", ("self", "hidden_states", "per_token_scale", "kwargs")),
            ("0.13", ("self", "hidden_states", "per_token_scale")),
        ),
        until=UNTIL,
    ),
)
