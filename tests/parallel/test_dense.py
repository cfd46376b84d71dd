"""Every parallel piece of a dense model against the same piece on one rank: outputs and gradients, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed_tpi import contract, logprobs, ops
from mindspeed_tpi.ops import schemas
from mindspeed_tpi.parallel import tree, zigzag
from mindspeed_tpi.parallel.attention import (
    context_parallel_attention,
    shared_key_attention,
    split_key_values,
)
from mindspeed_tpi.parallel.embedding import vocab_parallel_embedding
from mindspeed_tpi.parallel.linear import column_parallel_linear, replicated_linear, row_parallel_linear
from mindspeed_tpi.parallel.logprob import linear_logprob
from mindspeed_tpi.parallel.norm import rms_norm
from tests.parallel.ranks import Mesh, Ranks

SIZES = (2, 4)
DTYPES = (torch.bfloat16, torch.float32)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def leaf(value: Tensor) -> Tensor:
    """A parameter with Megatron's f32 gradient buffer."""
    parameter = value.clone().contiguous().requires_grad_()
    parameter.main_grad = torch.zeros_like(value, dtype=torch.float32)  # type: ignore[attr-defined]
    return parameter


def main_grad(parameter: Any) -> Tensor:
    return parameter.main_grad  # type: ignore[no-any-return]


# tree


def _reduce(mesh: Mesh, parts: Tensor, bias: Tensor | None, dtype: torch.dtype, scatter: bool) -> Tensor:
    return tree.tree_reduce(parts[mesh.rank], mesh.group(), bias=bias, out_dtype=dtype, scatter=scatter)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [0, 1, 5, 16, 75])
def test_tree_reduce(ranks: Ranks, size: int, rows: int) -> None:
    parts, bias = randn(size, rows, 3, 40), randn(40, dtype=torch.bfloat16)
    wanted = schemas.tree_sum(parts, bias, torch.bfloat16)
    for got in ranks(size, _reduce, parts, bias, torch.bfloat16, False):
        assert torch.equal(got, wanted)
    if rows % size == 0:
        for rank, got in enumerate(ranks(size, _reduce, parts, bias, torch.bfloat16, True)):
            assert torch.equal(got, wanted.chunk(size)[rank] if rows else wanted)


def test_the_order_of_ranks_shows(ranks: Ranks) -> None:
    """What a library's reduction would do: (a + b + c) + d has other bits than (a + b) + (c + d)."""
    parts = randn(4, 64, 40)
    (got, *_) = ranks(4, _reduce, parts, None, torch.float32, False)
    assert not torch.equal(got, parts[0] + parts[1] + parts[2] + parts[3])


def _reduce_three(mesh: Mesh) -> None:
    tree.size = lambda group: 3  # type: ignore[assignment]
    try:
        tree.tree_reduce(torch.ones(2, 2), mesh.group())
    finally:
        tree.size = _SIZE


_SIZE = tree.size


def test_three_ranks_are_refused(ranks: Ranks) -> None:
    with pytest.raises(RuntimeError, match="3 ranks is not a balanced tree; use a power of two"):
        ranks(1, _reduce_three)


def _owned(mesh: Mesh) -> Tensor:
    x = torch.zeros(mesh.size, 8, dtype=torch.bfloat16)
    x[mesh.rank] = -0.0 if mesh.rank == 0 else float(mesh.rank)
    return tree.owned_sum(x, mesh.group())


def test_owned_sum_keeps_minus_zero(ranks: Ranks) -> None:
    for got in ranks(4, _owned):
        assert got[:, 0].tolist() == [0, 1, 2, 3] and bool(torch.signbit(got[0]).all())


# linear

S, B, H, F = 16, 3, 128, 192


