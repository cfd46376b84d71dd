"""The operators of the numerics contract. Orders and roundings: docs/op-schemas.md."""

from mindspeed_tpi.ops import backends
from mindspeed_tpi.ops.activation import swiglu
from mindspeed_tpi.ops.attention import attention, causal_seqs, paged_attention, paged_cache_write, sbhd_seqs
from mindspeed_tpi.ops.embedding import embedding
from mindspeed_tpi.ops.linear import linear, linear_db, linear_dw, linear_dx
from mindspeed_tpi.ops.logprob import token_logprob
from mindspeed_tpi.ops.moe import (
    expert_weight_backward,
    grouped_linear,
    grouped_linear_dx,
    moe_combine,
    moe_route,
    sigmoid_gate,
)
from mindspeed_tpi.ops.norm import add_rms_norm, head_terms, residual_add, rms_norm, rms_norm_dw
from mindspeed_tpi.ops.rope import RopeConfig, rope, rope_tables, table_hash

__all__ = [
    "RopeConfig",
    "add_rms_norm",
    "attention",
    "backends",
    "causal_seqs",
    "embedding",
    "expert_weight_backward",
    "grouped_linear",
    "grouped_linear_dx",
    "head_terms",
    "linear",
    "linear_db",
    "linear_dw",
    "linear_dx",
    "moe_combine",
    "moe_route",
    "paged_attention",
    "paged_cache_write",
    "residual_add",
    "rms_norm",
    "rms_norm_dw",
    "rope",
    "rope_tables",
    "sbhd_seqs",
    "sigmoid_gate",
    "swiglu",
    "table_hash",
    "token_logprob",
]
