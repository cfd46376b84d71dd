"""The native CPU backend: ctypes bindings of the C ABI in `kernels/include/tpi/ops.def`.

Each function checks what the kernel cannot (devices, dtypes, shapes), passes pointers and strides, and allocates the
result. Weights are read in place in their row-major form.

`torch.empty` gets sizes as separate arguments: it parses a tuple several times slower. Only a shape that may be () is a tuple.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi.contract import KERNEL_SEMANTICS, NumericsContract
from mindspeed_tpi.errors import BackendError

DEVICE = "cpu"
LIBRARY_PATH = Path(__file__).resolve().parents[2] / "lib" / "libmindspeed_tpi.so"

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# One letter per C parameter: p pointer, q int64, i int, f float. tests/unit/test_abi.py compares them with ops.def.
_SIGNATURES = {
    "linear": "iipqpqppqqqqqqi",
    "linear_dx": "iipqpqpqqqqqqi",
    "linear_dw": "ipqpqpqqqqppqqi",
    "linear_db": "ipqpqqppqq",
    "grouped_linear": "iipqpqqpqpqqqqq",
    "grouped_linear_dx": "iipqpqqpqpqqqqqi",
    "tree_sum": "iipqppqq",
    "attention": "ipqqpqqpqqpqqppqpqqqqqfqq",
    "attention_backward": "ipqqpqqpqqpqqpqqppqpqqppqqipqqqqqfqq",
    "paged_attention": "ipqqpqqqpqqqppqpqqqqqfqq",
    "paged_cache_write": "ipqqpqqpqqqpqqq",
    "rms_norm": "ipqqpqqpfpppqqq",
    "rms_norm_backward": "ipqqpqqppppqqq",
    "rms_norm_dw": "ipqpqppqqppqq",
    "head_terms": "ipqqpqqppqqq",
    "residual_add": "ipqpqpqq",
    "rope": "ipqqpqqppqqpqqqqi",
    "swiglu": "ipqpqqq",
    "swiglu_backward": "ipqpqpqqq",
    "embedding": "ipqppqqqqq",
    "embedding_dw": "ipqppqqqqqppq",
    "vocab_max": "pqpqqp",
    "vocab_sums": "pqpqqpqqpp",
    "vocab_logprob": "pqpqqpqppppp",
    "vocab_logprob_backward": "pqpqqpqpppppipq",
    "moe_route": "pqpqqqiiqqffpp",
    "moe_route_backward": "ppqpqqqiiffp",
    "moe_combine": "ipqppqqqpq",
    "expert_weight_backward": "ipqpqpqqqqppq",
    "sigmoid_gate": "ipqppqq",
    "sigmoid_gate_backward": "ipqpqpppqq",
    "exp": "ppq",
    "log": "ppq",
}
_CTYPES: dict[str, Any] = {"p": ctypes.c_void_p, "q": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}
_STATUS = {
    1: "a dtype the kernels do not have; use float32, bfloat16 or float16",
    2: "sizes outside the operator's schema; see docs/op-schemas.md",
    3: "an id, slot, page or position outside its table; check the token ids and the block table",
    4: "a NaN among the router logits; the hidden states are already broken upstream of the router",
    5: "no memory for scratch space; use smaller batches or fewer threads",
}
_SCORES = {"softmax": 0, "sigmoid": 1}


def _openmp_runtime() -> str:
    """The OpenMP library already in this process (torch's), so that there is one thread pool; else the system's."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        loaded = dict.fromkeys(line.split()[-1] for line in maps)
    runtimes = [p for p in loaded if Path(p).name.startswith(("libgomp", "libomp", "libiomp5"))]
    torch_home = str(Path(torch.__file__).parent)  # other packages (sentencepiece) bring runtimes of their own
    for path in sorted(runtimes, key=lambda p: not p.startswith(torch_home)):
        return path
    return "libgomp.so.1"


def _load() -> ctypes.CDLL:
    if not LIBRARY_PATH.is_file():
        raise BackendError(
            f"the native library {LIBRARY_PATH} is missing; build it with `pip install .` or `pip install -e .` (needs a C++17 compiler)"
        )
    ctypes.CDLL(_openmp_runtime(), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(LIBRARY_PATH))
    for name, signature in _SIGNATURES.items():
        function = getattr(library, f"tpi_{name}")
        function.argtypes = [_CTYPES[letter] for letter in signature]
        function.restype = ctypes.c_int
    library.tpi_isa.restype = ctypes.c_char_p
    library.tpi_isa_available.restype = ctypes.c_char_p
    library.tpi_set_isa.argtypes = [ctypes.c_char_p]
    return library


_lib = _load()


def check(contract: NumericsContract) -> None:
    """Refuse a contract constant that the kernels do not follow.

    Raises:
        BackendError: names the field, its value, the value the kernels have, and the backend that can.
    """
    fixed = {
        "family": "cpu",
        "kernel_semantics": _lib.tpi_kernel_semantics(),
        "kv_block": _lib.tpi_kv_block(),
        "lanes": _lib.tpi_lanes(),
        "leaf_order": "chain",
        "multiply_add": "fma",
        "transcendental": "polynomial",
        "subnormals": "flush",
        "p_dtype": "float32",
    }
    if fixed["kernel_semantics"] != KERNEL_SEMANTICS:
        raise BackendError(
            f"the native library has kernel semantics {fixed['kernel_semantics']}, this package needs {KERNEL_SEMANTICS}: rebuild it (pip install .)"
        )
    for name, value in fixed.items():
        if getattr(contract, name) != value:
            raise BackendError(
                f"the cpu backend has {name}={value!r}, the contract says {getattr(contract, name)!r}; "
                "drop that override of MINDSPEED_TPI_CONTRACT, or set MINDSPEED_TPI_BACKEND=reference"
            )


def isas() -> list[str]:
    """Instruction sets of this build that run on this CPU, narrowest first. All give the same bits."""
    found: list[str] = []
    while (name := _lib.tpi_isa_available(len(found))) is not None:
        found.append(name.decode())
    return found


def set_isa(name: str) -> None:
    """Use another instruction set than the widest (for tests)."""
    if _lib.tpi_set_isa(name.encode()):
        raise BackendError(f"instruction set {name!r} is not available here; available: {', '.join(isas())}")


def describe() -> dict[str, Any]:
    """Library, instruction set in use and available ones, threads."""
    return {
        "library": str(LIBRARY_PATH),
        "isa": _lib.tpi_isa().decode(),
        "isas": isas(),
        "threads": torch.get_num_threads(),
        "openmp": Path(_openmp_runtime()).name,
    }


def _check(name: str, status: int) -> None:
    if status:
        raise BackendError(f"{name}: {_STATUS[status]}")


def _refuse(name: str, found: str, limit: str) -> BackendError:
    return BackendError(f"{name}: got {found}, expected {limit}")


def _code(name: str, *tensors: Tensor) -> int:
    """The dtype code shared by the operands, all on the CPU."""
    dtype = tensors[0].dtype
    for tensor in tensors:
        if tensor.dtype != dtype or not tensor.is_cpu:
            raise _refuse(
                name,
                ", ".join(f"{t.dtype} on {t.device}" for t in tensors),
                "operands of one dtype on the CPU; cast them, or choose the backend of their device",
            )
    code = _DTYPES.get(dtype)
    if code is None:
        raise _refuse(name, str(dtype), "float32, bfloat16 or float16")
    return code


def _out_code(name: str, dtype: torch.dtype) -> int:
    code = _DTYPES.get(dtype)
    if code is None:
        raise _refuse(name, f"out_dtype {dtype}", "float32, bfloat16 or float16")
    return code


def _2d(x: Tensor) -> Tensor:
    """[rows, n] with a dense last dimension: a view when the strides allow it."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _3d(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _integers(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).contiguous()


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


class _Rows:
    """The rows of a gradient chain as the C ABI wants them (see docs/op-schemas.md, Conventions)."""

    def __init__(self, name: str, tokens: int, batch: int, row_offsets: Tensor | None) -> None:
        if row_offsets is not None:
            offsets = row_offsets.to(torch.int64)
            self.first, self.length, self.stride = offsets[:-1].contiguous(), offsets.diff(), 1
        elif tokens % batch:
            raise _refuse(name, f"{tokens} tokens in a batch of {batch}", "whole columns of an [S, B] layout")
        else:
            self.first, self.length, self.stride = torch.arange(batch), torch.full((batch,), tokens // batch), batch
        self.count = self.first.numel()

    @property
    def arguments(self) -> tuple[int, int, int, int]:
        return self.count, self.first.data_ptr(), self.length.data_ptr(), self.stride


def _f32(name: str, **tensors: Tensor | None) -> None:
    for operand, tensor in tensors.items():
        if tensor is not None and (tensor.dtype != torch.float32 or not tensor.is_cpu):
            raise _refuse(name, f"{operand} {tensor.dtype} on {tensor.device}", "float32 on the CPU")


# ---- linear ----


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, leaf: int, leaves: int, out_dtype: torch.dtype | None
) -> Tensor:
    code = _code("linear", x, weight) if bias is None else _code("linear", x, weight, bias)
    n, k = weight.shape
    if x.shape[-1] != k:
        raise _refuse("linear", f"x {tuple(x.shape)} with weight {tuple(weight.shape)}", "x [*, K] and weight [N, K]")
    if bias is None and _stored_transposed(weight):
        return _times(code, x, weight.t(), leaf, leaves, out_dtype, False)
    return _times_transposed(code, x, weight, bias, leaf, leaves, out_dtype, False)


def _stored_transposed(matrix: Tensor) -> bool:
    """Whether a matrix is dense in its first dimension, as the experts of Megatron-core's GroupedMLP are."""
    return matrix.stride(0) == 1 != matrix.stride(1)


def _times_transposed(
    code: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    leaf: int,
    leaves: int,
    out_dtype: torch.dtype | None,
    paired: bool,
) -> Tensor:
    """x weightᵀ + bias; x [*, K], weight [N, K], dense in K."""
    n, k = weight.shape
    rows, w = _2d(x), _2d(weight)
    bias = None if bias is None else bias.contiguous()
    out_dtype = out_dtype or x.dtype
    y = torch.empty(*x.shape[:-1], n, dtype=out_dtype)
    status = _lib.tpi_linear(
        code,
        _out_code("linear", out_dtype),
        rows.data_ptr(),
        rows.stride(0),
        w.data_ptr(),
        w.stride(0),
        _pointer(bias),
        y.data_ptr(),
        n,
        rows.shape[0],
        n,
        k,
        leaf,
        leaves,
        int(paired),
    )
    if status:
        _check("linear", status)
    return y


def _times(
    code: int, dy: Tensor, weight: Tensor, leaf: int, leaves: int, out_dtype: torch.dtype | None, paired: bool
) -> Tensor:
    """dy weight; dy [*, N], weight [N, K], dense in K."""
    n, k = weight.shape
    rows, w = _2d(dy), _2d(weight)
    out_dtype = out_dtype or dy.dtype
    dx = torch.empty(*dy.shape[:-1], k, dtype=out_dtype)
    out = _out_code("linear_dx", out_dtype)
    status = _lib.tpi_linear_dx(
        code,
        out,
        rows.data_ptr(),
        rows.stride(0),
        w.data_ptr(),
        w.stride(0),
        dx.data_ptr(),
        k,
        rows.shape[0],
        n,
        k,
        leaf,
        leaves,
        int(paired),
    )
    _check("linear_dx", status)
    return dx


def _check_pairs(name: str, n: int, leaf: int, leaves: int) -> None:
    if n != 2 * leaf * leaves:
        raise _refuse(
            name, f"{leaves} leaves of {leaf} for paired N={n}", "whole leaves of each half: 2 * leaf * leaves = N"
        )


def linear_dx(
    dy: Tensor, weight: Tensor, leaf: int, leaves: int, out_dtype: torch.dtype | None, paired: bool
) -> Tensor:
    code = _code("linear_dx", dy, weight)
    n, k = weight.shape
    if paired:
        _check_pairs("linear_dx", n, leaf, leaves)
    if dy.shape[-1] != n:
        raise _refuse(
            "linear_dx", f"dy {tuple(dy.shape)} with weight {tuple(weight.shape)}", "dy [*, N], weight [N, K]"
        )
    if _stored_transposed(weight):
        return _times_transposed(code, dy, weight.t(), None, leaf, leaves, out_dtype, paired)
    return _times(code, dy, weight, leaf, leaves, out_dtype, paired)


def _check_grad(name: str, grad: Tensor, shape: tuple[int, ...]) -> None:
    if grad.dtype != torch.float32 or tuple(grad.shape) != shape or not grad.is_cpu or not grad.is_contiguous():
        raise _refuse(name, f"grad {grad.dtype} {tuple(grad.shape)}", f"a contiguous float32 tensor {shape} on the CPU")


def linear_dw(
    dy: Tensor, x: Tensor, grad: Tensor, batch: int, row_offsets: Tensor | None, spans: int, carry: bool
) -> None:
    if _stored_transposed(grad):
        dy, x, grad = x, dy, grad.t()  # a product's factors commute
    code = _code("linear_dw", dy, x)
    a, b = _2d(dy), _2d(x)
    n, k = a.shape[1], b.shape[1]
    _check_grad("linear_dw", grad, (n, k))
    if a.shape[0] != b.shape[0]:
        raise _refuse("linear_dw", f"{a.shape[0]} gradient rows for {b.shape[0]} tokens", "as many of each")
    rows = _Rows("linear_dw", a.shape[0], batch, row_offsets)
    status = _lib.tpi_linear_dw(
        code, a.data_ptr(), a.stride(0), b.data_ptr(), b.stride(0), grad.data_ptr(), k, n, k, *rows.arguments, spans,
        int(carry),
    )  # fmt: skip
    _check("linear_dw", status)


def linear_db(dy: Tensor, grad: Tensor, batch: int, row_offsets: Tensor | None, spans: int) -> None:
    code = _code("linear_db", dy)
    a = _2d(dy)
    _check_grad("linear_db", grad, (a.shape[1],))
    rows = _Rows("linear_db", a.shape[0], batch, row_offsets)
    status = _lib.tpi_linear_db(code, a.data_ptr(), a.stride(0), grad.data_ptr(), a.shape[1], *rows.arguments, spans)
    _check("linear_db", status)


def _offsets(name: str, offsets: Tensor, experts: int, rows: int) -> Tensor:
    table = _integers(offsets, torch.int64)
    if table.numel() != experts + 1 or int(table[0]) < 0 or int(table[-1]) > rows or bool((table.diff() < 0).any()):
        raise _refuse(name, f"offsets {table.tolist()[:8]}…", f"{experts + 1} ascending offsets within {rows} rows")
    return table


def grouped_linear(
    x: Tensor, weight: Tensor, offsets: Tensor, leaf: int, leaves: int, out_dtype: torch.dtype | None
) -> Tensor:
    code = _code("grouped_linear", x, weight)
    rows, w = _2d(x), _3d(weight)
    experts, n, k = w.shape
    if rows.shape[1] != k:
        raise _refuse("grouped_linear", f"x {tuple(x.shape)}, weight {tuple(w.shape)}", "x [P, K] and weight [E, N, K]")
    table = _offsets("grouped_linear", offsets, experts, rows.shape[0])
    out_dtype = out_dtype or x.dtype
    y = torch.zeros((rows.shape[0], n), dtype=out_dtype)
    out = _out_code("grouped_linear", out_dtype)
    status = _lib.tpi_grouped_linear(
        code, out, rows.data_ptr(), rows.stride(0), w.data_ptr(), w.stride(0), w.stride(1), y.data_ptr(), n,
        table.data_ptr(), experts, n, k, leaf, leaves,
    )  # fmt: skip
    _check("grouped_linear", status)
    return y


def grouped_linear_dx(
    dy: Tensor, weight: Tensor, offsets: Tensor, leaf: int, leaves: int, out_dtype: torch.dtype | None, paired: bool
) -> Tensor:
    code = _code("grouped_linear_dx", dy, weight)
    rows, w = _2d(dy), _3d(weight)
    experts, n, k = w.shape
    if paired:
        _check_pairs("grouped_linear_dx", n, leaf, leaves)
    if rows.shape[1] != n:
        raise _refuse(
            "grouped_linear_dx", f"dy {tuple(dy.shape)}, weight {tuple(w.shape)}", "dy [P, N], weight [E, N, K]"
        )
    table = _offsets("grouped_linear_dx", offsets, experts, rows.shape[0])
    out_dtype = out_dtype or dy.dtype
    dx = torch.zeros((rows.shape[0], k), dtype=out_dtype)
    out = _out_code("grouped_linear_dx", out_dtype)
    status = _lib.tpi_grouped_linear_dx(
        code, out, rows.data_ptr(), rows.stride(0), w.data_ptr(), w.stride(0), w.stride(1), dx.data_ptr(), k,
        table.data_ptr(), experts, n, k, leaf, leaves, int(paired),
    )  # fmt: skip
    _check("grouped_linear_dx", status)
    return dx


def tree_sum(parts: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    _f32("tree_sum", parts=parts)
    count = parts.shape[0]
    if count < 1 or count & (count - 1):
        raise _refuse("tree_sum", f"{count} parts", "a power of two")
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != parts.shape[-1]):
        raise _refuse(
            "tree_sum", f"bias {tuple(bias.shape)} for parts {tuple(parts.shape)}", f"bias [{parts.shape[-1]}]"
        )
    parts = parts.contiguous()
    bias = None if bias is None else bias.contiguous()
    y = torch.empty(parts.shape[1:], dtype=out_dtype)
    columns = parts.shape[-1] if parts.dim() > 1 else 1
    status = _lib.tpi_tree_sum(
        _out_code("tree_sum", out_dtype), 0 if bias is None else _code("tree_sum", bias), parts.data_ptr(), count,
        _pointer(bias), y.data_ptr(), y.numel() // max(columns, 1), columns,
    )  # fmt: skip
    _check("tree_sum", status)
    return y


# ---- attention ----


def _heads(name: str, q: Tensor, k: Tensor) -> tuple[int, int, int]:
    heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[2]
    if kv_heads == 0 or heads % kv_heads or k.shape[2] != dim or dim % 8 or dim > 256:
        raise _refuse(
            name,
            f"{heads} query heads, {kv_heads} KV heads, head_dim {dim} and {k.shape[2]}",
            "query heads a multiple of KV heads, equal head_dim, a multiple of 8 up to 256",
        )
    return heads, kv_heads, dim


def _check_seqs(name: str, seqs: Tensor, stride: int, queries: int, keys: int) -> Tensor:
    table = _integers(seqs, torch.int32)
    if table.dim() != 2 or table.shape[1] != 5:
        raise _refuse(name, f"seqs {tuple(table.shape)}", "int32 [R, 5]; see docs/op-schemas.md")
    lines = table.to(torch.int64)
    q_last = torch.where(lines[:, 1] > 0, lines[:, 0] + (lines[:, 1] - 1) * stride, 0)
    k_last = torch.where(lines[:, 4] > 0, lines[:, 3] + (lines[:, 4] - 1) * stride, 0)
    outside = (lines < 0).any(1) | ((lines[:, 1] > 0) & (q_last >= queries)) | ((lines[:, 4] > 0) & (k_last >= keys))
    if bool(outside.any()):
        raise _refuse(
            name, f"seqs line {table[outside][0].tolist()}", f"ranges within {queries} queries and {keys} keys"
        )
    return table


def attention(
    q: Tensor, k: Tensor, v: Tensor, seqs: Tensor, stride: int, scale: float, window: int, segment_blocks: int
) -> tuple[Tensor, Tensor, Tensor]:
    code = _code("attention", q, k, v)
    heads, kv_heads, dim = _heads("attention", q, k)
    table = _check_seqs("attention", seqs, stride, q.shape[0], k.shape[0])
    q, k, v = _3d(q), _3d(k), _3d(v)
    tokens = q.shape[0]
    out = torch.zeros(q.shape, dtype=q.dtype)
    m, l = torch.full((heads, tokens), -torch.inf), torch.zeros((heads, tokens))  # noqa: E741
    status = _lib.tpi_attention(
        code, q.data_ptr(), q.stride(0), q.stride(1), k.data_ptr(), k.stride(0), k.stride(1), v.data_ptr(), v.stride(0),
        v.stride(1), out.data_ptr(), out.stride(0), out.stride(1), m.data_ptr(), l.data_ptr(), tokens, table.data_ptr(),
        table.shape[0], stride, heads, kv_heads, dim, scale, window, segment_blocks,
    )  # fmt: skip
    _check("attention", status)
    return out, m, l


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
    code = _code("attention_backward", dout, q, k, v, out)
    _f32("attention_backward", m=m, l=l)
    heads, kv_heads, dim = _heads("attention_backward", q, k)
    table = _check_seqs("attention_backward", seqs, stride, q.shape[0], k.shape[0])
    dout, q, k, v, out = _3d(dout), _3d(q), _3d(k), _3d(v), _3d(out)
    m, l = m.contiguous(), l.contiguous()  # noqa: E741
    dtype = torch.float32 if partial else k.dtype
    dq = torch.zeros(q.shape, dtype=q.dtype)
    dk, dv = torch.zeros(k.shape, dtype=dtype), torch.zeros(v.shape, dtype=dtype)
    status = _lib.tpi_attention_backward(
        code, dout.data_ptr(), dout.stride(0), dout.stride(1), q.data_ptr(), q.stride(0), q.stride(1), k.data_ptr(),
        k.stride(0), k.stride(1), v.data_ptr(), v.stride(0), v.stride(1), out.data_ptr(), out.stride(0), out.stride(1),
        m.data_ptr(), l.data_ptr(), m.shape[1], dq.data_ptr(), dq.stride(0), dq.stride(1), dk.data_ptr(), dv.data_ptr(),
        dk.stride(0), dk.stride(1), int(partial), table.data_ptr(), table.shape[0], stride, heads, kv_heads, dim, scale,
        window, segment_blocks,
    )  # fmt: skip
    _check("attention_backward", status)
    return dq, dk, dv


def _cache(name: str, kv_cache: Tensor, kv_heads: int, dim: int) -> int:
    """Check a paged cache [blocks, Hk, page, 2 D]; returns the page size."""
    shape = tuple(kv_cache.shape)
    if kv_cache.dim() != 4 or shape[1] != kv_heads or shape[3] != 2 * dim:
        raise _refuse(name, f"kv_cache {shape}", f"[blocks, {kv_heads}, page, {2 * dim}]")
    page = shape[2]
    if page % 16 or (128 % page and page % 128):
        raise _refuse(
            name, f"pages of {page} slots", "a multiple of 16 that divides 128, or a multiple of 128 (--block-size)"
        )
    if kv_cache.stride(3) != 1 or kv_cache.stride(2) != 2 * dim:
        raise _refuse(name, f"kv_cache strides {kv_cache.stride()}", "the last two dimensions dense")
    return page


def paged_cache_write(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    code = _code("paged_cache_write", k, v, kv_cache)
    tokens, kv_heads, dim = k.shape
    page = _cache("paged_cache_write", kv_cache, kv_heads, dim)
    k, v, slots = _3d(k), _3d(v), _integers(slot_mapping, torch.int64)
    if slots.numel() > tokens or (slots.numel() and int(slots.max()) >= kv_cache.shape[0] * page):
        raise _refuse(
            "paged_cache_write",
            f"{slots.numel()} slots up to {int(slots.max()) if slots.numel() else -1} for {tokens} tokens",
            f"at most one slot a token, below {kv_cache.shape[0] * page}",
        )
    status = _lib.tpi_paged_cache_write(
        code, k.data_ptr(), k.stride(0), k.stride(1), v.data_ptr(), v.stride(0), v.stride(1), kv_cache.data_ptr(),
        kv_cache.stride(0), kv_cache.stride(1), page, slots.data_ptr(), slots.numel(), kv_heads, dim,
    )  # fmt: skip
    _check("paged_cache_write", status)


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
    code = _code("paged_attention", q, kv_cache)
    _, heads, dim = q.shape
    kv_heads = kv_cache.shape[1]
    page = _cache("paged_attention", kv_cache, kv_heads, dim)
    if heads % kv_heads or dim % 8 or dim > 256:
        raise _refuse(
            "paged_attention",
            f"{heads} query heads over {kv_heads} KV heads, head_dim {dim}",
            "a multiple of the KV heads, and head_dim a multiple of 8 up to 256",
        )
    q = _3d(q)
    pages = _integers(block_table, torch.int32)
    starts, lengths = _integers(query_start_loc, torch.int32), _integers(seq_lens, torch.int32)
    if starts.numel() != lengths.numel() + 1 or pages.shape[0] < lengths.numel():
        raise _refuse(
            "paged_attention",
            f"{starts.numel()} starts, {lengths.numel()} lengths, {pages.shape[0]} page lists",
            "one length and page list a request, and one start more",
        )
    out = torch.zeros(q.shape, dtype=q.dtype)
    status = _lib.tpi_paged_attention(
        code, q.data_ptr(), q.stride(0), q.stride(1), kv_cache.data_ptr(), kv_cache.stride(0), kv_cache.stride(1), page,
        pages.data_ptr(), pages.stride(0), pages.shape[1], kv_cache.shape[0], starts.data_ptr(), lengths.data_ptr(), lengths.numel(), out.data_ptr(),
        out.stride(0), out.stride(1), heads, kv_heads, dim, scale, window, segment_blocks,
    )  # fmt: skip
    _check("paged_attention", status)
    return out


# ---- norm, rotary, activation, embedding ----


def _outer_inner(x: Tensor) -> tuple[Tensor, int, int, int, int]:
    """A tensor [*, H] as outer × inner rows: (tensor, outer rows, outer stride, inner rows, inner stride)."""
    if x.dim() == 3 and x.stride(2) == 1:
        return x, x.shape[0], x.stride(0), x.shape[1], x.stride(1)
    rows = _2d(x)
    return rows, rows.shape[0], rows.stride(0), 1, 0


def _check_norm(name: str, x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise _refuse(name, f"weight {tuple(weight.shape)} for x {tuple(x.shape)}", f"weight [{x.shape[-1]}]")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    code = _code("rms_norm", x, weight)
    _check_norm("rms_norm", x, weight)
    y, rstd, weight = torch.empty(*x.shape, dtype=x.dtype), torch.empty(x.shape[:-1]), weight.contiguous()
    x, outer, so, inner, si = _outer_inner(x)
    status = _lib.tpi_rms_norm(
        code, x.data_ptr(), so, si, None, 0, 0, weight.data_ptr(), eps, y.data_ptr(), None,
        rstd.data_ptr(), outer, inner, x.shape[-1],
    )  # fmt: skip
    if status:
        _check("rms_norm", status)
    return y, rstd


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    code = _code("add_rms_norm", x, residual, weight)
    _check_norm("add_rms_norm", x, weight)
    if x.shape != residual.shape:
        raise _refuse("add_rms_norm", f"x {tuple(x.shape)}, residual {tuple(residual.shape)}", "equal shapes")
    y, total = torch.empty(*x.shape, dtype=x.dtype), torch.empty(*x.shape, dtype=x.dtype)
    rstd = torch.empty(x.shape[:-1])
    a, r, weight = _2d(x), _2d(residual), weight.contiguous()
    status = _lib.tpi_rms_norm(
        code, a.data_ptr(), a.stride(0), 0, r.data_ptr(), r.stride(0), 0, weight.data_ptr(), eps,
        y.data_ptr(), total.data_ptr(), rstd.data_ptr(), a.shape[0], 1, a.shape[1],
    )  # fmt: skip
    if status:
        _check("add_rms_norm", status)
    return y, total, rstd


def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, dskip: Tensor | None) -> Tensor:
    code = _code("rms_norm_backward", dy, x, weight)
    _f32("rms_norm_backward", rstd=rstd)
    dx = torch.empty(*x.shape, dtype=x.dtype)
    g, outer, g_so, inner, g_si = _outer_inner(dy)
    a, a_outer, a_so, a_inner, a_si = _outer_inner(x)
    if (outer, inner) != (a_outer, a_inner):  # one of the two had to be flattened
        g, a = dy.contiguous(), x.contiguous()
        outer, inner, g_so, g_si, a_so, a_si = rstd.numel(), 1, x.shape[-1], 0, x.shape[-1], 0
    weight, rstd = weight.contiguous(), rstd.contiguous()
    skip = None if dskip is None else dskip.contiguous()
    status = _lib.tpi_rms_norm_backward(
        code, g.data_ptr(), g_so, g_si, a.data_ptr(), a_so, a_si, weight.data_ptr(),
        rstd.data_ptr(), _pointer(skip), dx.data_ptr(), outer, inner, x.shape[-1],
    )  # fmt: skip
    _check("rms_norm_backward", status)
    return dx


def rms_norm_dw(
    dy: Tensor, x: Tensor, rstd: Tensor, grad: Tensor, batch: int, row_offsets: Tensor | None, spans: int
) -> None:
    code = _code("rms_norm_dw", dy, x)
    _f32("rms_norm_dw", rstd=rstd)
    _check_grad("rms_norm_dw", grad, (x.shape[-1],))
    if x.dim() == 3:
        return linear_db(head_terms(dy, x, rstd), grad, batch, row_offsets, spans)
    g, a, rstd = _2d(dy), _2d(x), rstd.contiguous()
    rows = _Rows("rms_norm_dw", a.shape[0], batch, row_offsets)
    status = _lib.tpi_rms_norm_dw(
        code, g.data_ptr(), g.stride(0), a.data_ptr(), a.stride(0), rstd.data_ptr(), grad.data_ptr(),
        a.shape[1], *rows.arguments, spans,
    )  # fmt: skip
    _check("rms_norm_dw", status)


def head_terms(dy: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
    code = _code("head_terms", dy, x)
    _f32("head_terms", rstd=rstd)
    if x.dim() != 3 or dy.shape != x.shape or rstd.shape != x.shape[:2]:
        raise _refuse(
            "head_terms",
            f"dy {tuple(dy.shape)}, x {tuple(x.shape)}, rstd {tuple(rstd.shape)}",
            "dy and x [T, heads, D], rstd [T, heads]",
        )
    g, a, rstd = _3d(dy), _3d(x), rstd.contiguous()
    tokens, heads, dim = a.shape
    terms = torch.empty(tokens, dim)
    status = _lib.tpi_head_terms(
        code, g.data_ptr(), g.stride(0), g.stride(1), a.data_ptr(), a.stride(0), a.stride(1),
        rstd.data_ptr(), terms.data_ptr(), tokens, heads, dim,
    )  # fmt: skip
    _check("head_terms", status)
    return terms


def residual_add(x: Tensor, y: Tensor) -> Tensor:
    code = _code("residual_add", x, y)
    if x.shape != y.shape:
        raise _refuse("residual_add", f"x {tuple(x.shape)}, y {tuple(y.shape)}", "equal shapes")
    out = torch.empty(*x.shape, dtype=x.dtype)
    a, b = _2d(x), _2d(y)
    status = _lib.tpi_residual_add(
        code, a.data_ptr(), a.stride(0), b.data_ptr(), b.stride(0), out.data_ptr(), a.shape[0], a.shape[1]
    )
    if status:
        _check("residual_add", status)
    return out


def rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, inverse: bool) -> Tensor:
    code = _code("rope", x)
    _f32("rope", cos=cos, sin=sin)
    tokens, heads, dim = x.shape
    rotary = 2 * cos.shape[1]
    if rotary > dim or cos.shape != sin.shape or positions.numel() != tokens:
        raise _refuse(
            "rope",
            f"x {tuple(x.shape)}, tables {tuple(cos.shape)} and {tuple(sin.shape)}, {positions.numel()} positions",
            "equal tables [P, R/2] with R <= head_dim, and one position a token",
        )
    x, cos, sin, where = _3d(x), cos.contiguous(), sin.contiguous(), _integers(positions, torch.int64)
    y = torch.empty(*x.shape, dtype=x.dtype)
    status = _lib.tpi_rope(
        code, x.data_ptr(), x.stride(0), x.stride(1), y.data_ptr(), y.stride(0), y.stride(1), cos.data_ptr(),
        sin.data_ptr(), cos.shape[1], cos.shape[0], where.data_ptr(), tokens, heads, dim, rotary, int(inverse),
    )  # fmt: skip
    if status:
        _check("rope", status)
    return y


def swiglu(x: Tensor) -> Tensor:
    code = _code("swiglu", x)
    if x.shape[-1] % 2:
        raise _refuse("swiglu", f"x {tuple(x.shape)}", "an even last dimension: gate, then up")
    rows = _2d(x)
    half = x.shape[-1] // 2
    y = torch.empty(*x.shape[:-1], half, dtype=x.dtype)
    status = _lib.tpi_swiglu(code, rows.data_ptr(), rows.stride(0), y.data_ptr(), half, rows.shape[0], half)
    if status:
        _check("swiglu", status)
    return y


def swiglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    code = _code("swiglu_backward", dy, x)
    g, rows = _2d(dy), _2d(x)
    half = g.shape[1]
    if rows.shape[1] != 2 * half:
        raise _refuse("swiglu_backward", f"dy {tuple(dy.shape)}, x {tuple(x.shape)}", "dy [*, F] and x [*, 2F]")
    dx = torch.empty(*x.shape, dtype=x.dtype)
    status = _lib.tpi_swiglu_backward(
        code, g.data_ptr(), g.stride(0), rows.data_ptr(), rows.stride(0), dx.data_ptr(), 2 * half, rows.shape[0], half
    )
    _check("swiglu_backward", status)
    return dx


def embedding(weight: Tensor, ids: Tensor, vocab_start: int, vocab_size: int) -> Tensor:
    code = _code("embedding", weight)
    w, tokens = _2d(weight), _integers(ids, torch.int64)
    out = torch.empty(*ids.shape, w.shape[1], dtype=weight.dtype)
    status = _lib.tpi_embedding(
        code, w.data_ptr(), w.stride(0), tokens.data_ptr(), out.data_ptr(), tokens.numel(), w.shape[1], vocab_start,
        w.shape[0], vocab_size,
    )  # fmt: skip
    _check("embedding", status)
    return out


def embedding_dw(
    dy: Tensor, ids: Tensor, grad: Tensor, vocab_start: int, batch: int, row_offsets: Tensor | None
) -> None:
    code = _code("embedding_dw", dy)
    a, tokens = _2d(dy), _integers(ids, torch.int64)
    _check_grad("embedding_dw", grad, (grad.shape[0], a.shape[1]))
    if tokens.numel() != a.shape[0]:
        raise _refuse("embedding_dw", f"{a.shape[0]} gradient rows for {tokens.numel()} ids", "as many of each")
    rows = _Rows("embedding_dw", a.shape[0], batch, row_offsets)
    status = _lib.tpi_embedding_dw(
        code, a.data_ptr(), a.stride(0), tokens.data_ptr(), grad.data_ptr(), a.shape[1], a.shape[1], vocab_start,
        grad.shape[0], *rows.arguments,
    )  # fmt: skip
    _check("embedding_dw", status)


# ---- logprob of chosen tokens ----


def _check_logits(name: str, logits: Tensor, temperature: Tensor | None, **per_row: Tensor | None) -> Tensor:
    _f32(name, logits=logits, temperature=temperature, **per_row)
    for operand, tensor in {"temperature": temperature, **per_row}.items():
        if tensor is not None and (
            tensor.dim() != 1 or tensor.shape[0] != logits.shape[0] or not tensor.is_contiguous()
        ):
            raise _refuse(name, f"{operand} {tuple(tensor.shape)}", f"a dense vector of {logits.shape[0]}")
    return _2d(logits)


def vocab_max(logits: Tensor, temperature: Tensor | None) -> Tensor:
    z = _check_logits("vocab_max", logits, temperature)
    largest = torch.empty(z.shape[0])
    status = _lib.tpi_vocab_max(
        z.data_ptr(), z.stride(0), _pointer(temperature), z.shape[0], z.shape[1], largest.data_ptr()
    )
    _check("vocab_max", status)
    return largest


def vocab_sums(
    logits: Tensor, max: Tensor, temperature: Tensor | None, leaf: int, leaves: int, entropy: bool
) -> tuple[Tensor, Tensor]:
    z = _check_logits("vocab_sums", logits, temperature, max=max)
    total, weighted = torch.empty(z.shape[0]), torch.empty(z.shape[0] if entropy else 0)
    status = _lib.tpi_vocab_sums(
        z.data_ptr(), z.stride(0), _pointer(temperature), z.shape[0], z.shape[1], max.data_ptr(), leaf, leaves,
        total.data_ptr(), weighted.data_ptr() if entropy else None,
    )  # fmt: skip
    _check("vocab_sums", status)
    return total, weighted


def vocab_logprob(
    logits: Tensor, tokens: Tensor, max: Tensor, S: Tensor, E: Tensor, temperature: Tensor | None, vocab_start: int
) -> tuple[Tensor, Tensor]:
    z = _check_logits("vocab_logprob", logits, temperature, max=max, S=S)
    chosen = _integers(tokens, torch.int64)
    if chosen.numel() != z.shape[0]:
        raise _refuse("vocab_logprob", f"{chosen.numel()} tokens for {z.shape[0]} rows", "one token a row")
    wanted = E.numel() > 0
    logprob, entropy = torch.empty(z.shape[0]), torch.empty(E.shape[0])
    status = _lib.tpi_vocab_logprob(
        z.data_ptr(), z.stride(0), _pointer(temperature), z.shape[0], z.shape[1], chosen.data_ptr(), vocab_start,
        max.data_ptr(), S.data_ptr(), E.data_ptr() if wanted else None, logprob.data_ptr(),
        entropy.data_ptr() if wanted else None,
    )  # fmt: skip
    _check("vocab_logprob", status)
    return logprob, entropy


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
    grad_logprob = grad_logprob.contiguous()
    grad_entropy = None if grad_entropy is None else grad_entropy.contiguous()
    z = _check_logits(
        "vocab_logprob_backward",
        logits,
        temperature,
        max=max,
        S=S,
        grad_logprob=grad_logprob,
        grad_entropy=grad_entropy,
    )
    chosen = _integers(tokens, torch.int64)
    dlogits = torch.empty(*z.shape, dtype=out_dtype)
    status = _lib.tpi_vocab_logprob_backward(
        z.data_ptr(), z.stride(0), _pointer(temperature), z.shape[0], z.shape[1], chosen.data_ptr(), vocab_start,
        max.data_ptr(), S.data_ptr(), entropy.data_ptr() if entropy.numel() else None, grad_logprob.data_ptr(),
        _pointer(grad_entropy), _out_code("vocab_logprob_backward", out_dtype), dlogits.data_ptr(), z.shape[1],
    )  # fmt: skip
    _check("vocab_logprob_backward", status)
    return dlogits


def token_logprob(
    logits: Tensor, tokens: Tensor, temperature: Tensor | None, leaf: int, leaves: int, entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if tokens.numel() and (int(tokens.min()) < 0 or int(tokens.max()) >= logits.shape[1]):
        raise _refuse(
            "token_logprob",
            f"token ids {int(tokens.min())}…{int(tokens.max())}",
            f"ids below the vocabulary of {logits.shape[1]}",
        )
    largest = vocab_max(logits, temperature)
    total, weighted = vocab_sums(logits, largest, temperature, leaf, leaves, entropy)
    logprob, ent = vocab_logprob(logits, tokens, largest, total, weighted, temperature, 0)
    return logprob, ent, largest, total


# ---- mixture of experts ----


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
    _f32("moe_route", logits=logits, expert_bias=expert_bias)
    if score not in _SCORES:
        raise _refuse("moe_route", f"score {score!r}", "softmax or sigmoid")
    z = _2d(logits)
    tokens, experts = z.shape
    bias = None if expert_bias is None else expert_bias.contiguous()
    weights, ids = torch.empty(tokens, topk), torch.empty(tokens, topk, dtype=torch.int32)
    status = _lib.tpi_moe_route(
        z.data_ptr(), z.stride(0), _pointer(bias), tokens, experts, topk, _SCORES[score], int(renormalize), groups,
        topk_groups, scaling, eps, weights.data_ptr(), ids.data_ptr(),
    )  # fmt: skip
    _check("moe_route", status)
    return weights, ids


def moe_route_backward(
    dweights: Tensor, logits: Tensor, ids: Tensor, score: str, renormalize: bool, scaling: float, eps: float
) -> Tensor:
    _f32("moe_route_backward", dweights=dweights, logits=logits)
    if score not in _SCORES:
        raise _refuse("moe_route_backward", f"score {score!r}", "softmax or sigmoid")
    if dweights.shape != ids.shape or dweights.shape[0] != logits.shape[0]:
        raise _refuse(
            "moe_route_backward",
            f"dweights {tuple(dweights.shape)}, ids {tuple(ids.shape)}, logits {tuple(logits.shape)}",
            "dweights and ids [T, k], logits [T, E]",
        )
    z, d, chosen = _2d(logits), dweights.contiguous(), _integers(ids, torch.int32)
    dlogits = torch.empty(*z.shape)
    status = _lib.tpi_moe_route_backward(
        d.data_ptr(), z.data_ptr(), z.stride(0), chosen.data_ptr(), *z.shape, ids.shape[1], _SCORES[score], int(renormalize), scaling, eps, dlogits.data_ptr(),
    )  # fmt: skip
    _check("moe_route_backward", status)
    return dlogits


def moe_combine(y: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    code = _code("moe_combine", y)
    _f32("moe_combine", weights=weights)
    rows, where, weights = _2d(y), _integers(slots, torch.int64), weights.contiguous()
    tokens, topk = where.shape
    if where.numel() and int(where.max()) >= rows.shape[0]:
        raise _refuse("moe_combine", f"slot {int(where.max())}", f"slots below {rows.shape[0]}")
    out = torch.empty(tokens, rows.shape[1], dtype=y.dtype)
    status = _lib.tpi_moe_combine(
        code, rows.data_ptr(), rows.stride(0), where.data_ptr(), weights.data_ptr(), tokens, topk,
        rows.shape[1], out.data_ptr(), rows.shape[1],
    )  # fmt: skip
    _check("moe_combine", status)
    return out


def expert_weight_backward(g: Tensor, a: Tensor, weights: Tensor, leaf: int, leaves: int) -> tuple[Tensor, Tensor]:
    code = _code("expert_weight_backward", a)
    _f32("expert_weight_backward", g=g, weights=weights)
    if g.dim() != 2 or g.shape != a.shape or weights.shape != g.shape[:1]:
        raise _refuse(
            "expert_weight_backward",
            f"g {tuple(g.shape)}, a {tuple(a.shape)}, weights {tuple(weights.shape)}",
            "g and a [P, F], weights [P]",
        )
    rows, acts, weights = _2d(g), _2d(a), weights.contiguous()
    dweights, da = torch.empty(g.shape[0]), torch.empty(*a.shape, dtype=a.dtype)
    status = _lib.tpi_expert_weight_backward(
        code, rows.data_ptr(), rows.stride(0), acts.data_ptr(), acts.stride(0), weights.data_ptr(),
        *rows.shape, leaf, leaves, dweights.data_ptr(), da.data_ptr(), rows.shape[1],
    )  # fmt: skip
    _check("expert_weight_backward", status)
    return dweights, da


def _check_gate(name: str, y: Tensor, logits: Tensor) -> Tensor:
    _f32(name, logits=logits)
    if logits.shape != (*y.shape[:-1], 1):
        raise _refuse(name, f"logits {tuple(logits.shape)} for y {tuple(y.shape)}", f"logits {(*y.shape[:-1], 1)}")
    return logits.contiguous()


def sigmoid_gate(y: Tensor, logits: Tensor) -> Tensor:
    code = _code("sigmoid_gate", y)
    z, rows = _check_gate("sigmoid_gate", y, logits), _2d(y)
    out = torch.empty(*y.shape, dtype=y.dtype)
    status = _lib.tpi_sigmoid_gate(code, rows.data_ptr(), rows.stride(0), z.data_ptr(), out.data_ptr(), *rows.shape)
    _check("sigmoid_gate", status)
    return out


def sigmoid_gate_backward(dout: Tensor, y: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    code = _code("sigmoid_gate_backward", dout, y)
    z = _check_gate("sigmoid_gate_backward", y, logits)
    if dout.shape != y.shape:
        raise _refuse("sigmoid_gate_backward", f"dout {tuple(dout.shape)}, y {tuple(y.shape)}", "equal shapes")
    g, rows = _2d(dout), _2d(y)
    dy, dlogits = torch.empty(*y.shape, dtype=y.dtype), torch.empty(*logits.shape)
    status = _lib.tpi_sigmoid_gate_backward(
        code, g.data_ptr(), g.stride(0), rows.data_ptr(), rows.stride(0), z.data_ptr(), dy.data_ptr(),
        dlogits.data_ptr(), *rows.shape,
    )  # fmt: skip
    _check("sigmoid_gate_backward", status)
    return dy, dlogits


def exp(x: Tensor) -> Tensor:
    """exp of the contract on a dense f32 tensor."""
    return _elementary("exp", x)


def log(x: Tensor) -> Tensor:
    """log of the contract on a dense f32 tensor."""
    return _elementary("log", x)


def _elementary(name: str, x: Tensor) -> Tensor:
    _f32(name, x=x)
    x = x.contiguous()
    y = torch.empty_like(x)
    _check(name, getattr(_lib, f"tpi_{name}")(x.data_ptr(), y.data_ptr(), x.numel()))
    return y