def _mlp(mesh: Mesh, dtype: torch.dtype, sp: bool) -> dict[str, Tensor]:
    """fc1 (paired), SwiGLU, fc2 with bias: output, dx and this rank's main gradients."""
    n, r = mesh.size, mesh.rank
    x, w1, w2 = randn(S, B, H, dtype=dtype), randn(2, F, H, dtype=dtype), randn(H, F, dtype=dtype)
    bias, dout = randn(H, dtype=dtype), randn(S, B, H, dtype=dtype, seed=9)
    group = mesh.group() if n > 1 else None
    mine = x.chunk(n)[r] if sp else x
    xs = mine.clone().requires_grad_()
    p1, p2, pb = leaf(w1.chunk(n, 1)[r].flatten(0, 1)), leaf(w2.chunk(n, 1)[r]), leaf(bias)
    h = column_parallel_linear(xs, p1, group=group, sequence_parallel=sp, paired=True, batch=B)
    y = row_parallel_linear(ops.swiglu(h), p2, pb, group=group, sequence_parallel=sp, batch=B)
    y.backward(dout.chunk(n)[r] if sp else dout)
    assert xs.grad is not None
    return {
        "y": y.detach(),
        "dx": xs.grad,
        "w1": main_grad(p1).unflatten(0, (2, -1)),
        "w2": main_grad(p2),
        "b": main_grad(pb),
    }


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sp", [False, True])
def test_mlp(ranks: Ranks, size: int, dtype: torch.dtype, sp: bool) -> None:
    (wanted,) = ranks(1, _mlp, dtype, False)
    got = ranks(size, _mlp, dtype, sp)
    for name in ("y", "dx"):
        whole = torch.cat([g[name] for g in got]) if sp else got[0][name]
        assert torch.equal(whole, wanted[name]), name
    assert torch.equal(torch.cat([g["w1"] for g in got], 1), wanted["w1"])
    assert torch.equal(torch.cat([g["w2"] for g in got], 1), wanted["w2"])
    assert all(torch.equal(g["b"], wanted["b"]) for g in got)


def _replicated(mesh: Mesh, dtype: torch.dtype, sp: bool) -> dict[str, Tensor]:
    n, r = mesh.size, mesh.rank
    x, w, dout = randn(S, B, H, dtype=dtype), randn(8, H, dtype=dtype), randn(S, B, 8, seed=5)
    xs = (x.chunk(n)[r] if sp else x).clone().requires_grad_()
    p = leaf(w)
    y = replicated_linear(
        xs, p, group=mesh.group() if n > 1 else None, sequence_parallel=sp, out_dtype=torch.float32, batch=B
    )
    y.backward(dout.chunk(n)[r] if sp else dout)
    assert xs.grad is not None
    return {"y": y.detach(), "dx": xs.grad, "w": main_grad(p)}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_replicated(ranks: Ranks, size: int, dtype: torch.dtype) -> None:
    (wanted,) = ranks(1, _replicated, dtype, False)
    got = ranks(size, _replicated, dtype, True)
    for name in ("y", "dx"):
        assert torch.equal(torch.cat([g[name] for g in got]), wanted[name])
    assert all(torch.equal(g["w"], wanted["w"]) for g in got)


# norm


def _norm(mesh: Mesh, dtype: torch.dtype, kind: str) -> dict[str, Tensor]:
    n, r = mesh.size, mesh.rank
    group = mesh.group() if n > 1 else None
    shape = (S, B, H) if kind == "sequence" else (S * B, 8, 32)
    x, w, dout = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype), randn(*shape, dtype=dtype, seed=3)
    dim = 0 if kind == "sequence" else 1
    xs = x.chunk(n, dim)[r].clone().requires_grad_()
    p = leaf(w)
    y = rms_norm(xs, p, 1e-6, group=group, sequence_parallel=kind == "sequence", per_head=kind == "heads", batch=B)
    y.backward(dout.chunk(n, dim)[r])
    assert xs.grad is not None
    return {"y": y.detach(), "dx": xs.grad, "w": main_grad(p)}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["sequence", "heads"])
def test_norm(ranks: Ranks, size: int, dtype: torch.dtype, kind: str) -> None:
    (wanted,) = ranks(1, _norm, dtype, kind)
    got = ranks(size, _norm, dtype, kind)
    for name in ("y", "dx"):
        assert torch.equal(torch.cat([g[name] for g in got], 0 if kind == "sequence" else 1), wanted[name])
    assert all(torch.equal(g["w"], wanted["w"]) for g in got)


# vocabulary

V, L = 500, 40


