"""Every operator, declared once: operands, attributes, results and what must hold among them. Meaning: docs/op-schemas.md.

From these rows come the `torch.library` schema, the fake kernel and the check that runs before any backend
(`ops/schemas.py`), and the tables of docs/op-schemas.md. No import outside the standard library: builds read it without torch.

A row's signature, `name(parameters) -> results`, in this notation:

- `x: S[*, K]` a tensor. `S` and `U` are storage dtypes (float32, bfloat16, float16), one for all operands of that letter;
  `f32`, `i32`, `i64` are themselves. A dimension is a number, a name (equal wherever it stands), or a multiple and offset of
  one (`2*F`, `R+1`); `*` is any number of dimensions, the same wherever it stands, and `star` is that number.
- after the shape: `?` may be None; `!` is written in place; `^` may be dense in its first dimension instead of the last;
  `@host` lives on the CPU whatever the device of the others. Dimensions after `|` must be dense; elsewhere a backend takes any
  strides (it may copy an operand whose last dimension is not dense).
- attributes: `int`, `float`, `bool`, `dtype` (a storage dtype), `dtype?` (None: S), or the allowed strings, `softmax|sigmoid`.
- results: `S[…]`, `f32[…]`, `attribute[…]` (that dtype), `flag?f32:S[…]` (float32 if the flag holds); sizes are expressions.

Conditions are expressions over dimensions and attributes that Python and C++ read alike (no `/`, no chained comparison; a
string attribute is the index of its choice; an optional operand says whether it was given).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_TENSOR = re.compile(r"(\w+(?:\?\w+:\w+)?)\[(.*?)\]([?!^]*)(@host)?$")
_DIMENSION = re.compile(r"(?:(?P<factor>\d+)\*)?(?P<name>[A-Za-z]\w*)(?:\+(?P<offset>\d+))?$|(?P<number>\d+)$")
OPERAND_DTYPES = ("S", "U", "f32", "i32", "i64")
INT_LIMIT = 1 << 31  # of an int attribute's magnitude, so that no product in a condition overflows


@dataclass(frozen=True)
class Dimension:
    """`factor * name + offset`, or the number `offset` if there is no name."""

    factor: int
    name: str
    offset: int

    def __str__(self) -> str:
        if not self.name:
            return str(self.offset)
        return (f"{self.factor}*" if self.factor > 1 else "") + self.name + (f"+{self.offset}" if self.offset else "")


@dataclass(frozen=True)
class Operand:
    """A tensor parameter.

    Attributes:
        leading, trailing: the dimensions before and after `*`; without `*` all are leading and `star` is false.
        dense: how many of the last dimensions must be dense in memory.
        optional, mutated, transposable, host: the marks `?`, `!`, `^`, `@host`.
    """

    name: str
    dtype: str
    leading: tuple[Dimension, ...]
    star: bool
    trailing: tuple[Dimension, ...]
    dense: int
    optional: bool
    mutated: bool
    transposable: bool
    host: bool

    @property
    def shape(self) -> str:
        """As in the signature, without the mark of dense dimensions."""
        return f"[{', '.join([*map(str, self.leading), *'*' * self.star, *map(str, self.trailing)])}]"


@dataclass(frozen=True)
class Attribute:
    """A parameter that is no tensor: kind `int`, `float`, `bool`, `dtype` or `str` (one of `choices`)."""

    name: str
    kind: str
    optional: bool = False
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """A new tensor. `flag`: its dtype is `dtype` if that attribute holds, else `otherwise`. `shape`: expressions, or `*`."""

    name: str
    flag: str
    dtype: str
    otherwise: str
    shape: tuple[str, ...]


@dataclass(frozen=True)
class Operator:
    """One row.

    Attributes:
        family: the section of docs/op-schemas.md.
        signature: see the module's docstring.
        meaning: one line for the docs.
        conditions: each holds, or the call is refused.
        values: says what is wrong with the values of operands on the CPU, or None; its mapping holds every parameter and dimension.
    """

    family: str
    signature: str
    meaning: str
    conditions: tuple[str, ...]
    values: Callable[[Mapping[str, Any]], str | None] | None
    name: str
    parameters: tuple[Operand | Attribute, ...]
    results: tuple[Result, ...]

    @property
    def operands(self) -> tuple[Operand, ...]:
        return tuple(p for p in self.parameters if isinstance(p, Operand))

    @property
    def schema(self) -> str:
        """The `torch.library` schema."""
        kinds = {"int": "int", "float": "float", "bool": "bool", "dtype": "ScalarType", "str": "str"}
        parts, alias = [], iter("abcdef")
        for p in self.parameters:
            kind = kinds[p.kind] if isinstance(p, Attribute) else f"Tensor({next(alias)}!)" if p.mutated else "Tensor"
            parts.append(f"{kind}{'?' if p.optional else ''} {p.name}")
        results = ", ".join(f"Tensor {r.name}".strip() for r in self.results)
        return f"{self.name}({', '.join(parts)}) -> {results if len(self.results) == 1 else f'({results})'}"


def _dimension(text: str) -> Dimension:
    match = _DIMENSION.match(text)
    if match is None:
        raise ValueError(f"{text!r} is no dimension")
    if match["number"]:
        return Dimension(0, "", int(match["number"]))
    return Dimension(int(match["factor"] or 1), match["name"], int(match["offset"] or 0))


def _operand(name: str, dtype: str, shape: str, marks: str, host: str | None) -> Operand:
    strided, bar, dense = shape.partition("|")
    dims = [d.strip() for d in f"{strided},{dense}".split(",") if d.strip()]
    star = dims.index("*") if "*" in dims else len(dims)
    return Operand(
        name,
        dtype,
        tuple(map(_dimension, dims[:star])),
        star < len(dims),
        tuple(map(_dimension, dims[star + 1 :])),
        len(dense.split(",")) if bar else 0,
        "?" in marks,
        "!" in marks,
        "^" in marks,
        host is not None,
    )


def _parameter(text: str) -> Operand | Attribute:
    name, _, kind = (part.strip() for part in text.partition(":"))
    tensor = _TENSOR.match(kind)
    if tensor is not None:
        if tensor[1] not in OPERAND_DTYPES:
            raise ValueError(f"{text!r}: dtype {tensor[1]!r} is none of {', '.join(OPERAND_DTYPES)}")
        return _operand(name, tensor[1], tensor[2], tensor[3], tensor[4])
    if "|" in kind:
        return Attribute(name, "str", False, tuple(kind.split("|")))
    if kind.rstrip("?") not in ("int", "float", "bool", "dtype"):
        raise ValueError(f"{text!r} is no parameter")
    return Attribute(name, kind.rstrip("?"), kind.endswith("?"))


def _result(text: str) -> Result:
    name, _, kind = (part.strip() for part in text.rpartition(": "))
    tensor = _TENSOR.match(kind)
    if tensor is None:
        raise ValueError(f"{text!r} is no result")
    flag, _, dtypes = tensor[1].rpartition("?")
    dtype, _, otherwise = dtypes.partition(":")
    return Result(name, flag, dtype, otherwise, tuple(d.strip() for d in tensor[2].split(",")))


def _split(text: str) -> list[str]:
    """At commas outside brackets."""
    return [part.strip() for part in re.split(r",(?![^\[]*\])", text) if part.strip()]


OPERATORS: dict[str, Operator] = {}


def _row(
    family: str,
    signature: str,
    meaning: str,
    *conditions: str,
    values: Callable[[Mapping[str, Any]], str | None] | None = None,
) -> None:
    match = re.match(r"(\w+)\((.*)\) -> (.*)$", signature)
    if match is None:
        raise ValueError(f"{signature!r} is no signature")
    results = match[3][1:-1] if match[3].startswith("(") else match[3]
    OPERATORS[match[1]] = Operator(
        family,
        signature,
        meaning,
        conditions,
        values,
        match[1],
        tuple(map(_parameter, _split(match[2]))),
        tuple(map(_result, _split(results))),
    )


# ---- conditions and checks of values that several rows share ----


def _cut(n: str) -> tuple[str, ...]:
    """`leaves` (a power of two) pieces of `leaf` elements cover n."""
    return ("leaf >= 1 and leaves >= 1 and (leaves & (leaves - 1)) == 0", f"leaf * leaves >= {n}")


_PAIRED_CUT = (
    _cut("N")[0],
    "paired or leaf * leaves >= N",
    "not paired or 2 * leaf * leaves == N",
)
_ROWS = ("batch >= 1 and (row_offsets or T % batch == 0)", "batch == 1 or not row_offsets")
_SPANS = ("spans >= 1 and (spans & (spans - 1)) == 0",)
_HEADS = ("Hk >= 1 and Hq % Hk == 0 and Hq >= 1",)
_HEAD_DIM = ("D >= 8 and D % 8 == 0 and D <= 256",)
_WALK = ("window >= 0", "segment_blocks >= 1 and (segment_blocks & (segment_blocks - 1)) == 0")
_PAGE = ("page >= 16 and page % 16 == 0 and (128 % page == 0 or page % 128 == 0)",)


def _ascending(what: str, limit: str) -> Callable[[Mapping[str, Any]], str | None]:
    def check(v: Mapping[str, Any]) -> str | None:
        if (
            v[what] is None or not v[what].is_cpu
        ):  # elsewhere the kernel checks: reading it here would wait for the device
            return None
        offsets = v[what].tolist()
        if offsets[0] >= 0 and offsets[-1] <= v[limit] and offsets == sorted(offsets):
            return None
        return f"{what} {offsets[:8]}{'…' * (len(offsets) > 8)}, expected ascending offsets within {v[limit]} rows"

    return check


_row_offsets = _ascending("row_offsets", "T")
_offsets = _ascending("offsets", "P")


def _lines(v: Mapping[str, Any]) -> str | None:
    stride, queries, keys = v["stride"], v["Tq"], v["Tk"]
    for line in v["seqs"].tolist():
        q, n_q, position, k, n_k = line
        inside = (not n_q or q + (n_q - 1) * stride < queries) and (not n_k or k + (n_k - 1) * stride < keys)
        if min(line) < 0 or not inside or position + n_q > INT_LIMIT:
            return f"seqs line {line} with stride {stride}, expected ranges within {queries} queries and {keys} keys"
    return None


def _groups_of_lines(v: Mapping[str, Any]) -> str | None:
    """Neighbouring lines with the same first key: a power of two of them; groups hold different keys."""
    problem = _lines(v)
    if problem is None:
        stride = v["stride"]
        groups: list[list[int]] = []
        for k, n in (line[3:] for line in v["seqs"].tolist()):
            if groups and n and groups[-1][1] and groups[-1][0] == k:
                groups[-1][1:] = max(groups[-1][1], n), groups[-1][2] + 1
            else:
                groups.append([k, n, 1])
        for k, _, lines in groups:
            if lines & (lines - 1):
                return f"{lines} seqs lines that share the keys from token {k} on, expected a power of two"
        runs = sorted((k % stride, k, k + n * stride) for k, n, _ in groups if n)
        for (rest, _, stop), (other, start, _) in zip(runs, runs[1:], strict=False):
            if rest == other and start < stop:
                return f"two seqs lines that both hold key token {start}, expected disjoint key ranges"
    return problem


# ---- the rows ----

_row(
    "Linear",
    "linear(x: S[*, K], weight: S[N, K]^, bias: S[N]?, leaf: int, leaves: int, out_dtype: dtype?) -> out_dtype[*, N]",
    "y[m,n] = tree over leaves of chain over k of x·w; then, in f32, + bias if given; then rounded to `out_dtype` "
    "(None: x's dtype; float32: not rounded)",
    *_cut("K"),
)
_row(
    "Linear",
    "linear_dx(dy: S[*, N], weight: S[N, K]^, leaf: int, leaves: int, out_dtype: dtype?, paired: bool) -> out_dtype[*, K]",
    "the same rule over n; chain term fma(dy, w, acc). `paired`: weight is [gate; up], N = 2F, the leaves cut F exactly "
    "(leaf · leaves = F): dx = tree over i of one chain through leaf i of gate, then leaf i of up",
    *_PAIRED_CUT,
)
_row(
    "Linear",
    "linear_dw(dy: S[T, N], x: S[T, K], grad: f32[| N, K]!^, batch: int, row_offsets: i64[R+1]?@host, spans: int, carry: bool) -> ()",
    "grad += per row: chain over tokens of fma(dy, x, acc). `carry`: grad is the chain of one row so far, which goes on through "
    "these tokens, so that a row may come in pieces (cube order: of a multiple of 16 tokens)",
    *_ROWS,
    *_SPANS,
    "not carry or (batch == 1 and spans == 1 and not row_offsets)",
    values=_row_offsets,
)
_row(
    "Linear",
    "linear_db(dy: S[T, N], grad: f32[| N]!, batch: int, row_offsets: i64[R+1]?@host, spans: int) -> ()",
    "grad += per row: sum-chain over tokens of dy, spans, tree",
    *_ROWS,
    *_SPANS,
    values=_row_offsets,
)
_row(
    "Linear",
    "grouped_linear(x: S[P, K], weight: S[E, N, K], offsets: i64[E+1], leaf: int, leaves: int, out_dtype: dtype?) -> out_dtype[P, N]",
    "rows offsets[e]…offsets[e+1] of x use expert e; rows of no expert give 0",
    *_cut("K"),
    values=_offsets,
)
_row(
    "Linear",
    "grouped_linear_dx(dy: S[P, N], weight: S[E, N, K], offsets: i64[E+1], leaf: int, leaves: int, out_dtype: dtype?, paired: bool) "
    "-> out_dtype[P, K]",
    "likewise",
    *_PAIRED_CUT,
    values=_offsets,
)
_row(
    "Linear",
    "tree_sum(parts: f32[R, *, N], bias: U[N]?, out_dtype: dtype) -> out_dtype[*, N]",
    "y = tree over the R subtree roots, + bias in f32, rounded: how a reduction continues over ranks. Roots are results, so parts hold no subnormals",
    "R >= 1 and (R & (R - 1)) == 0",
)
_row(
    "Attention",
    "attention(q: S[Tq, Hq, D], k: S[Tk, Hk, D], v: S[Tk, Hk, D], seqs: i32[lines, 5]@host, stride: int, scale: float, window: int, "
    "segment_blocks: int) -> (out: S[Tq, Hq, D], m: f32[Hq, Tq], l: f32[Hq, Tq])",
    "query head h reads KV head h·Hk/Hq; m, l: maximum and sum of each query's softmax",
    "stride >= 1",
    *_HEADS,
    *_HEAD_DIM,
    *_WALK,
    values=_lines,
)
_row(
    "Attention",
    "attention_backward(dout: S[Tq, Hq, D], q: S[Tq, Hq, D], k: S[Tk, Hk, D], v: S[Tk, Hk, D], out: S[Tq, Hq, D], m: f32[Hq, Tq], "
    "l: f32[Hq, Tq], seqs: i32[lines, 5]@host, stride: int, scale: float, window: int, segment_blocks: int, partial: bool) "
    "-> (dq: S[Tq, Hq, D], dk: partial?f32:S[Tk, Hk, D], dv: partial?f32:S[Tk, Hk, D])",
    "`partial`: dk, dv are f32 and *unscaled*: roots over these lines and query heads; dq is always complete. Neighbouring lines with "
    "the same keys, a power of two of them, are one tree (below); other lines' key ranges must be disjoint",
    "stride >= 1",
    *_HEADS,
    *_HEAD_DIM,
    *_WALK,
    values=_groups_of_lines,
)
_row(
    "Attention",
    "paged_cache_write(k: S[T, Hk, D], v: S[T, Hk, D], kv_cache: S[blocks, Hk | page, 2*D]!, slot_mapping: i64[slots]) -> ()",
    "slot = block·page + offset; a negative slot is skipped; tokens past the last slot too",
    "slots <= T",
    *_HEAD_DIM,
    *_PAGE,
)
_row(
    "Attention",
    "paged_attention(q: S[T, Hq, D], kv_cache: S[blocks, Hk | page, 2*D], block_table: i32[lists, width], query_start_loc: i32[R+1], "
    "seq_lens: i32[R], scale: float, window: int, segment_blocks: int) -> S[T, Hq, D]",
    "queries of request r are its *last* positions: the first has position seq_lens[r] − (number of queries); queries of no request give 0",
    "lists >= R",
    *_HEADS,
    *_HEAD_DIM,
    *_PAGE,
    *_WALK,
)
_row(
    "Norm, rotary, activation, embedding",
    "rms_norm(x: S[*, H], weight: S[H], eps: float) -> (y: S[*, H], rstd: f32[*])",
    "below; x also a strided [T, heads, H] view",
)
_row(
    "Norm, rotary, activation, embedding",
    "add_rms_norm(x: S[*, H], residual: S[*, H], weight: S[H], eps: float) -> (y: S[*, H], residual_out: S[*, H], rstd: f32[*])",
    "residual_out = rounded(x + residual); the norm reads it",
)
_row(
    "Norm, rotary, activation, embedding",
    "rms_norm_backward(dy: S[*, H], x: S[*, H], weight: S[H], rstd: f32[*], dskip: S[*, H]?) -> S[*, H]",
    "dx; with dskip: rounded(rounded(dx) + dskip)",
)
_row(
    "Norm, rotary, activation, embedding",
    "rms_norm_dw(dy: S[T, *, H], x: S[T, *, H], rstd: f32[T, *], grad: f32[| H]!, batch: int, row_offsets: i64[R+1]?@host, spans: int) -> ()",
    "`*`: nothing, or heads",
    "star <= 1",
    *_ROWS,
    *_SPANS,
    values=_row_offsets,
)
_row(
    "Norm, rotary, activation, embedding",
    "head_terms(dy: S[T, heads, D], x: S[T, heads, D], rstd: f32[T, heads]) -> f32[T, D]",
    "t of `rms_norm_dw` below",
    "heads >= 1",
)
_row(
    "Norm, rotary, activation, embedding",
    "residual_add(x: S[*, H], y: S[*, H]) -> S[*, H]",
    "rounded(x + y)",
)
_row(
    "Norm, rotary, activation, embedding",
    "rope(x: S[T, H, D], cos: f32[P, half], sin: f32[P, half], positions: i64[T], inverse: bool) -> S[T, H, D]",
    "pairs (i, i + half), half = rotary_dim / 2; the rest is copied",
    "2 * half <= D",
)
_row("Norm, rotary, activation, embedding", "swiglu(x: S[*, 2*F]) -> S[*, F]", "x = [gate, up]")
_row(
    "Norm, rotary, activation, embedding", "swiglu_backward(dy: S[*, F], x: S[*, 2*F]) -> S[*, 2 * F]", "dx = [dg, du]"
)
_row(
    "Norm, rotary, activation, embedding",
    "embedding(weight: S[rows, H], ids: i64[*], vocab_start: int, vocab_size: int) -> S[*, H]",
    "weight holds ids vocab_start …; ids owned by others give +0; an id outside [0, vocab_size) is an error",
    "vocab_start >= 0",
)
_row(
    "Norm, rotary, activation, embedding",
    "embedding_dw(dy: S[T, H], ids: i64[T], grad: f32[| rows, H]!, vocab_start: int, batch: int, row_offsets: i64[R+1]?@host) -> ()",
    "grad[id − vocab_start] = grad[…] + dy for the ids held here, tokens row by row, ascending",
    "vocab_start >= 0",
    *_ROWS,
    values=_row_offsets,
)
_row(
    "Logprob of chosen tokens",
    "vocab_max(logits: f32[T, V], temperature: f32[T]?) -> f32[T]",
    "M = max_v z_v over this rank's columns",
    "V >= 1",
)
_row(
    "Logprob of chosen tokens",
    "vocab_sums(logits: f32[T, V], max: f32[T], temperature: f32[T]?, leaf: int, leaves: int, entropy: bool) "
    "-> (S: f32[T], E: f32[T * entropy])",
    "S: lane tree of e_v inside each leaf (lanes count from the leaf's start), tree over leaves. E: the same with round(e_v · (z_v − M)), "
    "where e_v = 0 the term is +0; without `entropy` E has 0 elements",
    *_cut("V"),
)
_row(
    "Logprob of chosen tokens",
    "vocab_logprob(logits: f32[T, V], tokens: i64[T], max: f32[T], S: f32[T], E: f32[e], temperature: f32[T]?, vocab_start: int) "
    "-> (logprob: f32[T], entropy: f32[e])",
    "logprob = (z_t − M) − log(S), +0 for tokens owned by another rank; entropy = log(S) − E / S",
    "e == 0 or e == T",
    "vocab_start >= 0",
)
_row(
    "Logprob of chosen tokens",
    "vocab_logprob_backward(logits: f32[T, V], tokens: i64[T], max: f32[T], S: f32[T], entropy: f32[e], grad_logprob: f32[T], "
    "grad_entropy: f32[T]?, temperature: f32[T]?, vocab_start: int, out_dtype: dtype) -> out_dtype[T, V]",
    "dlogits, rounded to out_dtype",
    "e == T or (e == 0 and not grad_entropy)",
    "vocab_start >= 0",
)
_row(
    "Logprob of chosen tokens",
    "token_logprob(logits: f32[T, V], tokens: i64[T], temperature: f32[T]?, leaf: int, leaves: int, entropy: bool) "
    "-> (logprob: f32[T], entropy: f32[T * entropy], max: f32[T], S: f32[T])",
    "the first three in one call, for a whole vocabulary; a token outside it is an error",
    "V >= 1",
    *_cut("V"),
)
_row(
    "Mixture of experts",
    "moe_route(logits: f32[T, E], expert_bias: f32[E]?, topk: int, score: softmax|sigmoid, renormalize: bool, groups: int, topk_groups: int, "
    "scaling: float, eps: float) -> (weights: f32[T, topk], ids: i32[T, topk])",
    "both in ascending expert id. groups 1: no groups. NaN is an error",
    "topk >= 1 and topk <= E",
    "score == 1 or (groups == 1 and not expert_bias)",
    "groups >= 1 and E % groups == 0 and (groups == 1 or E >= 2 * groups)",
    "groups == 1 or (topk_groups >= 1 and topk_groups <= groups and topk * groups <= E * topk_groups)",
)
_row(
    "Mixture of experts",
    "moe_route_backward(dweights: f32[T, k], logits: f32[T, E], ids: i32[T, k], score: softmax|sigmoid, renormalize: bool, scaling: float, "
    "eps: float) -> f32[T, E]",
    "dlogits from the forward's ids (ascending). The choice and expert_bias have no gradient. NaN is an error",
    "k >= 1 and k <= E",
)
_row(
    "Mixture of experts",
    "moe_combine(y: S[P, H], slots: i64[T, k], weights: f32[T, k]) -> S[T, H]",
    "slots = rows of y, in ascending expert id, negative = skip; out = rounded(chain over k of fma(w, y, acc))",
)
_row(
    "Mixture of experts",
    "expert_weight_backward(g: f32[P, F], a: S[P, F], weights: f32[P], leaf: int, leaves: int) -> (dweights: f32[P], da: S[P, F])",
    "g = W2ᵀ · dOut, dOut unweighted; a: the down-projection's input. dweights = tree over leaves of F of lane_tree of round(g · a); "
    "da = rounded(weights · g)",
    *_cut("F"),
)
_row(
    "Mixture of experts",
    "sigmoid_gate(y: S[*, H], logits: f32[*, 1]) -> S[*, H]",
    "rounded(y · σ), σ = 1 / (1 + exp(−logit))",
)
_row(
    "Mixture of experts",
    "sigmoid_gate_backward(dout: S[*, H], y: S[*, H], logits: f32[*, 1]) -> (dy: S[*, H], dlogits: f32[*, 1])",
    "dy = rounded(dout · σ); dlogits = lane_tree over h of round(dout · y), times round(σ · (1 − σ))",
)
_row("exp and log", "exp(x: f32[*]) -> f32[*]", "e^x, below")
_row("exp and log", "log(x: f32[*]) -> f32[*]", "natural logarithm, below")
