"""Matrix products of unquantised weights, read in their row-major form: no packed copy, so that a reload is in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mindspeed_tpi import contract, ops
from mindspeed_tpi.contract import Role
from mindspeed_tpi.parallel.linear import row_sum
from mindspeed_tpi.patches.vllm._parallel import tp_group
from mindspeed_tpi.patches.vllm._versions import UNTIL, VERSIONS
from mindspeed_tpi.patching import Patch


def _process_weights_after_loading(original: Callable[..., None]) -> Callable[..., None]:
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        from vllm.model_executor.layers.linear import RowParallelLinear

        role: Role = "tensor" if isinstance(layer, RowParallelLinear) else "whole"
        ranks = layer.input_size // layer.weight.shape[1]
        layer.tpi_leaves = contract.current().leaves(layer.input_size, role).shard(ranks)

    return process_weights_after_loading


def _apply(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return ops.linear(x, layer.weight, bias, leaves=layer.tpi_leaves)

    return apply


def _row_parallel_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, input_: Tensor) -> Any:
        """Always the complete sum: `reduce_results=False` leaves it to a caller, which is the experts' layer, and ours does not."""
        x = input_ if self.input_is_parallel else input_.chunk(self.tp_size, dim=-1)[self.tp_rank]
        bias = None if self.skip_bias_add else self.bias
        out = row_sum(x, self.weight, bias, group=tp_group() if self.tp_size > 1 else None, leaves=self.tpi_leaves)
        if not self.return_bias:
            return out
        return out, self.bias if self.skip_bias_add else None

    return forward


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
    Patch(
        target="vllm.model_executor.layers.linear:RowParallelLinear.forward",
        factory=_row_parallel_forward,
        reason="upstream rounds each rank's partial sum, adds the bias to the first, and leaves their order to the library",
        versions=VERSIONS,
        parameters=("self", "input_"),
        until=UNTIL,
        anytime=True,
    ),
)
