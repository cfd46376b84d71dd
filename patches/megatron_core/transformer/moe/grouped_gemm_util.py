"""`moe_grouped_gemm=True` without the CUDA package grouped_gemm: MoELayer's patch computes GroupedMLP's experts."""

from __future__ import annotations

from mindspeed_tpi.patches.megatron_core.stand_in import StandIn, stand_in
from mindspeed_tpi.patching import Patch

_EXTENSION = "the package grouped_gemm"
_STAND_IN = StandIn(_EXTENSION, "moe_grouped_gemm")


def _patch(name: str) -> Patch:
    return stand_in(
        f"megatron.core.transformer.moe.grouped_gemm_util:{name}",
        _STAND_IN,
        extension=_EXTENSION,
        instead="this package's linear computes each expert from GroupedMLP's own weights",
    )


PATCHES: tuple[Patch, ...] = (_patch("grouped_gemm"), _patch("ops"))
