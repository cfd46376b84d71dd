"""Attention on the contract's operator (contract section 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi import ops
from mindspeed_tpi.patches.megatron_core.support import UNTIL, VERSIONS, outside, served
from mindspeed_tpi.patching import Patch


def forward(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`DotProductAttention.forward`: query [s, b, heads, d], key and value [s, b, groups, d] → [s, b, heads · d]."""

    def attention_forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        if not served(self.config) or not _causal(self, query, key, attention_mask, attention_bias, packed_seq_params):
            return original(self, query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params)
        length, batch, heads, dim = query.shape
        window = getattr(self.scale_mask_softmax, "window_size", None)
        out = ops.attention(
            query.flatten(0, 1),
            key.flatten(0, 1),
            value.flatten(0, 1),
            ops.sbhd_seqs(length, batch),
            stride=batch,
            scale=self.softmax_scale,
            window=window[0] + 1 if window and window[0] >= 0 else 0,
        )
        return out.view(length, batch, heads * dim)

    return attention_forward


def _causal(self: Any, query: Tensor, key: Tensor, mask: Tensor | None, bias: Tensor | None, packed: Any) -> bool:
    """Whether this call is causal self-attention over whole sequences, which the operator serves."""
    why = None
    if self.attn_mask_type.name != "causal":
        why = f"attn_mask_type={self.attn_mask_type.name} (only causal is served)"
    elif query.shape[0] != key.shape[0]:
        why = f"{query.shape[0]} queries against {key.shape[0]} keys (only whole sequences are served)"
    elif bias is not None:
        why = "an attention bias (pass None)"
    elif packed is not None:
        why = "packed sequences (pass a right-padded [s, b] batch)"
    elif mask is not None and not _is_causal(mask):
        why = "an attention mask that is not the causal one (right-padded batches need none: pass None)"
    if why:
        outside(f"attention with {why}")
    return why is None


def _is_causal(mask: Any) -> bool:
    """Whether a boolean mask [..., s, s] (True: hidden) hides exactly the future; remembered on the mask itself."""
    if not hasattr(mask, "is_causal_mask"):
        future = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
        mask.is_causal_mask = bool((mask == future).all())
    return mask.is_causal_mask  # type: ignore[no-any-return]


PATCHES: tuple[Patch, ...] = (
    Patch(
        target="megatron.core.transformer.dot_product_attention:DotProductAttention.forward",
        factory=forward,
        reason="the stock softmax rounds scores and probabilities to bf16 and sums in library order",
        versions=VERSIONS,
        parameters=(
            "self",
            "query",
            "key",
            "value",
            "attention_mask",
            "attn_mask_type",
            "attention_bias",
            "packed_seq_params",
        ),
        until=UNTIL,
    ),
)
