"""The reference backend: docs/op-schemas.md as executable Python, the oracle of every other backend.

Slow and plain on purpose. A value is carried as a float64 array that holds a float32 number, so that each float32
operation is the float64 one followed by a single rounding: for +, *, / and sqrt that double rounding is innocuous
(53 >= 2 * 24 + 2, Figueroa 1995), and `fma` rounds its float64 sum to odd first (Boldo and Melquiond 2008). Only the
axis along which an order is prescribed is looped over; nothing is summed by a library. Every constant comes from
`mindspeed_tpi.contract.current()`, and the result does not depend on this thread's floating-point environment.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mindspeed_tpi import contract
from mindspeed_tpi.contract import NumericsContract
from mindspeed_tpi.errors import BackendError

F = npt.NDArray[np.float64]  # float32 values
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

_ZERO, _HALF, _ONE = np.array(0.0), np.array(0.5), np.array(1.0)
_MIN_NORMAL = 2.0**-126
_SUBNORMAL_UNIT = 2.0**-149
# Results below this magnitude are tiny. x86 asks after rounding to 24 bits: half a unit below 2^-126 rounds up to it.
_TINY = {"x86-64": 2.0**-126 * (1 - 2.0**-25), "aarch64": 2.0**-126}
_CANONICAL_NAN = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}

DEVICE = "cpu"
SLOW = True


def check(contract: NumericsContract) -> None:
    """Refuse what no machine does; every other contract can be followed.

    Raises:
        BackendError: subnormals flushed where none are.
    """
    if contract.subnormals == "flush" and contract.isa not in _TINY:
        raise BackendError(
            f"subnormals='flush' with isa={contract.isa!r}: where tininess begins is known of {', '.join(_TINY)} only; set "
            "subnormals='keep' in MINDSPEED_TPI_CONTRACT"
        )


def describe() -> dict[str, Any]:
    """What this backend runs on."""
    return {"numpy": np.__version__}


def _require(condition: bool | np.bool_, problem: str) -> None:
    if not condition:
        raise BackendError(problem)


# ---------------------------------------------------------------------------------------------------------------------
# float32 numbers
# ---------------------------------------------------------------------------------------------------------------------


def widen(tensor: Tensor) -> F:
    """Exact values of a float32, bfloat16 or float16 tensor; float32 subnormals as the contract says."""
    _require(tensor.dtype in _CANONICAL_NAN, f"dtype {tensor.dtype} is not served; use float32, bfloat16 or float16")
    tensor = tensor.detach()
    if tensor.dtype == torch.float16:
        return tensor.numpy().astype(np.float64)
    if tensor.dtype == torch.bfloat16:
        bits = tensor.view(torch.int16).numpy().astype(np.int32) << 16
    else:
        bits = tensor.view(torch.int32).numpy()
    values = bits.view(np.float32)
    kept = contract.current().subnormals == "keep"
    subnormal = np.copysign((bits & 0x7FFFFF) * (_SUBNORMAL_UNIT * kept), values)
    return np.where(bits & 0x7F800000, values.astype(np.float64), subnormal)


def narrow(x: F, dtype: torch.dtype) -> Tensor:
    """A tensor of float32 values rounded to nearest even in `dtype`, every NaN the canonical one."""
    if dtype == torch.float16:
        bits = x.astype(np.float16).view(np.int16)
    else:
        subnormal = np.abs(x) < _MIN_NORMAL
        bits = np.where(subnormal, np.copysign(0, x), x).astype(np.float32).view(np.int32)
        bits = bits | (np.where(subnormal, np.abs(x), 0) / _SUBNORMAL_UNIT).astype(np.int32)
        if dtype == torch.bfloat16:
            bits = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.int16)
    bits = np.where(np.isnan(x), _CANONICAL_NAN[dtype], bits).astype(bits.dtype)
    return torch.from_numpy(np.asarray(bits, order="C")).view(dtype)  # ascontiguousarray has no scalars


def rounded(x: F, dtype: torch.dtype) -> F:
    """One rounding to the storage dtype."""
    return x if dtype == torch.float32 else widen(narrow(x, dtype))


def constant(value: float) -> F:
    """A Python float as float32."""
    return np.asarray(round32(np.array(value, dtype=np.float64)))


def round32(x: F) -> F:
    """The float32 nearest to x, ties to even, subnormals as the contract says."""
    rules = contract.current()
    if rules.subnormals == "flush":
        x = x * (np.abs(x) >= _TINY[rules.isa])  # times 0 keeps the sign
        return x.astype(np.float32).astype(np.float64)
    tiny = np.abs(x) < _MIN_NORMAL
    shift = 1.5 * 2.0**52 * _SUBNORMAL_UNIT  # in this binade a float64 ends at the subnormals' unit
    return np.where(tiny, np.copysign((x + shift) - shift, x), np.where(tiny, 0, x).astype(np.float32))


def add(a: F, b: F) -> F:
    """a + b"""
    return round32(a + b)


def sub(a: F, b: F) -> F:
    """a - b"""
    return round32(a - b)


def mul(a: F, b: F) -> F:
    """a * b"""
    return round32(a * b)


def div(a: F, b: F) -> F:
    """a / b"""
    return round32(a / b)


def sqrt(a: F) -> F:
    """Square root."""
    return round32(np.sqrt(a))


def fma(a: F, b: F, c: F) -> F:
    """a * b + c with one rounding."""
    product = a * b  # exact: 48 bits
    total = product + c
    t = total - product
    error = ((product - (total - t)) + (c - t)) * total  # TwoSum; only its sign relative to the total matters
    odd = (total.view(np.int64) - (error < 0)) | (np.abs(error) > 0)  # truncated, the last bit sticky
    return round32(odd.view(np.float64))


def madd(a: F, b: F, c: F) -> F:
    """a * b + c outside matrix products, as the contract's backend family does it."""
    return fma(a, b, c) if contract.current().multiply_add == "fma" else add(mul(a, b), c)


# ---------------------------------------------------------------------------------------------------------------------
# orders: each runs over the last axis; `present` marks the elements that exist, others are skipped
# ---------------------------------------------------------------------------------------------------------------------


def chain(a: F, b: F, present: Bools | None = None, step: Any = None, start: F | None = None) -> F:
    """acc = fma(a_k, b_k, acc) from +0 (or `start`), k ascending (`step` replaces fma)."""
    step = step or fma
    acc = np.zeros(np.broadcast_shapes(a.shape[:-1], b.shape[:-1])) if start is None else start
    for k in range(a.shape[-1]):
        new = step(a[..., k], b[..., k], acc)
        acc = new if present is None else np.where(present[..., k], new, acc)
    return acc


def product(a: F, b: F, dtype: torch.dtype, present: Bools | None = None, start: F | None = None) -> F:
    """A sum of a matrix product over the last axis, in the contract's order inside a leaf: a chain of fma, or as the cube's
    declared order has it: groups of 16 products (8 of float32 operands), each product rounded, a tree over the group, groups
    added ascending; what is absent is +0."""
    if contract.current().leaf_order == "chain":
        return chain(a, b, present, start=start)
    group = 8 if dtype == torch.float32 else 16
    terms = mul(a, b) if present is None else np.where(present, mul(a, b), 0)
    terms = np.concatenate([terms, np.zeros((*terms.shape[:-1], -terms.shape[-1] % group))], axis=-1)
    return sum_chain(tree(terms.reshape(*terms.shape[:-1], -1, group)), start=start)


