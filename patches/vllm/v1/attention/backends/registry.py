"""vLLM's table of overridden attention backends (`register_backend`)."""

from __future__ import annotations

from typing import Any

from mindspeed_tpi.errors import PatchError
from mindspeed_tpi.patches.vllm._versions import UNTIL, VERSIONS
from mindspeed_tpi.patches.vllm.v1.attention.backends import cpu_attn
from mindspeed_tpi.patching import Patch


def _overrides(original: dict[Any, str]) -> dict[Any, str]:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    backend = AttentionBackendEnum.CPU_ATTN
    if backend in original:
        raise PatchError(
            f"{original[backend]} overrides the CPU attention backend already; load one of the two plugins"
        )
    return {**original, backend: cpu_attn.PATH}


PATCHES = (
    Patch(
        target="vllm.v1.attention.backends.registry:_ATTN_OVERRIDES",
        factory=_overrides,
        reason="prefill, chunked prefill and decode sum over the keys in different orders",
        versions=VERSIONS,
        parameters=None,
        until=UNTIL,
        anytime=True,
    ),
)
