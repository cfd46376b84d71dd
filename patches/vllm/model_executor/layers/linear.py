"""Matrix products of unquantised weights, read in their row-major form: no packed copy, so that a reload is in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mindspeed_tpi import contract, ops
from mindspeed_tpi.patches.vllm._versions import UNTIL, VERSIONS
from mindspeed_tpi.patching import Patch


def _process_weights_after_loading(original: Callable[..., None]) -> Callable[..., None]:
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        layer.tpi_leaves = contract.current().leaves(layer.weight.shape[1])

    return process_weights_after_loading


def _apply(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return ops.linear(x, layer.weight, bias, leaves=layer.tpi_leaves)

    return apply


_METHOD = "vllm.model_executor.layers.linear:UnquantizedLinearMethod"
PATCHES = (
    Patch(
        target=f"{_METHOD}.process_weights_after_loading",
        factory=_process_weights_after_loading,
        reason="upstream packs the weight for its own kernel and empties `layer.weight`",
        versions=VERSIONS,
        parameters=("self", "layer"),
        until=UNTIL,
        anytime=True,
    ),
    Patch(
        target=f"{_METHOD}.apply",
        factory=_apply,
        reason="the order of the sum over K depends on the library, its blocking and the number of rows",
        versions=VERSIONS,
        parameters=("self", "layer", "x", "bias"),
        until=UNTIL,
        anytime=True,
    ),
)
