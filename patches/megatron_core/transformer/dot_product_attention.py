"""Attention on the contract's operator (contract section 3)."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi import ops
from mindspeed_tpi.errors import ParityError
from mindspeed_tpi.parallel import tree
from mindspeed_tpi.parallel.attention import context_parallel_attention, shared_key_attention
from mindspeed_tpi.patches.megatron_core._coverage import pass_number
from mindspeed_tpi.patches.megatron_core.support import (
    UNTIL,
    VERSIONS,
    context_parallel_group,
    outside,
    served,
    tensor_parallel_group,
)
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
        window = getattr(self.scale_mask_softmax, "window_size", None)
        visible = window[0] + 1 if window and window[0] >= 0 else 0
        if packed_seq_params is not None:
            out = ops.attention(
                query, key, value, _packed_seqs(packed_seq_params), scale=self.softmax_scale, window=visible
            )
            return out.flatten(1)
        length, batch, heads, dim = query.shape
        group = context_parallel_group()
        if tree.size(group) > 1:
            out = context_parallel_attention(
                query,
                key,
                value,
                group=group,
                exchange=self.cp_comm_type,
                scale=self.softmax_scale,
                window=visible,
            )
            return out.reshape(length, batch, heads * dim)
        copies = getattr(self, "key_copies", 1)
        operands = (query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), ops.sbhd_seqs(length, batch))
        if copies > 1:
            out = shared_key_attention(
                *operands,
                group=tensor_parallel_group(),
                copies=copies,
                stride=batch,
                scale=self.softmax_scale,
                window=visible,
            )
        else:
            out = ops.attention(*operands, stride=batch, scale=self.softmax_scale, window=visible)
        return out.view(length, batch, heads * dim)

    return attention_forward


def _packed_seqs(packed: Any) -> Tensor:
    """`seqs` of a pack: sequences start at the padded offsets and have their real lengths."""
    real = packed.cu_seqlens_q
    starts = packed.cu_seqlens_q_padded if packed.cu_seqlens_q_padded is not None else real
    lengths = real.diff().int()
    first = starts[:-1].int()
    return torch.stack((first, lengths, torch.zeros_like(first), first, lengths), dim=1)


def _causal(self: Any, query: Tensor, key: Tensor, mask: Tensor | None, bias: Tensor | None, packed: Any) -> bool:
    """Whether this call is causal self-attention over whole sequences, which the operator serves."""
    why = None
    if self.attn_mask_type.name != "causal":
        why = f"attn_mask_type={self.attn_mask_type.name} (only causal is served)"
    elif query.shape[0] != key.shape[0]:
        why = f"{query.shape[0]} queries against {key.shape[0]} keys (only whole sequences are served)"
    elif bias is not None:
        why = "an attention bias (pass None)"
    elif packed is not None and (packed.qkv_format != "thd" or tree.size(context_parallel_group()) > 1):
        why = f"packed sequences as {packed.qkv_format} over {tree.size(context_parallel_group())} context-parallel ranks (served: thd, 1)"
    elif getattr(self, "key_copies", 1) > 1 and (packed is not None or tree.size(context_parallel_group()) > 1):
        why = "more tensor-parallel ranks than KV heads together with packed sequences or context parallelism"
    elif packed is None and mask is not None and not _is_causal(mask):
        why = "an attention mask that is not the causal one (right-padded batches need none: pass None)"
    if why:
        outside(f"attention with {why}")
    return why is None


def _is_causal(mask: Any) -> bool:
    """Whether a boolean mask [..., s, s] (True: hidden) hides exactly the future; remembered on the mask for the other layers of
    the same forward pass, since a mask may be edited in place between two."""
    now = pass_number(), None if mask.is_inference() else mask._version
    if getattr(mask, "tpi_causal", (None, False))[0] != now:
        future = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
        mask.tpi_causal = now, bool((mask == future).all())
    return mask.tpi_causal[1]  # type: ignore[no-any-return]


def init(original: Callable[..., None]) -> Callable[..., None]:
    """`DotProductAttention.__init__`: upstream's refuses context parallelism, which the replaced `forward` serves."""
    signature = inspect.signature(original)

    def attention_init(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        config = bound.arguments["config"]
        if config.context_parallel_size > 1 and served(config):
            bound.arguments["config"] = copy.copy(config)
            bound.arguments["config"].context_parallel_size = 1
        original(*bound.args, **bound.kwargs)
        self = bound.arguments["self"]
        self.config = config
        kind = bound.arguments.get("cp_comm_type") or "p2p"
        if config.context_parallel_size > 1 and kind not in ("p2p", "all_gather", "a2a"):
            raise ParityError(f"cp_comm_type={kind!r} is not served; use p2p, all_gather or a2a")
        self.cp_comm_type = kind

    return attention_init


PATCHES: tuple[Patch, ...] = (
    Patch(
        target="megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
        factory=init,
        reason="upstream's local attention has no context parallelism",
        versions=VERSIONS,
        parameters=None,  # only passed through
        until=UNTIL,
        kind="wrap",
    ),
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