def _head(mesh: Mesh, temperature: float | None, entropy: bool, form: str) -> dict[str, Tensor]:
    """Embedding, output projection and cross entropy over a padded vocabulary."""
    n, r = mesh.size, mesh.rank
    group = mesh.group() if n > 1 else None
    rows = contract.current().padded_vocab(V) if n > 1 else V
    table = torch.nn.functional.pad(randn(V, H, dtype=torch.bfloat16), (0, 0, 0, rows - V), value=7.0)
    mine = table.chunk(n)[r]
    ids = torch.randint(V, (B, L), generator=torch.Generator().manual_seed(1))
    embedding, head = leaf(mine), leaf(mine.flip(1))
    sp = n > 1 and form != "public"
    x = vocab_parallel_embedding(
        embedding, ids, group=group, vocab_start=r * mine.shape[0], vocab_size=V, sequence_parallel=sp
    )
    x = x if sp else x.transpose(0, 1).contiguous()
    t = None if temperature is None else torch.tensor([temperature])
    tokens = ids.t().flatten()
    if form == "public":
        scale = 1.0 if t is None else t
        logprob = logprobs(
            x.transpose(0, 1), ids, weight=head, temperature=scale, entropy=entropy, group=group, vocab=V
        )
        found = tuple(part.t().flatten() for part in logprob) if entropy else logprob.t().flatten()
    elif form == "fused":
        options: Any = {"group": group, "sequence_parallel": sp, "vocab": V, "batch": B, "chunk": 16}
        found = linear_logprob(x.flatten(0, 1), head, tokens, temperature=t, entropy=entropy, **options)
    else:
        logits = column_parallel_linear(
            x,
            head,
            group=group,
            sequence_parallel=sp,
            dx_leaves=contract.current().head_leaves(V),
            used=min(V - r * mine.shape[0], mine.shape[0]),
            out_dtype=torch.float32,
            batch=B,
        )
        logprob = logprobs(logits, ids.t(), temperature=1.0 if t is None else t, group=group, entropy=entropy)
        found = tuple(part.flatten() for part in logprob) if entropy else logprob.flatten()
    logprob, ent = found if entropy else (found, torch.zeros(1))
    (logprob.sum() - (0.1 * ent.sum() if entropy else 0)).backward()
    used = min(V - r * mine.shape[0], mine.shape[0])
    return {
        "logprob": logprob.detach(),
        "entropy": ent.detach(),
        "embedding": main_grad(embedding)[:used],
        "head": main_grad(head)[:used],
    }


@pytest.mark.parametrize("size", [1, *SIZES])
@pytest.mark.parametrize("form", ["logits", "fused", "public"])
@pytest.mark.parametrize(("temperature", "entropy"), [(None, False), (0.7, True)])
def test_vocabulary(ranks: Ranks, size: int, form: str, temperature: float | None, entropy: bool) -> None:
    """The fused head, in chunks of a row, is the two steps of one rank: results, and gradients of both ends."""
    (wanted,) = ranks(1, _head, temperature, entropy, "logits")
    got = ranks(size, _head, temperature, entropy, form)
    for name in ("logprob", "entropy"):
        assert all(torch.equal(g[name], wanted[name]) for g in got)
    for name in ("embedding", "head"):
        assert torch.equal(torch.cat([g[name] for g in got]), wanted[name])


