"""Rotary embedding of queries and keys from f32 tables (contract section 4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi import ops
from mindspeed_tpi.errors import ParityError
from mindspeed_tpi.patches.megatron_core.support import UNTIL, VERSIONS, by_version, outside
from mindspeed_tpi.patching import Patch


def apply_rotary_pos_emb(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Rotates t [s, b, heads, d] by the tables [s, 1, 2, R/2] that the patched rotary embedding returns.

    Angles (any other shape) come from a rotary embedding that no served GPTModel owns, and go to upstream.
    """

    def apply(
        t: Tensor,
        freqs: Tensor,
        config: Any,
        cu_seqlens: Tensor | None = None,
        mscale: float = 1.0,
        **groups: Any,
    ) -> Tensor:
        if freqs.shape[-2] != 2:
            outside("rotary angles that no served GPTModel made")
            return original(t, freqs, config, cu_seqlens, mscale, **groups)
        if cu_seqlens is not None:
            raise ParityError("outside the numerics contract: packed sequences; pass a right-padded [s, b] batch")
        length, batch = t.shape[:2]
        positions = torch.arange(length, device=t.device).repeat_interleave(batch)
        tables = freqs.to(t.device)
        return ops.rope(t.flatten(0, 1), tables[:, 0, 0], tables[:, 0, 1], positions).view(t.shape)

    return apply


PATCHES: tuple[Patch, ...] = (
    Patch(
        target="megatron.core.transformer.attention:apply_rotary_pos_emb",
        factory=apply_rotary_pos_emb,
        reason="stock cos and sin are rounded to bf16 and each product is rounded",
        versions=VERSIONS,
        parameters=by_version(
            ("0.13", ("t", "freqs", "config", "cu_seqlens", "mscale", "cp_group")),
            ("0.12", ("t", "freqs", "config", "cu_seqlens", "mscale")),
        ),
        until=UNTIL,
    ),
)
