"""Residual add of every layer spec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mindspeed_tpi import ops
from mindspeed_tpi.patches.megatron_core.support import UNTIL, VERSIONS, outside
from mindspeed_tpi.patching import Patch


def get_bias_dropout_add(original: Callable[..., Any]) -> Callable[..., Any]:
    """The residual add, rounded once and never compiled.

    Its input has two readers, the norm and the next residual add, each with one rounded gradient; autograd adds the two
    in f32 and rounds, which is the contract's rounded(dx_norm) + d_skip (section 4) in either order of arrival.
    """

    def get(training: bool, fused: bool) -> Callable[..., Tensor]:
        def add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
            x, bias = x_with_bias
            if bias is not None or (training and prob > 0) or x.dtype != residual.dtype:
                outside(
                    f"residual add with bias={bias is not None}, dropout={prob if training else 0.0}, dtypes {x.dtype} and "
                    f"{residual.dtype} (served: no bias, no dropout, one dtype)"
                )
                return original(training, fused)(x_with_bias, residual, prob)  # type: ignore[no-any-return]
            return ops.residual_add(x, residual)

        return add

    return get


PATCHES: tuple[Patch, ...] = (
    Patch(
        target="megatron.core.fusions.fused_bias_dropout:get_bias_dropout_add",
        factory=get_bias_dropout_add,
        reason="the fused form is compiled, and a compiler may drop roundings between bias, dropout and add",
        versions=VERSIONS,
        parameters=("training", "fused"),
        until=UNTIL,
    ),
)
