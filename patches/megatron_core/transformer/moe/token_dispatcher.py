"""`moe_token_dispatcher_type="flex"` without DeepEP or HybridEP: MoELayer's patch moves the tokens."""

from __future__ import annotations

from typing import Any

from mindspeed_tpi.patches.megatron_core.stand_in import StandIn, stand_in
from mindspeed_tpi.patching import Patch


def _patch(name: str, value: Any, extension: str) -> Patch:
    return stand_in(
        f"megatron.core.transformer.moe.token_dispatcher:{name}",
        value,
        extension=extension,
        instead="tokens travel by all_to_all of the process group",
    )


def set_deepep_num_sms(num_sms: int) -> None:
    """There are no streaming multiprocessors to reserve."""


_FLEX = "moe_token_dispatcher_type='flex'"
PATCHES: tuple[Patch, ...] = (
    _patch("fused_dispatch", StandIn("DeepEP", _FLEX), "DeepEP"),
    _patch("set_deepep_num_sms", set_deepep_num_sms, "DeepEP"),
    _patch("hybrid_ep_dispatch", StandIn("HybridEP", _FLEX), "HybridEP"),
)
