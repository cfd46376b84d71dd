"""Weights of the experts stay as they are loaded: w13 [E, 2·ffn, hidden] (gate, up) and w2 [E, hidden, ffn], row-major."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_tpi.patches.vllm._versions import UNTIL, VERSIONS
from mindspeed_tpi.patching import Patch


def _process_weights_after_loading(original: Callable[..., None]) -> Callable[..., None]:
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        pass

    return process_weights_after_loading


PATCHES = (
    Patch(
        target="vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:"
        "UnquantizedFusedMoEMethod.process_weights_after_loading",
        factory=_process_weights_after_loading,
        reason="upstream packs the experts for its own kernel, so that a weight update would not be in place",
        versions=VERSIONS,
        parameters=("self", "layer"),
        until=UNTIL,
        anytime=True,
    ),
)
