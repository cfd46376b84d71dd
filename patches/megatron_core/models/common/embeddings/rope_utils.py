"""Rotation of queries and keys by tables (contract section 4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi import ops
from mindspeed_tpi.errors import BackendError, LayoutError
from mindspeed_tpi.patches.megatron_core.support import UNTIL, VERSIONS, outside
from mindspeed_tpi.patching import Patch


def apply_rotary_pos_emb(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Rotates t [s, b, heads, d] by the tables [s, 1, 2, R/2] that the patched rotary embedding returns; packed t [t, heads, d]
    by each token's position in its own sequence.

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
        length, batch = t.shape[0], (t.shape[1] if t.dim() == 4 else 1)
        if cu_seqlens is None:
            positions = torch.arange(length, device=t.device).repeat_interleave(batch)
        else:
            starts = cu_seqlens.long()
            positions = torch.arange(length, device=t.device)
            positions -= starts[torch.searchsorted(starts, positions, right=True) - 1]
        tables = freqs.to(t.device)
        heads = t.flatten(0, 1) if t.dim() == 4 else t
        try:
            return ops.rope(heads, tables[:, 0, 0], tables[:, 0, 1], positions).view(t.shape)
        except BackendError:
            if cu_seqlens is None or int(positions.max()) < len(tables):
                raise
            raise LayoutError(
                f"a packed sequence has {int(positions.max()) + 1} positions with its padding, PackedSeqParams.max_seqlen_q and "
                f"max_seqlen_kv say {len(tables)}; set both to the longest sequence in cu_seqlens_q_padded"
            ) from None

    return apply


PATCHES: tuple[Patch, ...] = (
    Patch(
        target="megatron.core.models.common.embeddings.rope_utils:apply_rotary_pos_emb",
        factory=apply_rotary_pos_emb,
        reason="stock cos and sin are rounded to bf16 and each product is rounded",
        versions=VERSIONS,
        parameters=("t", "freqs", "config", "cu_seqlens", "mscale", "cp_group"),
        until=UNTIL,
    ),
)
