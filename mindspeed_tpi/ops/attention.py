"""Attention: full, varlen/packed, chunked prefill and paged decode by one definition (contract section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi import contract
from mindspeed_tpi.ops import schemas
from mindspeed_tpi.ops._autograd import needs_grad


def causal_seqs(lengths: Sequence[int] | Tensor) -> Tensor:
    """`seqs` for whole sequences laid out one after the other: int32 [R, 5]."""
    n = torch.as_tensor(lengths, dtype=torch.int32, device="cpu")
    first = n.cumsum(0, dtype=torch.int32) - n
    return torch.stack((first, n, torch.zeros_like(n), first, n), dim=1)


def sbhd_seqs(length: int, batch: int) -> Tensor:
    """`seqs` for [S, B, H, D] tensors viewed as [S·B, H, D] and read with stride B."""
    first = torch.arange(batch, dtype=torch.int32)
    n = torch.full_like(first, length)
    return torch.stack((first, n, torch.zeros_like(n), first, n), dim=1)


def fold(count: int) -> list[int]:
    """0, count − 1, 1, count − 2, …: the order in which segments of a row enter their tree (count a power of two), so that the
    two chunks of a context-parallel rank are a subtree."""
    return [i for first in range(count // 2) for i in (first, count - 1 - first)] or [0]


def query_segments(seqs: Tensor, stride: int) -> Tensor:
    """`seqs` of the backward pass: the queries of every line cut in segments, in the order of their tree."""
    lines = []
    for query, queries, position, key, keys in seqs.tolist():
        count = contract.current().query_segments(queries).count
        size = queries // count
        lines += [(query + i * size * stride, size, position + i * size, key, keys) for i in fold(count)]
    return torch.tensor(lines, dtype=torch.int32).view(-1, 5)


def attention(
    q: Tensor, k: Tensor, v: Tensor, seqs: Tensor, *, stride: int = 1, scale: float, window: int = 0
) -> Tensor:
    """Causal attention of every query over its own sequence.

    Args:
        q: [Tq, Hq, D]. k, v: [Tk, Hk, D], strided views allowed; Hq a multiple of Hk.
        seqs: int32 [R, 5], lines of (first query token, queries, position of the first, first key token, keys).
        stride: distance in tokens between neighbours of one sequence (B for [S, B, …] tensors).
        scale: multiplies the scores. window: keys visible to a query, itself included; 0 means all.

    Returns:
        [Tq, Hq, D] in q's dtype; tokens outside every line give 0.

    Raises:
        BackendError: dtypes, devices, shapes or lines outside the schema.
    """
    segment = contract.current().segment_blocks
    if needs_grad(q, k, v):
        out: Tensor = _Attention.apply(q, k, v, seqs, stride, scale, window, segment)
        return out
    result: Tensor = schemas.attention(q, k, v, seqs, stride, scale, window, segment)[0]
    return result


def paged_cache_write(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store k, v [T, Hk, D] at their slots of `kv_cache` [blocks, Hk, page, 2D] (laid out by the backend); negative slots are skipped."""
    schemas.paged_cache_write(k, v, kv_cache, slot_mapping)


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int = 0,
) -> Tensor:
    """`attention` over a paged cache: the queries of request r are its last positions. q [T, Hq, D] → [T, Hq, D]."""
    segment = contract.current().segment_blocks
    return schemas.paged_attention(q, kv_cache, block_table, query_start_loc, seq_lens, scale, window, segment)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, seqs: Tensor, stride: int, scale: float, window: int, segment: int
    ) -> Tensor:
        out, m, l = schemas.attention(q, k, v, seqs, stride, scale, window, segment)  # noqa: E741
        ctx.save_for_backward(q, k, v, out, m, l, seqs)
        ctx.options = (stride, scale, window, segment)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (*_gradients(ctx, grads[0]), None, None, None, None, None)


def _gradients(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, m, l, seqs = ctx.saved_tensors  # noqa: E741
    seqs = query_segments(seqs, ctx.options[0])
    gradients: tuple[Tensor, Tensor, Tensor] = schemas.attention_backward(
        dout, q, k, v, out, m, l, seqs, *ctx.options, False
    )
    return gradients


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, seqs, *options = inputs
    ctx.save_for_backward(q, k, v, *output, seqs)
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.options = tuple(options)


def _backward(ctx: Any, dout: Tensor, dm: Tensor, dl: Tensor) -> tuple[Any, ...]:
    return (*_gradients(ctx, dout), None, None, None, None, None)


schemas.register_autograd("attention", _backward, _setup)
