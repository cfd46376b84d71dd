"""Every operator's `torch.library` schema and fake kernel, side by side. Semantics: docs/op-schemas.md.

An operator is called in one of two ways with the same result: eagerly straight into the active backend (the dispatcher
would cost more than a small operator), or, under `torch.compile`, a fake or any other dispatch mode, as the opaque
custom operator `torch.ops.mindspeed_tpi.<name>`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi.ops import backends

NAMESPACE = "mindspeed_tpi"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
DISPATCH_KEYS = ("CPU", "PrivateUse1")

_modes_active: Callable[[], int] = torch._C._len_torch_dispatch_stack


class Op:
    """One operator: `op(*args)` with the positional arguments of its schema."""

    def __init__(self, name: str, schema: str) -> None:
        self.name = name
        self.schema = schema
        self.overload: Any = getattr(getattr(torch.ops, NAMESPACE), name).default

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling() or _modes_active():
            return self.overload(*args)
        return backends.call(self.name, args)


OPS: dict[str, Op] = {}


def _define(schema: str) -> Callable[[Callable[..., Any]], Op]:
    """Register a schema with the decorated function as its fake kernel."""
    name = schema.partition("(")[0]

    def register(fake: Callable[..., Any]) -> Op:
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in DISPATCH_KEYS:
            LIBRARY.impl(name, lambda *args: backends.call(name, args), key)
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
        OPS[name] = Op(name, schema)
        return OPS[name]

    return register


def _f32(like: Tensor, *shape: int | torch.SymInt) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


@_define("linear(Tensor x, Tensor weight, Tensor? bias, int leaf, int leaves, ScalarType? out_dtype) -> Tensor")
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, leaf: int, leaves: int, out_dtype: torch.dtype | None
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype or x.dtype)


@_define("linear_dx(Tensor dy, Tensor weight, int leaf, int leaves, ScalarType? out_dtype, bool paired) -> Tensor")
def linear_dx(
    dy: Tensor, weight: Tensor, leaf: int, leaves: int, out_dtype: torch.dtype | None, paired: bool
) -> Tensor:
    return dy.new_empty((*dy.shape[:-1], weight.shape[1]), dtype=out_dtype or dy.dtype)


@_define("linear_dw(Tensor dy, Tensor x, Tensor(a!) grad, int batch, Tensor? row_offsets, int spans) -> ()")
def linear_dw(dy: Tensor, x: Tensor, grad: Tensor, batch: int, row_offsets: Tensor | None, spans: int) -> None:
    return None


@_define("linear_db(Tensor dy, Tensor(a!) grad, int batch, Tensor? row_offsets, int spans) -> ()")
def linear_db(dy: Tensor, grad: Tensor, batch: int, row_offsets: Tensor | None, spans: int) -> None:
    return None


@_define(
    "grouped_linear(Tensor x, Tensor weight, Tensor offsets, int leaf, int leaves, ScalarType? out_dtype) -> Tensor"
)
def grouped_linear(
    x: Tensor, weight: Tensor, offsets: Tensor, leaf: int, leaves: int, out_dtype: torch.dtype | None
) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[1]), dtype=out_dtype or x.dtype)


@_define(
    "grouped_linear_dx(Tensor dy, Tensor weight, Tensor offsets, int leaf, int leaves, ScalarType? out_dtype, "
    "bool paired) -> Tensor"
)
def grouped_linear_dx(
    dy: Tensor, weight: Tensor, offsets: Tensor, leaf: int, leaves: int, out_dtype: torch.dtype | None, paired: bool
) -> Tensor:
    return dy.new_empty((dy.shape[0], weight.shape[2]), dtype=out_dtype or dy.dtype)


@_define("tree_sum(Tensor parts, Tensor? bias, ScalarType out_dtype) -> Tensor")
def tree_sum(parts: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    return parts.new_empty(parts.shape[1:], dtype=out_dtype)


@_define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor seqs, int stride, float scale, int window, int segment_blocks) "
    "-> (Tensor out, Tensor m, Tensor l)"
)
def attention(
    q: Tensor, k: Tensor, v: Tensor, seqs: Tensor, stride: int, scale: float, window: int, segment_blocks: int
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, heads = q.shape[0], q.shape[1]
    return q.new_empty(q.shape), _f32(q, heads, tokens), _f32(q, heads, tokens)


@_define(
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor m, Tensor l, Tensor seqs, "
    "int stride, float scale, int window, int segment_blocks, bool partial) -> (Tensor dq, Tensor dk, Tensor dv)"
)
def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    m: Tensor,
    l: Tensor,  # noqa: E741
    seqs: Tensor,
    stride: int,
    scale: float,
    window: int,
    segment_blocks: int,
    partial: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.float32 if partial else k.dtype
    return q.new_empty(q.shape), k.new_empty(k.shape, dtype=dtype), v.new_empty(v.shape, dtype=dtype)


@_define("paged_cache_write(Tensor k, Tensor v, Tensor(a!) kv_cache, Tensor slot_mapping) -> ()")
def paged_cache_write(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    return None


@_define(
    "paged_attention(Tensor q, Tensor kv_cache, Tensor block_table, Tensor query_start_loc, Tensor seq_lens, "
    "float scale, int window, int segment_blocks) -> Tensor"
)
def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int,
    segment_blocks: int,
) -> Tensor:
    return q.new_empty(q.shape)


@_define("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor y, Tensor rstd)")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), _f32(x, *x.shape[:-1])


@_define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor y, Tensor residual_out, Tensor rstd)"
)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), _f32(x, *x.shape[:-1])


@_define("rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd, Tensor? dskip) -> Tensor")
def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, dskip: Tensor | None) -> Tensor:
    return x.new_empty(x.shape)


@_define(
    "rms_norm_dw(Tensor dy, Tensor x, Tensor rstd, Tensor(a!) grad, int batch, Tensor? row_offsets, int spans) -> ()"
)
def rms_norm_dw(
    dy: Tensor, x: Tensor, rstd: Tensor, grad: Tensor, batch: int, row_offsets: Tensor | None, spans: int
) -> None:
    return None


@_define("head_terms(Tensor dy, Tensor x, Tensor rstd) -> Tensor")
def head_terms(dy: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
    return _f32(x, x.shape[0], x.shape[2])


@_define("residual_add(Tensor x, Tensor y) -> Tensor")
def residual_add(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@_define("rope(Tensor x, Tensor cos, Tensor sin, Tensor positions, bool inverse) -> Tensor")
def rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, inverse: bool) -> Tensor:
    return x.new_empty(x.shape)


@_define("swiglu(Tensor x) -> Tensor")
def swiglu(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@_define("swiglu_backward(Tensor dy, Tensor x) -> Tensor")
def swiglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@_define("embedding(Tensor weight, Tensor ids, int vocab_start, int vocab_size) -> Tensor")
def embedding(weight: Tensor, ids: Tensor, vocab_start: int, vocab_size: int) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


@_define("embedding_dw(Tensor dy, Tensor ids, Tensor(a!) grad, int vocab_start, int batch, Tensor? row_offsets) -> ()")
def embedding_dw(
    dy: Tensor, ids: Tensor, grad: Tensor, vocab_start: int, batch: int, row_offsets: Tensor | None
) -> None:
    return None


@_define("vocab_max(Tensor logits, Tensor? temperature) -> Tensor")
def vocab_max(logits: Tensor, temperature: Tensor | None) -> Tensor:
    return _f32(logits, logits.shape[0])


@_define(
    "vocab_sums(Tensor logits, Tensor max, Tensor? temperature, int leaf, int leaves, bool entropy) "
    "-> (Tensor S, Tensor E)"
)
def vocab_sums(
    logits: Tensor, max: Tensor, temperature: Tensor | None, leaf: int, leaves: int, entropy: bool
) -> tuple[Tensor, Tensor]:
    return _f32(logits, logits.shape[0]), _f32(logits, logits.shape[0] if entropy else 0)


@_define(
    "vocab_logprob(Tensor logits, Tensor tokens, Tensor max, Tensor S, Tensor E, Tensor? temperature, int vocab_start) "
    "-> (Tensor logprob, Tensor entropy)"
)
def vocab_logprob(
    logits: Tensor, tokens: Tensor, max: Tensor, S: Tensor, E: Tensor, temperature: Tensor | None, vocab_start: int
) -> tuple[Tensor, Tensor]:
    return _f32(logits, logits.shape[0]), _f32(logits, E.shape[0])


@_define(
    "vocab_logprob_backward(Tensor logits, Tensor tokens, Tensor max, Tensor S, Tensor entropy, Tensor grad_logprob, "
    "Tensor? grad_entropy, Tensor? temperature, int vocab_start, ScalarType out_dtype) -> Tensor"
)
def vocab_logprob_backward(
    logits: Tensor,
    tokens: Tensor,
    max: Tensor,
    S: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    temperature: Tensor | None,
    vocab_start: int,
    out_dtype: torch.dtype,
) -> Tensor:
    return logits.new_empty(logits.shape, dtype=out_dtype)


@_define(
    "token_logprob(Tensor logits, Tensor tokens, Tensor? temperature, int leaf, int leaves, bool entropy) "
    "-> (Tensor logprob, Tensor entropy, Tensor max, Tensor S)"
)
def token_logprob(
    logits: Tensor, tokens: Tensor, temperature: Tensor | None, leaf: int, leaves: int, entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = logits.shape[0]
    return _f32(logits, rows), _f32(logits, rows if entropy else 0), _f32(logits, rows), _f32(logits, rows)


@_define(
    "moe_route(Tensor logits, Tensor? expert_bias, int topk, str score, bool renormalize, int groups, int topk_groups, "
    "float scaling, float eps) -> (Tensor weights, Tensor ids)"
)
def moe_route(
    logits: Tensor,
    expert_bias: Tensor | None,
    topk: int,
    score: str,
    renormalize: bool,
    groups: int,
    topk_groups: int,
    scaling: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    return _f32(logits, logits.shape[0], topk), logits.new_empty((logits.shape[0], topk), dtype=torch.int32)


@_define(
    "moe_route_backward(Tensor dweights, Tensor logits, Tensor ids, str score, bool renormalize, float scaling, "
    "float eps) -> Tensor"
)
def moe_route_backward(
    dweights: Tensor, logits: Tensor, ids: Tensor, score: str, renormalize: bool, scaling: float, eps: float
) -> Tensor:
    return _f32(logits, *logits.shape)


@_define("moe_combine(Tensor y, Tensor slots, Tensor weights) -> Tensor")
def moe_combine(y: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    return y.new_empty((slots.shape[0], y.shape[1]))


@_define(
    "expert_weight_backward(Tensor g, Tensor a, Tensor weights, int leaf, int leaves) -> (Tensor dweights, Tensor da)"
)
def expert_weight_backward(g: Tensor, a: Tensor, weights: Tensor, leaf: int, leaves: int) -> tuple[Tensor, Tensor]:
    return _f32(g, g.shape[0]), a.new_empty(a.shape)


@_define("sigmoid_gate(Tensor y, Tensor logits) -> Tensor")
def sigmoid_gate(y: Tensor, logits: Tensor) -> Tensor:
    return y.new_empty(y.shape)


@_define("sigmoid_gate_backward(Tensor dout, Tensor y, Tensor logits) -> (Tensor dy, Tensor dlogits)")
def sigmoid_gate_backward(dout: Tensor, y: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), _f32(logits, *logits.shape)
