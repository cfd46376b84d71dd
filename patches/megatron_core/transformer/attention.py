"""Rotary embedding of queries and keys from f32 tables (contract section 4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mindspeed_tpi.parallel import tree
from mindspeed_tpi.parallel.attention import split_key_values
from mindspeed_tpi.patches.megatron_core.support import (
    UNTIL,
    VERSIONS,
    by_version,
    served,
    tensor_parallel_group,
)
from mindspeed_tpi.patching import Patch


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
)
