"""Rotary embedding of queries and keys from f32 tables (contract section 4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi import ops
from mindspeed_tpi.parallel import tree
from mindspeed_tpi.parallel.attention import split_key_values
from mindspeed_tpi.patches.megatron_core.support import (
    UNTIL,
    VERSIONS,
    by_version,
    outside,
    served,
    tensor_parallel_group,
)
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
        return ops.rope(heads, tables[:, 0, 0], tables[:, 0, 1], positions).view(t.shape)

    return apply


def get_query_key_value_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    """`SelfAttention.get_query_key_value_tensors` where tensor-parallel ranks outnumber the KV heads (upstream: from 0.16 on)."""

    def get(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        groups, group = self.config.num_query_groups, tensor_parallel_group()
        if not served(self.config) or groups >= tree.size(group):
            return original(self, hidden_states, *args, **kwargs)
        copies = tree.size(group) // groups
        mixed, _ = self.linear_qkv(hidden_states)
        query, key, value = split_key_values(mixed, group, groups, self.hidden_size_per_attention_head)
        self.core_attention.key_copies = copies
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key, copies=copies)
        return query, key, value

    return get


PATCHES: tuple[Patch, ...] = (
    Patch(
        target="megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors",
        factory=get_query_key_value_tensors,
        reason="upstream's gradient of a shared KV head is a library sum over ranks, and its norm counts the head once per rank",
        versions=VERSIONS,
        parameters=by_version(
            ("0.16", ("self", "hidden_states", "key_value_states", "output_gate", "split_qkv")),
            ("0.15", ("self", "hidden_states", "key_value_states", "split_qkv")),
            ("0.13", ("self", "hidden_states", "key_value_states")),
        ),
        until=UNTIL,
    ),
    Patch(
        target="megatron.core.transformer.attention:apply_rotary_pos_emb",
        factory=apply_rotary_pos_emb,
        reason="stock cos and sin are rounded to bf16 and each product is rounded",
        versions=VERSIONS,
        parameters=("t", "freqs", "config", "cu_seqlens", "mscale", "cp_group"),
        until=UNTIL,
    ),
)