def sum_chain(x: F, present: Bools | None = None, start: F | None = None) -> F:
    """acc = acc + x_k from +0 (or `start`), k ascending."""
    acc = np.zeros(x.shape[:-1]) if start is None else start
    for k in range(x.shape[-1]):
        new = add(acc, x[..., k])
        acc = new if present is None else np.where(present[..., k], new, acc)
    return acc


def tree(x: F) -> F:
    """Balanced binary tree over adjacent pairs; the length is a power of two."""
    while x.shape[-1] > 1:
        x = add(x[..., 0::2], x[..., 1::2])
    return x[..., 0]


def lane_tree(x: F, present: Bools | None = None) -> F:
    """Element j is added to accumulator j mod lanes, j ascending; then a tree over the accumulators."""
    lanes = contract.current().lanes
    index, exists = cut(x.shape[-1], lanes, -(-x.shape[-1] // lanes))
    exists = exists if present is None else exists & present[..., index]
    return tree(sum_chain(np.swapaxes(x[..., index], -1, -2), np.swapaxes(exists, -1, -2)))


def cut(length: int, leaf: int, leaves: int) -> tuple[Ints, Bools]:
    """Element index and existence [leaves, leaf] of `length` elements cut in leaves; absent ones read element 0."""
    index = np.arange(leaves)[:, None] * leaf + np.arange(leaf)
    return np.where(index < length, index, 0), index < length


def _leaves(length: int, leaf: int, leaves: int) -> tuple[Ints, Bools]:
    _require(
        leaf > 0 and leaves > 0 and leaves & (leaves - 1) == 0 and leaf * leaves >= length,
        f"{leaves} leaves of {leaf} do not cover {length} elements; leaves must be a power of two with "
        "leaf * leaves >= length, as contract.leaves() gives",
    )
    return cut(length, min(leaf, length), leaves)  # past the end every leaf is empty


def _head_leaves(heads: int) -> tuple[int, int]:
    """Leaf size and count of a reduction over heads: as many leaves as the number of heads has factors of two."""
    leaves = heads & -heads
    return heads // leaves, leaves


# ---------------------------------------------------------------------------------------------------------------------
# exp and log
# ---------------------------------------------------------------------------------------------------------------------


def _hex(*literals: str) -> list[F]:
    return [np.array(float.fromhex(literal)) for literal in literals]


_EXP_MIN, _EXP_MAX, _LOG2E, _LN2_HIGH, _LN2_LOW = _hex(
    "-0x1.5d4p+6", "0x1.62e42ep+6", "0x1.715476p+0", "0x1.62e4p-1", "0x1.7f7d1cp-20"
)
_EXP_POLYNOMIAL = _hex(
    "0x1.a0d2cep-13", "0x1.6e879cp-10", "0x1.11121p-7", "0x1.555382p-5", "0x1.555554p-3", "0x1p-1"
)  # fmt: skip
_SQRT_HALF, _LOG_LN2_HIGH, _LOG_LN2_LOW = _hex("0x1.6a09e6p-1", "0x1.63p-1", "-0x1.bd0106p-13")
_LOG_POLYNOMIAL = _hex(
    "0x1.204376p-4", "-0x1.d7a37p-4", "0x1.de4a34p-4", "-0x1.fcba9ep-4", "0x1.23d37ep-3", "-0x1.555cap-3",
    "0x1.999d58p-3", "-0x1.fffff8p-3", "0x1.555554p-2",
)  # fmt: skip


def exp32(x: F) -> F:
    """exp, the contract's polynomial; or, for the hardware's, the float32 nearest to the float64 library's."""
    if contract.current().transcendental == "hardware":
        return round32(np.exp(x))
    inside = (x >= _EXP_MIN) & (x <= _EXP_MAX)
    z = np.where(inside, x, 0)
    n = np.rint(mul(z, _LOG2E))
    r = fma(n, -_LN2_HIGH, z)
    r = fma(n, -_LN2_LOW, r)
    p = _EXP_POLYNOMIAL[0]
    for c in _EXP_POLYNOMIAL[1:]:
        p = fma(p, r, c)
    p = fma(p, mul(r, r), r)
    p = add(p, _ONE)
    half = np.rint(n * 0.5)
    y = mul(mul(p, np.ldexp(1.0, half.astype(int))), np.ldexp(1.0, (n - half).astype(int)))
    return np.where(inside, y, np.where(np.isnan(x), x, np.where(x < 0, 0.0, np.inf)))


def log32(x: F) -> F:
    """log, like `exp32`."""
    if contract.current().transcendental == "hardware":
        return round32(np.log(x))
    inside = (x >= _MIN_NORMAL) & (x < np.inf)
    m, e = np.frexp(np.where(inside, x, 1))
    low = m < _SQRT_HALF
    e = np.where(low, e - 1, e).astype(np.float64)
    f = sub(np.where(low, m + m, m), _ONE)
    z = mul(f, f)
    y = _LOG_POLYNOMIAL[0]
    for c in _LOG_POLYNOMIAL[1:]:
        y = fma(y, f, c)
    y = mul(mul(y, f), z)
    y = fma(e, _LOG_LN2_LOW, y)
    y = fma(-_HALF, z, y)
    y = add(f, y)
    y = fma(e, _LOG_LN2_HIGH, y)
    return np.where(inside, y, np.where(np.abs(x) < _MIN_NORMAL, -np.inf, np.where(x > 0, np.inf, np.nan)))


@np.errstate(all="ignore")
def exp(x: Tensor) -> Tensor:
    """exp of a float32 tensor."""
    return narrow(exp32(widen(x)), torch.float32)


@np.errstate(all="ignore")
def log(x: Tensor) -> Tensor:
    """log of a float32 tensor."""
    return narrow(log32(widen(x)), torch.float32)


# ---------------------------------------------------------------------------------------------------------------------
# linear
# ---------------------------------------------------------------------------------------------------------------------


def _same_dtype(*tensors: Tensor | None) -> None:
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    _require(len(dtypes) == 1, f"operands have dtypes {', '.join(sorted(map(str, dtypes)))}; cast them to one")


def _same_size(left: int, right: int, what: str) -> None:
    _require(left == right, f"{what}: sizes {left} and {right} differ; they must be equal")


def _matmul(x: F, weight: F, dtype: torch.dtype, leaf: int, leaves: int, paired: bool = False) -> F:
    """x [*, K], weight [N, K] -> [*, N]; paired: K = [gate, up], and the sum over leaf i of gate goes on through leaf i of up"""
    x = x[..., None, :]
    half = leaf * leaves
    _require(
        not paired or x.shape[-1] == 2 * half,
        f"{leaves} leaves of {leaf} for a paired reduction over {x.shape[-1]}: each half needs whole leaves",
    )
    index, present = _leaves(half if paired else x.shape[-1], leaf, leaves)
    total = product(x[..., index], weight[..., index], dtype, present)
    if paired:
        total = product(x[..., half + index], weight[..., half + index], dtype, present, total)
    return tree(total)


@np.errstate(all="ignore")
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, leaf: int, leaves: int, out_dtype: torch.dtype | None
) -> Tensor:
    """x [*, K], weight [N, K], bias [N] -> [*, N]"""
    _same_dtype(x, weight, bias)
    _same_size(x.shape[-1], weight.shape[1], "linear: K of x and weight")
    y = _matmul(widen(x), widen(weight), x.dtype, leaf, leaves)
    if bias is not None:
        _same_size(bias.numel(), weight.shape[0], "linear: N of bias and weight")
        y = add(y, widen(bias))
    return narrow(y, out_dtype or x.dtype)


@np.errstate(all="ignore")
def linear_dx(
    dy: Tensor, weight: Tensor, leaf: int, leaves: int, out_dtype: torch.dtype | None, paired: bool
) -> Tensor:
    """dy [*, N], weight [N, K] -> dx [*, K]"""
    _same_dtype(dy, weight)
    _same_size(dy.shape[-1], weight.shape[0], "linear_dx: N of dy and weight")
    return narrow(_matmul(widen(dy), widen(weight).T, dy.dtype, leaf, leaves, paired), out_dtype or dy.dtype)


@np.errstate(all="ignore")
def tree_sum(parts: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Subtree roots parts f32 [R, *], bias [the last dimension] -> [*]"""
    count = len(parts)
    _require(
        count > 0 and count & (count - 1) == 0, f"tree_sum over {count} parts; their number must be a power of two"
    )
    root = tree(np.moveaxis(widen(parts), 0, -1))
    return narrow(root if bias is None else add(root, widen(bias)), out_dtype)


def _rows(tokens: int, batch: int, row_offsets: Tensor | None) -> list[Ints]:
    """Token indices of each row that has tokens, in order."""
    if row_offsets is None:
        _require(
            batch > 0 and tokens % batch == 0,
            f"{tokens} tokens are no batch of {batch} rows; pad the sequence dimension",
        )
        return [np.arange(row, tokens, batch) for row in range(batch) if tokens]
    _require(batch == 1, f"batch={batch} together with row_offsets; pass batch=1")
    offsets = [int(i) for i in row_offsets]
    _require(
        bool(offsets) and offsets[0] >= 0 and offsets[-1] <= tokens and offsets == sorted(offsets),
        f"row_offsets {offsets} must ascend within 0 ... {tokens}; pass the pack's cumulative lengths",
    )
    return [np.arange(first, last) for first, last in itertools.pairwise(offsets) if first < last]


def _span_cut(tokens: Ints, spans: int) -> Ints:
    """Tokens of a row [spans, span], as many spans as asked as far as the row can be halved exactly."""
    _require(spans > 0 and spans & (spans - 1) == 0, f"spans={spans} must be a power of two")
    while len(tokens) % spans:
        spans //= 2
    return tokens.reshape(spans, -1)


def _add_rows(grad: Tensor, rows: list[F]) -> None:
    """grad = grad + row, rows ascending."""
    _require(grad.dtype == torch.float32, f"a gradient accumulates in float32, not {grad.dtype}")
    if not rows:
        return
    total = widen(grad)
    for row in rows:
        total = add(total, row)
    grad.copy_(narrow(total, torch.float32))


def _tokens(x: Tensor, dims: int = 1) -> F:
    """Leading dimensions flattened: [tokens, the last `dims` dimensions]."""
    return widen(x.reshape(-1, *x.shape[x.dim() - dims :]) if x.numel() else x.new_empty(0, *x.shape[x.dim() - dims :]))


@np.errstate(all="ignore")
def linear_dw(
    dy: Tensor, x: Tensor, grad: Tensor, batch: int, row_offsets: Tensor | None, spans: int, carry: bool
) -> None:
    """dy [*, N], x [*, K], grad f32 [N, K] is added to, or, with `carry`, is the one row's sum so far"""
    _same_dtype(dy, x)
    a, b = _tokens(dy).T[:, None], _tokens(x).T
    _same_size(a.shape[-1], b.shape[-1], "linear_dw: tokens of dy and x")
    rows = []
    for tokens in _rows(a.shape[-1], batch, row_offsets):
        if carry:
            grad.copy_(narrow(product(a[..., tokens], b[..., tokens], dy.dtype, start=widen(grad)), torch.float32))
            continue
        index = _span_cut(tokens, spans)
        rows.append(tree(product(a[..., index], b[..., index], dy.dtype)))
    _add_rows(grad, rows)


@np.errstate(all="ignore")
def linear_db(dy: Tensor, grad: Tensor, batch: int, row_offsets: Tensor | None, spans: int) -> None:
    """dy [*, N], grad f32 [N] is added to"""
    x = _tokens(dy).T
    rows = []
    for tokens in _rows(x.shape[-1], batch, row_offsets):
        rows.append(tree(sum_chain(x[..., _span_cut(tokens, spans)])))
    _add_rows(grad, rows)


def _grouped(
    x: Tensor, weight: F, offsets: Tensor, leaf: int, leaves: int, out_dtype: torch.dtype, paired: bool = False
) -> Tensor:
    """x [T, K], weight [E, N, K] -> [T, N]"""
    bounds = [int(i) for i in offsets]
    _require(
        len(bounds) == len(weight) + 1 and bounds[0] >= 0 and bounds[-1] <= len(x) and bounds == sorted(bounds),
        f"offsets {bounds} must ascend within the {len(x)} rows of x and be one more than the {len(weight)} experts",
    )
    values = widen(x)
    y = np.zeros((len(x), weight.shape[1]))
    for expert, (first, last) in enumerate(itertools.pairwise(bounds)):
        y[first:last] = _matmul(values[first:last], weight[expert], x.dtype, leaf, leaves, paired)
    return narrow(y, out_dtype)


@np.errstate(all="ignore")
def grouped_linear(
    x: Tensor, weight: Tensor, offsets: Tensor, leaf: int, leaves: int, out_dtype: torch.dtype | None
) -> Tensor:
    """x [T, K] sorted by expert, weight [E, N, K], offsets [E+1] -> [T, N]"""
    _same_dtype(x, weight)
    _same_size(x.shape[-1], weight.shape[2], "grouped_linear: K of x and weight")
    return _grouped(x, widen(weight), offsets, leaf, leaves, out_dtype or x.dtype)


@np.errstate(all="ignore")
def grouped_linear_dx(
    dy: Tensor, weight: Tensor, offsets: Tensor, leaf: int, leaves: int, out_dtype: torch.dtype | None, paired: bool
) -> Tensor:
    """dy [T, N] sorted by expert, weight [E, N, K], offsets [E+1] -> dx [T, K]"""
    _same_dtype(dy, weight)
    _same_size(dy.shape[-1], weight.shape[1], "grouped_linear_dx: N of dy and weight")
    return _grouped(dy, np.swapaxes(widen(weight), 1, 2), offsets, leaf, leaves, out_dtype or dy.dtype, paired)


# ---------------------------------------------------------------------------------------------------------------------
# attention
# ---------------------------------------------------------------------------------------------------------------------


def _any(x: Bools, axis: int) -> Bools:
    return np.asarray(np.any(x, axis=axis))


def _visible(position: int, queries: int, keys: int, window: int) -> Bools:
    """[queries, keys]: which keys the queries at position, position + 1, ... see."""
    p = position + np.arange(queries)[:, None]
    j = np.arange(keys)
    return (j <= p) & ((j > p - window) | (window == 0))


def _scores(q: F, k: F, scale: float, dtype: torch.dtype) -> F:
    """q [H, n, D], k [H, keys, D] -> [H, n, keys]"""
    return mul(product(q[:, :, None], k[:, None], dtype), constant(scale))


def _operand(p: F, dtype: torch.dtype) -> F:
    """P or dS as it enters a matrix product."""
    return p if contract.current().p_dtype == "float32" else rounded(p, dtype)


def _attend(
    q: F, k: F, v: F, position: int, scale: float, window: int, segment_blocks: int, dtype: torch.dtype
) -> tuple[F, F, F]:
    """Queries at position, position + 1, ... of one sequence: q [H, n, D], k, v [H, keys, D] -> o [H, n, D], m, l [H, n]"""
    block = contract.current().kv_block
    heads, queries, _dim = q.shape
    keys = min(k.shape[1], max(position + queries, 0))  # later keys are seen by no query
    blocks = -(-keys // block)
    index, exists = cut(keys, min(block, keys), blocks)
    seen = _visible(position, queries, keys, window)[:, index] & exists  # [n, blocks, block]
    s = _scores(q, k[:, :keys], scale, dtype)[..., index]  # [H, n, blocks, block]
    any_seen = _any(seen, -1)  # [n, blocks]

    block_max = np.where(seen, s, -np.inf).max(-1, initial=-np.inf)
    maximum = np.empty_like(block_max)  # after each block, inside its segment
    for b in range(blocks):
        first = b % segment_blocks == 0
        maximum[..., b] = block_max[..., b] if first else np.maximum(maximum[..., b - 1], block_max[..., b])
    p = np.where(seen, exp32(sub(s, maximum[..., None])), 0)
    sums = lane_tree(p)  # [H, n, blocks]
    values = np.swapaxes(v[:, index], -1, -2)[:, None]  # [H, 1, blocks, D, block]
    products = product(_operand(p, dtype)[..., None, :], values, dtype, seen[:, :, None])  # [H, n, blocks, D]

    started = np.zeros(queries, dtype=bool)
    m, l, o = np.full((heads, queries), -np.inf), np.zeros((heads, queries)), np.zeros(q.shape)  # noqa: E741
    for first_block in range(0, blocks, segment_blocks):
        segment_started = np.zeros(queries, dtype=bool)
        m2, l2, o2 = np.full((heads, queries), -np.inf), np.zeros((heads, queries)), np.zeros(q.shape)
        for b in range(first_block, min(first_block + segment_blocks, blocks)):
            alpha = exp32(sub(m2, maximum[..., b]))
            later, here = segment_started, any_seen[:, b]
            o_new = np.where(later[:, None], madd(o2, alpha[..., None], products[:, :, b]), products[:, :, b])
            l_new = np.where(later, madd(l2, alpha, sums[..., b]), sums[..., b])
            o2, l2 = np.where(here[:, None], o_new, o2), np.where(here, l_new, l2)
            m2 = np.where(here, maximum[..., b], m2)
            segment_started = segment_started | here
        merged = np.maximum(m, m2)
        a, b2 = exp32(sub(m, merged)), exp32(sub(m2, merged))
        o_new = np.where(started[:, None], madd(o, a[..., None], mul(o2, b2[..., None])), o2)
        l_new = np.where(started, madd(l, a, mul(l2, b2)), l2)
        o, l = np.where(segment_started[:, None], o_new, o), np.where(segment_started, l_new, l)  # noqa: E741
        m = np.where(segment_started, np.where(started, merged, m2), m)
        started = started | segment_started
    o = np.where(started[:, None], add(div(o, l[..., None]), _ZERO), 0)
    return o, m, l


def _check_attention(q: Tensor, k: Tensor, v: Tensor, segment_blocks: int, window: int) -> None:
    _same_dtype(q, k, v)
    _require(
        k.shape == v.shape and k.shape[2] == q.shape[2] and k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0,
        f"attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: k and v must be alike, head sizes equal, "
        "query heads a multiple of KV heads",
    )
    _require(
        segment_blocks > 0 and segment_blocks & (segment_blocks - 1) == 0 and window >= 0,
        f"segment_blocks={segment_blocks} must be a power of two, window={window} at least 0",
    )


def _line(line: Tensor, stride: int, q: Tensor, k: Tensor) -> tuple[Ints, int, Ints]:
    """Query tokens, position of the first one and key tokens of one line of `seqs`."""
    first_query, queries, position, first_key, keys = (int(i) for i in line)
    query_tokens = first_query + np.arange(queries) * stride
    key_tokens = first_key + np.arange(keys) * stride
    for tokens, size in ((query_tokens, len(q)), (key_tokens, len(k))):
        _require(
            stride > 0 and position >= 0 and (not len(tokens) or (tokens[0] >= 0 and tokens[-1] < size)),
            f"attention: line {line.tolist()} with stride {stride} leaves the {size} tokens or has a negative position",
        )
    return query_tokens, position, key_tokens


def _heads_first(x: F, tokens: Ints, groups: int = 1) -> F:
    """x [T, H, D] -> [H * groups, len(tokens), D]: each KV head repeated for its query heads."""
    return np.repeat(np.swapaxes(x[tokens], 0, 1), groups, axis=0)


@np.errstate(all="ignore")
def attention(
    q: Tensor, k: Tensor, v: Tensor, seqs: Tensor, stride: int, scale: float, window: int, segment_blocks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q [Tq, Hq, D], k, v [Tk, Hk, D], seqs [R, 5] -> out [Tq, Hq, D], m, l f32 [Hq, Tq]. Tokens of no line give 0."""
    _check_attention(q, k, v, segment_blocks, window)
    groups = q.shape[1] // k.shape[1]
    qs, ks, vs = widen(q), widen(k), widen(v)
    out, m, l = np.zeros(qs.shape), np.full((q.shape[1], len(q)), -np.inf), np.zeros((q.shape[1], len(q)))  # noqa: E741
    for line in seqs:
        queries, position, keys = _line(line, stride, q, k)
        o, m[:, queries], l[:, queries] = _attend(
            _heads_first(qs, queries), _heads_first(ks, keys, groups), _heads_first(vs, keys, groups),
            position, scale, window, segment_blocks, q.dtype,
        )  # fmt: skip
        out[queries] = np.swapaxes(o, 0, 1)
    return narrow(out, q.dtype), narrow(add(m, _ZERO), torch.float32), narrow(l, torch.float32)


def _fold(t: F, has: Bools) -> F:
    """Sums t[b] that `has[b]`, added ascending (first t, then acc + t); the others are skipped."""
    total, started = np.zeros(t.shape[1:]), np.zeros(has.shape[1:], dtype=bool)
    for b in range(len(t)):
        total = np.where(has[b], np.where(started, add(total, t[b]), t[b]), total)
        started = started | has[b]
    return total


def _over_blocks(a: F, b: F, dtype: torch.dtype, present: Bools, blocks: list[slice]) -> F:
    """A gradient's sum over the last axis inside a segment: block by block, or through all of it."""
    if contract.current().attention_gradient == "chain":
        return product(a, b, dtype, present)
    sums = [product(a[..., block], b[..., block], dtype, present[..., block]) for block in blocks]
    return _fold(np.stack(sums), np.stack([_any(present[..., block], -1) for block in blocks]))


def _blocks(position: int, length: int, size: int) -> list[slice]:
    """`length` elements from `position` on, in blocks of `size` positions aligned at position 0."""
    edges = [0, *range(-position % size or size, length, size), length]
    return list(itertools.starmap(slice, itertools.pairwise(edges)))


def _over_heads(x: F, groups: int) -> F:
    """[Hq, keys, D] -> [Hk, keys, D]: a chain that starts at the first head's value in each leaf, a tree over leaves."""
    size, leaves = _head_leaves(groups)
    x = x.reshape(-1, leaves, size, *x.shape[1:])
    total = x[:, :, 0]
    for head in range(1, size):
        total = add(total, x[:, :, head])
    return tree(np.moveaxis(total, 1, -1))


@np.errstate(all="ignore")
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
    """The operands and results of `attention` and dout [Tq, Hq, D] -> dq [Tq, Hq, D], dk, dv [Tk, Hk, D]."""
    _check_attention(q, k, v, segment_blocks, window)
    _same_dtype(q, dout, out)
    groups = q.shape[1] // k.shape[1]
    zero, factor, block = _ZERO, constant(scale), contract.current().kv_block
    qs, ks, vs, douts, outs, ms, ls = (widen(x) for x in (q, k, v, dout, out, m, l))
    dq, dk, dv = np.zeros(qs.shape), np.zeros(ks.shape), np.zeros(vs.shape)
    for group in _line_groups(seqs):
        roots: list[tuple[F, F]] = []  # of each line
        key_tokens = max((_line(line, stride, q, k)[2] for line in group), key=len)
        for line in group:
            queries, position, keys = _line(line, stride, q, k)
            keys = keys[: position + len(queries)]  # later keys are seen by no query
            root_k, root_v = (np.zeros((len(key_tokens), *x.shape[1:])) for x in (ks, vs))
            roots.append((root_k, root_v))
            if not len(queries) or not len(keys):
                continue
            qh, oh, doh = (_heads_first(x, queries) for x in (qs, outs, douts))
            kh, vh = (_heads_first(x, keys, groups) for x in (ks, vs))
            seen = _visible(position, len(queries), len(keys), window)
            p = div(exp32(sub(_scores(qh, kh, scale, q.dtype), ms[:, queries, None])), ls[:, queries, None])
            delta = lane_tree(mul(doh, oh))
            ds = mul(p, sub(product(doh[:, :, None], vh[:, None], q.dtype), delta[..., None]))
            p, ds = _operand(p, q.dtype), _operand(ds, q.dtype)

            segments, has = [], []
            for segment in _blocks(0, len(keys), block * segment_blocks):
                blocks = _blocks(0, segment.stop - segment.start, block)
                columns, visible = kh[:, None, segment].swapaxes(2, 3), seen[:, None, segment]
                segments.append(_over_blocks(ds[:, :, None, segment], columns, q.dtype, visible, blocks))
                has.append(_any(visible, -1))
            dq[queries] = np.swapaxes(add(mul(_fold(np.stack(segments), np.stack(has)), factor), zero), 0, 1)

            blocks = _blocks(position, len(queries), block)
            for root, weights, x in ((root_k, ds, qh), (root_v, p, doh)):
                rows, columns = weights.swapaxes(1, 2)[:, :, None], x[:, None].swapaxes(2, 3)
                total = _over_blocks(rows, columns, q.dtype, seen.T[:, None], blocks)  # [Hq, keys, D]
                root[: len(keys)] = np.swapaxes(_over_heads(total, groups), 0, 1)
        for target, parts in ((dk, [root for root, _ in roots]), (dv, [root for _, root in roots])):
            target[key_tokens] = tree(np.stack(parts, -1))
    dk = dk if partial else mul(dk, factor)
    dtype = torch.float32 if partial else k.dtype
    return narrow(dq, q.dtype), narrow(add(dk, zero), dtype), narrow(add(dv, zero), dtype)


def _line_groups(seqs: Tensor) -> list[list[Tensor]]:
    """Neighbouring lines with the same keys."""
    groups: list[list[Tensor]] = []
    for line in seqs:
        if groups and int(line[4]) and int(groups[-1][0][4]) and int(line[3]) == int(groups[-1][0][3]):
            groups[-1].append(line)
        else:
            groups.append([line])
    for group in groups:
        _require(
            len(group) & (len(group) - 1) == 0,
            f"{len(group)} lines of seqs share the keys from token {int(group[0][3])} on; their number must be a power of two",
        )
    return groups


def _check_cache(kv_cache: Tensor, heads: int, dim: int) -> int:
    """The page size of a cache."""
    block = contract.current().kv_block
    page = kv_cache.shape[2]
    _require(
        kv_cache.shape[1] == heads and kv_cache.shape[3] == 2 * dim,
        f"kv_cache {tuple(kv_cache.shape)} does not hold {heads} heads of 2 * {dim}; allocate [blocks, heads, page, 2 * D]",
    )
    _require(
        page > 0 and page % 16 == 0 and (block % page == 0 or page % block == 0) and dim % 8 == 0 and dim <= 256,
        f"page size {page} must be a multiple of 16 that divides {block} or is a multiple of it, and head size {dim} a "
        "multiple of 8 up to 256",
    )
    return page


@np.errstate(all="ignore")
def paged_cache_write(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """k, v [T, Hk, D], kv_cache [blocks, Hk, page, 2 * D] is written, slot_mapping [T]; a copy: bits are kept."""
    _same_dtype(k, v, kv_cache)
    page = _check_cache(kv_cache, k.shape[1], k.shape[2])
    dim, slots = k.shape[2], len(kv_cache) * page
    _require(len(slot_mapping) <= len(k), f"{len(slot_mapping)} slots for {len(k)} tokens; pass at most one a token")
    flat = kv_cache.flatten(2)
    for token, slot in enumerate(slot_mapping.tolist()):
        _require(slot < slots, f"slot {slot} lies outside the cache of {slots} slots; allocate more blocks")
        if slot >= 0:
            block, offset = divmod(slot, page)
            flat[block, :, : dim * page].view(-1, dim, page)[:, :, offset] = k[token]
            flat[block, :, dim * page :].view(-1, page, dim)[:, offset] = v[token]


@np.errstate(all="ignore")
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
    """q [T, Hq, D], kv_cache [blocks, Hk, page, 2 * D], block_table [R, *], query_start_loc [R+1], seq_lens [R] -> [T, Hq, D]"""
    heads, dim = kv_cache.shape[1], q.shape[2]
    page = _check_cache(kv_cache, heads, dim)
    flat = kv_cache.flatten(2)
    keys = flat[..., : dim * page].reshape(-1, heads, dim, page).movedim(3, 1)  # [blocks, page, heads, dim]
    values = flat[..., dim * page :].reshape(-1, heads, page, dim).movedim(2, 1)
    out = torch.zeros_like(q)
    bounds = query_start_loc.tolist()
    for request, length in enumerate(seq_lens.tolist()):
        first, last = bounds[request], bounds[request + 1]
        _require(
            0 <= first <= last <= len(q) and last - first <= length,
            f"request {request} has {length} positions and queries {first} ... {last} of {len(q)}; its queries are its last "
            "positions",
        )
        pages = block_table[request, : -(-length // page)].long()
        _require(
            len(pages) * page >= length and bool(((pages >= 0) & (pages < len(kv_cache))).all()),
            f"block_table of request {request}, {pages.tolist()}, must name {-(-length // page)} of the {len(kv_cache)} blocks",
        )
        k, v = keys[pages].flatten(0, 1)[:length], values[pages].flatten(0, 1)[:length]
        line = torch.tensor([[0, last - first, length - (last - first), 0, length]], dtype=torch.int32)
        out[first:last] = attention(q[first:last], k, v, line, 1, scale, window, segment_blocks)[0]
    return out


# ---------------------------------------------------------------------------------------------------------------------
# norm, rotary, activation, embedding
# ---------------------------------------------------------------------------------------------------------------------


@np.errstate(all="ignore")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [*, H], weight [H] -> y [*, H], rstd f32 [*]"""
    _same_dtype(x, weight)
    _same_size(x.shape[-1], weight.numel(), "rms_norm: H of x and weight")
    values = widen(x)
    mean = div(lane_tree(mul(values, values)), np.array(x.shape[-1], dtype=np.float64))
    r = div(_ONE, sqrt(add(mean, constant(eps))))
    n = rounded(mul(values, r[..., None]), x.dtype)
    return narrow(mul(n, widen(weight)), x.dtype), narrow(r, torch.float32)


@np.errstate(all="ignore")
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual [*, H], weight [H] -> y, x + residual [*, H], rstd f32 [*]"""
    _same_dtype(x, residual, weight)
    total = narrow(add(widen(x), widen(residual)), x.dtype)
    y, rstd = rms_norm(total, weight, eps)
    return y, total, rstd


@np.errstate(all="ignore")
def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, dskip: Tensor | None) -> Tensor:
    """dy, x, dskip [*, H], weight [H], rstd f32 [*] -> dx [*, H]"""
    _same_dtype(dy, x, weight, dskip)
    r = widen(rstd)[..., None]
    g = mul(widen(dy), widen(weight))
    h = mul(widen(x), r)
    c = div(lane_tree(mul(g, h)), np.array(x.shape[-1], dtype=np.float64))[..., None]
    dx = mul(r, madd(-h, c, g))
    if dskip is not None:
        dx = add(rounded(dx, x.dtype), widen(dskip))
    return narrow(dx, x.dtype)


def _over_heads_of_a_token(g: F, n: F) -> F:
    """g, n [T, heads, D] -> [T, D]"""
    index, present = cut(g.shape[1], *_head_leaves(g.shape[1]))
    g, n = (np.moveaxis(a[:, index], -1, 1) for a in (g, n))  # [T, D, leaves, leaf]
    return tree(chain(g, n, present, madd))


@np.errstate(all="ignore")
def rms_norm_dw(
    dy: Tensor, x: Tensor, rstd: Tensor, grad: Tensor, batch: int, row_offsets: Tensor | None, spans: int
) -> None:
    """dy, x [T, H] or [T, heads, H], rstd f32 [T] or [T, heads], grad f32 [H] is added to"""
    _same_dtype(dy, x)
    g, n = widen(dy), rounded(mul(widen(x), widen(rstd)[..., None]), x.dtype)
    per_token = _over_heads_of_a_token(g, n).T if x.dim() == 3 else None  # [H, T]
    rows = []
    for tokens in _rows(len(x), batch, row_offsets):
        index = _span_cut(tokens, spans)
        if per_token is None:
            rows.append(tree(chain(g.T[:, index], n.T[:, index], None, madd)))
        else:
            rows.append(tree(sum_chain(per_token[:, index])))
    _add_rows(grad, rows)


@np.errstate(all="ignore")
def head_terms(dy: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
    """dy, x [T, heads, D], rstd f32 [T, heads] -> f32 [T, D]"""
    _same_dtype(dy, x)
    _require(
        x.dim() == 3 and x.shape == dy.shape and rstd.shape == x.shape[:2],
        f"head_terms: dy {tuple(dy.shape)}, x {tuple(x.shape)}, rstd {tuple(rstd.shape)}; give [T, heads, D] and [T, heads]",
    )
    n = rounded(mul(widen(x), widen(rstd)[..., None]), x.dtype)
    return narrow(_over_heads_of_a_token(widen(dy), n), torch.float32)


@np.errstate(all="ignore")
def residual_add(x: Tensor, y: Tensor) -> Tensor:
    """x, y [*] -> x + y"""
    _same_dtype(x, y)
    _require(x.shape == y.shape, f"residual_add: shapes {tuple(x.shape)} and {tuple(y.shape)} differ")
    return narrow(add(widen(x), widen(y)), x.dtype)


@np.errstate(all="ignore")
def rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, inverse: bool) -> Tensor:
    """x [T, H, D], cos, sin f32 [P, R/2], positions [T] -> [T, H, D]"""
    half = cos.shape[1]
    _require(2 * half <= x.shape[2], f"rotary_dim {2 * half} exceeds the head size {x.shape[2]}")
    _require(
        bool(((positions >= 0) & (positions < len(cos))).all()),
        f"positions {positions.tolist()} leave the {len(cos)} rows of the rotary table; build it for the longest sequence",
    )
    a, b = widen(x[..., :half]), widen(x[..., half : 2 * half])
    c, s = widen(cos[positions])[:, None], widen(sin[positions])[:, None]
    s = -s if inverse else s
    y = x.detach().clone(memory_format=torch.contiguous_format)
    y[..., :half] = narrow(madd(a, c, -mul(b, s)), x.dtype)
    y[..., half : 2 * half] = narrow(madd(b, c, mul(a, s)), x.dtype)
    return y


@np.errstate(all="ignore")
def swiglu(x: Tensor) -> Tensor:
    """x = [gate, up] [*, 2F] -> [*, F]"""
    _require(x.shape[-1] % 2 == 0, f"swiglu: the last dimension {x.shape[-1]} is no [gate, up]; it must be even")
    g, u = np.split(widen(x), 2, axis=-1)
    return narrow(mul(div(g, add(_ONE, exp32(-g))), u), x.dtype)


@np.errstate(all="ignore")
def swiglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """dy [*, F], x [*, 2F] -> [*, 2F]"""
    _same_dtype(dy, x)
    _same_size(2 * dy.shape[-1], x.shape[-1], "swiglu_backward: 2F of dy and x")
    one = _ONE
    d = widen(dy)
    g, u = np.split(widen(x), 2, axis=-1)
    e = exp32(-g)
    q = div(one, add(one, e))
    a = div(g, add(one, e))
    t = madd(a, sub(one, q), q)
    return narrow(np.concatenate([mul(mul(d, u), t), mul(d, a)], axis=-1), x.dtype)


@np.errstate(all="ignore")
def embedding(weight: Tensor, ids: Tensor, vocab_start: int, vocab_size: int) -> Tensor:
    """weight [rows, H], ids [*] -> [*, H]; a copy: bits are kept"""
    _require(
        bool(((ids >= 0) & (ids < vocab_size)).all()),
        f"token ids {ids.tolist()} leave the vocabulary of {vocab_size}; check the tokenizer",
    )
    local = ids - vocab_start
    owned = (local >= 0) & (local < len(weight))
    bits = torch.int32 if weight.dtype == torch.float32 else torch.int16  # torch's bf16 copies change NaN payloads
    table = weight.detach().contiguous().view(bits)
    out = table.new_zeros(*ids.shape, table.shape[1])
    out[owned] = table[local[owned]]
    return out.view(weight.dtype)


@np.errstate(all="ignore")
def embedding_dw(
    dy: Tensor, ids: Tensor, grad: Tensor, vocab_start: int, batch: int, row_offsets: Tensor | None
) -> None:
    """dy [*, H], ids [*], grad f32 [rows, H] is added to"""
    _require(grad.dtype == torch.float32, f"a gradient accumulates in float32, not {grad.dtype}")
    total, values = widen(grad), _tokens(dy)
    local = (ids.reshape(-1) - vocab_start).tolist()
    _same_size(len(local), len(values), "embedding_dw: tokens of ids and dy")
    touched = set()
    for tokens in _rows(len(values), batch, row_offsets):
        for token in tokens:
            row = local[token]
            if 0 <= row < len(total):
                total[row] = add(total[row], values[token])
                touched.add(row)
    for row in touched:
        grad[row] = narrow(total[row], torch.float32)


# ---------------------------------------------------------------------------------------------------------------------
# logprob
# ---------------------------------------------------------------------------------------------------------------------


def _scaled(logits: Tensor, temperature: Tensor | None) -> F:
    """z = logits / temperature, [T, V]"""
    _require(logits.dtype == torch.float32, f"logits are float32, not {logits.dtype}; do not round them")
    z = widen(logits)
    return z if temperature is None else div(z, widen(temperature)[:, None])


def _one_hot(tokens: Tensor, vocab_start: int, columns: int) -> Bools:
    return np.asarray(tokens.numpy()[:, None] - vocab_start == np.arange(columns))


@np.errstate(all="ignore")
def vocab_max(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """logits f32 [T, V], temperature f32 [T] -> M f32 [T]"""
    _require(logits.shape[1] > 0, "vocab_max: no columns; a rank must own at least one")
    return narrow(add(_scaled(logits, temperature).max(-1), _ZERO), torch.float32)


@np.errstate(all="ignore")
def vocab_sums(
    logits: Tensor, max: Tensor, temperature: Tensor | None, leaf: int, leaves: int, entropy: bool
) -> tuple[Tensor, Tensor]:
    """logits f32 [T, V], max f32 [T] -> S f32 [T], E f32 [T] or [0]"""
    index, present = _leaves(logits.shape[1], leaf, leaves)
    d = sub(_scaled(logits, temperature), widen(max)[:, None])
    e = exp32(d)
    total = narrow(tree(lane_tree(e[:, index], present)), torch.float32)
    if not entropy:
        return total, total.new_empty(0)
    terms = np.where(e == 0, 0, mul(e, d))
    return total, narrow(tree(lane_tree(terms[:, index], present)), torch.float32)


@np.errstate(all="ignore")
def vocab_logprob(
    logits: Tensor, tokens: Tensor, max: Tensor, S: Tensor, E: Tensor, temperature: Tensor | None, vocab_start: int
) -> tuple[Tensor, Tensor]:
    """logits f32 [T, V], tokens [T], max, S f32 [T], E f32 [T] or [0] -> logprob f32 [T], entropy f32 like E"""
    d = sub(_scaled(logits, temperature), widen(max)[:, None])
    log_sum = log32(widen(S))
    chosen = _one_hot(tokens, vocab_start, d.shape[1])
    logprob = np.zeros(len(d))
    rows, columns = np.nonzero(chosen)
    logprob[rows] = sub(d[rows, columns], log_sum[rows])
    entropy = sub(log_sum, div(widen(E), widen(S))) if len(E) else widen(E)
    return narrow(logprob, torch.float32), narrow(entropy, torch.float32)


@np.errstate(all="ignore")
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
    """logits f32 [T, V], tokens [T], the others f32 [T] -> dlogits [T, V]"""
    d = sub(_scaled(logits, temperature), widen(max)[:, None])
    total = widen(S)[:, None]
    p = div(exp32(d), total)
    one_hot = _one_hot(tokens, vocab_start, d.shape[1]).astype(np.float64)
    t = mul(sub(p, one_hot), -widen(grad_logprob)[:, None])
    if grad_entropy is not None:
        term = mul(p, add(sub(d, log32(total)), widen(entropy)[:, None]))
        t = madd(-widen(grad_entropy)[:, None], np.where(p == 0, 0, term), t)
    return narrow(t if temperature is None else div(t, widen(temperature)[:, None]), out_dtype)


@np.errstate(all="ignore")
def token_logprob(
    logits: Tensor, tokens: Tensor, temperature: Tensor | None, leaf: int, leaves: int, entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits f32 [T, V], tokens [T] -> logprob f32 [T], entropy f32 [T] or [0], M, S f32 [T]"""
    _require(
        bool(((tokens >= 0) & (tokens < logits.shape[1])).all()),
        f"tokens {tokens.tolist()} leave the vocabulary of {logits.shape[1]} columns; check the tokenizer",
    )
    maximum = vocab_max(logits, temperature)
    S, E = vocab_sums(logits, maximum, temperature, leaf, leaves, entropy)
    logprob, ent = vocab_logprob(logits, tokens, maximum, S, E, temperature, 0)
    return logprob, ent, maximum, S


# ---------------------------------------------------------------------------------------------------------------------
# mixture of experts
# ---------------------------------------------------------------------------------------------------------------------


def _largest(keys: F, count: int) -> Ints:
    """Indices of the `count` largest keys of each row, larger first, ties to the smaller index."""
    return np.argsort(-keys, axis=-1, kind="stable")[..., :count]


@np.errstate(all="ignore")
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
    """logits f32 [T, E], expert_bias f32 [E] -> weights f32 [T, k], ids int32 [T, k], ascending ids"""
    tokens, experts = logits.shape
    _require(score in ("softmax", "sigmoid"), f"router score {score!r} is not served; use softmax or sigmoid")
    _require(
        score == "sigmoid" or (expert_bias is None and groups == 1),
        f"a softmax router takes no expert bias and no groups (groups={groups}); use a sigmoid router",
    )
    _require(
        groups > 0 and experts % groups == 0 and (groups == 1 or (0 < topk_groups <= groups and experts // groups > 1)),
        f"{experts} experts in {groups} groups of which {topk_groups} are chosen: groups must be equal, of 2 experts or more",
    )
    candidates = experts if groups == 1 else experts // groups * topk_groups
    _require(0 < topk <= candidates, f"topk={topk} must be between 1 and the {candidates} candidate experts")
    z = widen(logits)
    _require(not np.isnan(z).any(), "a router logit is NaN; the model has diverged before this layer")
    if score == "softmax":
        keys = z
        values = exp32(sub(z, z.max(-1, keepdims=True)))
    else:
        values = _sigmoid(z)
        keys = values if expert_bias is None else add(values, widen(expert_bias))
    if groups > 1:
        grouped = keys.reshape(tokens, groups, experts // groups)
        two = np.take_along_axis(grouped, _largest(grouped, 2), -1)
        chosen = _largest(add(two[..., 0], two[..., 1]), topk_groups)
        allowed = np.zeros((tokens, groups), dtype=bool)
        np.put_along_axis(allowed, chosen, True, -1)
        keys = np.where(np.repeat(allowed, experts // groups, -1), keys, -np.inf)
    ids = np.sort(_largest(keys, topk), axis=-1)
    w = np.take_along_axis(values, ids, -1)
    if score == "softmax":
        w = div(w, lane_tree(w if renormalize else values)[:, None])
    elif renormalize:
        w = div(w, add(lane_tree(w), constant(eps))[:, None])
    if constant(scaling) != 1:
        w = mul(w, constant(scaling))
    return narrow(w, torch.float32), torch.from_numpy(ids.astype(np.int32))


def _sigmoid(z: F) -> F:
    return div(_ONE, add(_ONE, exp32(-z)))


@np.errstate(all="ignore")
def moe_route_backward(
    dweights: Tensor, logits: Tensor, ids: Tensor, score: str, renormalize: bool, scaling: float, eps: float
) -> Tensor:
    """dweights f32 [T, k], logits f32 [T, E], ids int32 [T, k] ascending -> dlogits f32 [T, E]"""
    _require(score in ("softmax", "sigmoid"), f"router score {score!r} is not served; use softmax or sigmoid")
    _require(
        dweights.shape == ids.shape and len(dweights) == len(logits),
        f"dweights {tuple(dweights.shape)} and ids {tuple(ids.shape)} for logits {tuple(logits.shape)}: give [T, k], [T, E]",
    )
    z, where = widen(logits), ids.numpy().astype(np.int64)
    _require(not np.isnan(z).any(), "a router logit is NaN; the model has diverged before this layer")
    _require(bool(((where >= 0) & (where < z.shape[1])).all()), f"expert ids leave the {z.shape[1]} experts")
    d = widen(dweights)
    if constant(scaling) != 1:
        d = mul(d, constant(scaling))
    values = _sigmoid(z) if score == "sigmoid" else exp32(sub(z, z.max(-1, keepdims=True)))
    v = np.take_along_axis(values, where, -1)
    slope = mul(v, sub(_ONE, v))
    dz = np.zeros(z.shape)
    if score == "sigmoid" and not renormalize:
        np.put_along_axis(dz, where, mul(d, slope), -1)
        return narrow(dz, torch.float32)
    total = lane_tree(v if renormalize else values)[:, None]
    if score == "sigmoid":
        total = add(total, constant(eps))
    p = div(v, total)
    centred = sub(d, c := lane_tree(mul(d, p))[:, None])
    if not renormalize:
        dz = mul(div(values, total), sub(_ZERO, c))
    np.put_along_axis(dz, where, mul(div(centred, total), slope) if score == "sigmoid" else mul(p, centred), -1)
    return narrow(dz, torch.float32)


@np.errstate(all="ignore")
def moe_combine(y: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """y [P, H], slots [T, k] ascending by expert, negative = skip, weights f32 [T, k] -> [T, H]"""
    _require(
        bool((slots < len(y)).all()),
        f"a slot leaves the {len(y)} rows of expert outputs (largest: {int(slots.max()) if slots.numel() else 0})",
    )
    rows = slots.numpy()
    chosen = widen(y)[np.where(rows < 0, 0, rows)] if len(y) else np.zeros((*rows.shape, y.shape[1]))
    terms = np.swapaxes(chosen, 1, 2)  # [T, H, k]
    return narrow(chain(widen(weights)[:, None], terms, (rows >= 0)[:, None], madd), y.dtype)


@np.errstate(all="ignore")
def expert_weight_backward(g: Tensor, a: Tensor, weights: Tensor, leaf: int, leaves: int) -> tuple[Tensor, Tensor]:
    """g f32, a [P, F], weights f32 [P] -> dweights f32 [P], da [P, F]"""
    _require(
        g.dim() == 2 and g.shape == a.shape and weights.shape == g.shape[:1],
        f"g {tuple(g.shape)}, a {tuple(a.shape)}, weights {tuple(weights.shape)}: give [P, F] twice and [P]",
    )
    rows = widen(g)
    index, present = _leaves(rows.shape[1], leaf, leaves)
    dweights = tree(lane_tree(mul(rows, widen(a))[:, index], present))
    return narrow(dweights, torch.float32), narrow(mul(widen(weights)[:, None], rows), a.dtype)


def _check_gate(y: Tensor, logits: Tensor) -> None:
    _require(
        logits.dtype == torch.float32 and logits.shape == (*y.shape[:-1], 1),
        f"gate logits {logits.dtype} {tuple(logits.shape)} for y {tuple(y.shape)}: give one float32 logit a token, [*, 1]",
    )


@np.errstate(all="ignore")
def sigmoid_gate(y: Tensor, logits: Tensor) -> Tensor:
    """y [*, H], logits f32 [*, 1] -> [*, H]"""
    _check_gate(y, logits)
    return narrow(mul(widen(y), _sigmoid(widen(logits))), y.dtype)


@np.errstate(all="ignore")
def sigmoid_gate_backward(dout: Tensor, y: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """dout, y [*, H], logits f32 [*, 1] -> dy [*, H], dlogits f32 [*, 1]"""
    _same_dtype(dout, y)
    _check_gate(y, logits)
    gate, d = _sigmoid(widen(logits)), widen(dout)
    total = lane_tree(mul(d, widen(y)))[..., None]
    return narrow(mul(d, gate), y.dtype), narrow(mul(total, mul(gate, sub(_ONE, gate))), torch.float32)