def _fused_rows(mesh: Mesh) -> Tensor:
    """The f32 gradient of a fused head whose rows context-parallel ranks share."""
    n = mesh.size
    group = mesh.group() if n > 1 else None
    mine = zigzag.positions(L // n, group)
    x = randn(L, B, H, dtype=torch.bfloat16)[mine].flatten(0, 1).requires_grad_()
    tokens = torch.randint(V, (L, B), generator=torch.Generator().manual_seed(1))[mine].flatten()
    head = leaf(randn(V, H, dtype=torch.bfloat16))
    linear_logprob(x, head, tokens, batch=B, row_group=group, chunk=16).sum().backward()
    return main_grad(head)


@pytest.mark.parametrize("size", SIZES)
def test_rows_of_a_fused_head_over_ranks(ranks: Ranks, size: int) -> None:
    (wanted,) = ranks(1, _fused_rows)
    assert torch.equal(torch.stack(ranks(size, _fused_rows)).sum(0), wanted)


# context parallelism

_ALL_TO_ALL = tree.all_to_all


def _attention(mesh: Mesh, exchange: Any, length: int, window: int) -> dict[str, Any]:
    n = mesh.size
    shape = (length, 2)
    q, k, v = (
        randn(*shape, 8, 32, dtype=torch.bfloat16),
        *(randn(*shape, 4, 32, dtype=torch.bfloat16, seed=s) for s in (1, 2)),
    )
    dout = randn(*shape, 8, 32, dtype=torch.bfloat16, seed=3)
    if n == 1:
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        flat = [t.flatten(0, 1) for t in leaves]
        out = ops.attention(*flat, ops.sbhd_seqs(length, 2), stride=2, scale=0.2, window=window).view(q.shape)
        out.backward(dout)
        return {
            "out": out.detach(),
            **{f"d{n}": t.grad for n, t in zip("qkv", leaves, strict=True) if t.grad is not None},
        }
    rows = zigzag.positions(length // n, mesh.group())
    leaves = [t[rows].clone().requires_grad_() for t in (q, k, v)]
    out = context_parallel_attention(*leaves, group=mesh.group(), exchange=exchange, scale=0.2, window=window)
    sent: list[int] = []
    tree.all_to_all = lambda parts, group: (sent.append(parts.nbytes), _ALL_TO_ALL(parts, group))[1]  # type: ignore[assignment]
    try:
        out.backward(dout[rows])
    finally:
        tree.all_to_all = _ALL_TO_ALL
    result: dict[str, Any] = {"rows": rows, "out": out.detach(), "sent": sum(sent)}
    return result | {f"d{n}": t.grad for n, t in zip("qkv", leaves, strict=True) if t.grad is not None}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("exchange", ["p2p", "all_gather", "a2a"])
@pytest.mark.parametrize(("length", "window"), [(48, 0), (304, 0), (304, 50)])
def test_context_parallel_attention(ranks: Ranks, size: int, exchange: str, length: int, window: int) -> None:
    (wanted,) = ranks(1, _attention, exchange, length, window)
    got = ranks(size, _attention, exchange, length, window)
    for name in ("out", "dq", "dk", "dv"):
        whole = torch.empty_like(wanted[name])
        for g in got:
            whole[g["rows"]] = g[name]
        assert torch.equal(whole, wanted[name]), name
    if exchange != "a2a":  # f32 roots of dK and dV for every key, once a rank
        assert all(g["sent"] == 2 * length * 2 * 4 * 32 * 4 for g in got)


def _odd_heads(mesh: Mesh) -> None:
    q, k = torch.ones(4, 1, 6, 8), torch.ones(4, 1, 3, 8)
    context_parallel_attention(q, k, k, group=mesh.group(), exchange="a2a", scale=1.0)


def test_a2a_needs_divisible_heads(ranks: Ranks) -> None:
    with pytest.raises(RuntimeError, match="a multiple of 2 key heads .* not 3; use p2p or all_gather"):
        ranks(2, _odd_heads)


def _shared_keys(mesh: Mesh, groups: int) -> dict[str, Tensor]:
    """The merged projection's output → attention, with fewer KV heads than ranks."""
    n, r, heads, dim, length = mesh.size, mesh.rank, 8, 32, 40
    per_group = heads // groups
    mixed = randn(length, B, groups * (per_group + 2) * dim, dtype=torch.bfloat16)
    dout = randn(length, B, heads, dim, dtype=torch.bfloat16, seed=2)
    weight = leaf(randn(dim, dtype=torch.bfloat16))
    mine = mixed.chunk(n, -1)[r].clone().requires_grad_()
    if n == 1:
        parts = mine.view(length, B, groups, per_group + 2, dim)
        q, k, v = parts[:, :, :, :-2].flatten(2, 3), parts[:, :, :, -2], parts[:, :, :, -1]
    else:
        q, k, v = split_key_values(mine, mesh.group(), groups, dim)
    copies = max(n // groups, 1)
    group = mesh.group() if n > 1 else None
    k = rms_norm(k.flatten(0, 1), weight, 1e-6, group=group, per_head=True, copies=copies, batch=B)
    operands = (q.flatten(0, 1), k, v.flatten(0, 1), ops.sbhd_seqs(length, B))
    if copies > 1:
        out = shared_key_attention(*operands, group=group, copies=copies, stride=B, scale=0.2)
    else:
        out = ops.attention(*operands, stride=B, scale=0.2)
    out.backward(dout.chunk(n, 2)[r].flatten(0, 1))
    assert mine.grad is not None
    return {"out": out.detach(), "dmixed": mine.grad, "w": main_grad(weight)}


@pytest.mark.parametrize(("size", "groups"), [(2, 1), (4, 2), (4, 1)])
def test_more_ranks_than_key_heads(ranks: Ranks, size: int, groups: int) -> None:
    (wanted,) = ranks(1, _shared_keys, groups)
    got = ranks(size, _shared_keys, groups)
    assert torch.equal(torch.cat([g["out"] for g in got], 1), wanted["out"])
    assert torch.equal(torch.cat([g["dmixed"] for g in got], -1), wanted["dmixed"])
    assert all(torch.equal(g["w"], wanted["w"]) for g in got)
