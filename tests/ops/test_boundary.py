"""The boundary of every operator, from its row: a call is served with the reference's bits, or refused by a named error before a
kernel runs. `python -m tests.native.sanitized` runs the same under AddressSanitizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mindspeed_tpi import ops
from mindspeed_tpi.errors import BackendError
from mindspeed_tpi.ops import checks, schemas
from mindspeed_tpi.ops.backends import cpu, reference
from mindspeed_tpi.ops.table import OPERATORS, Attribute
from tests.ops import cases
from tests.ops.bits import assert_same_bits


class Wrapped(Tensor):
    """A tensor without memory of its own, as DTensor is: data pointers mean nothing."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def _resized(s: cases.Source, x: Tensor) -> Any:
    """One size larger, smaller or 1."""
    if not x.dim():
        return x.reshape(1)
    shape = list(x.shape)
    i = s.integer(0, x.dim() - 1)
    shape[i] = max(0, s.choice((shape[i] + 1, shape[i] - 1, 1, 0)))
    return torch.zeros(shape, dtype=x.dtype)


def _transposed(s: cases.Source, x: Tensor) -> Any:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else x.repeat_interleave(2)[::2]


TENSOR_FAULTS: list[Callable[[cases.Source, Tensor], Any]] = [
    _resized,
    _transposed,
    lambda s, x: x.unsqueeze(s.integer(0, x.dim())),
    lambda s, x: x.flatten(),
    lambda s, x: x.to(s.choice((torch.float64, torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.bool))),
    lambda s, x: x.new_zeros(()).expand(x.shape),
    lambda s, x: x.to("meta"),
    lambda s, x: Wrapped(x),
    lambda s, x: x.to_sparse() if x.dim() else x,
    lambda s, x: torch._neg_view(x) if x.is_floating_point() else x,
    lambda s, x: None,
    lambda s, x: x.tolist(),
]
ATTRIBUTE_FAULTS = (
    0,
    -1,
    3,
    2**31,
    -(2**40),
    2**70,
    True,
    0.5,
    None,
    "relu",
    torch.float64,
    torch.bfloat16,
    torch.tensor(1),
)


def _call(operator: str, args: list[Any]) -> list[Tensor]:
    result = schemas.OPS[operator](*args)
    return [] if result is None else [result] if isinstance(result, Tensor) else list(result)


def _refusal(operator: str, args: list[Any]) -> str | None:
    try:
        checks.check(operator, args)
    except BackendError as error:
        return str(error)
    return None


def _faulty(s: cases.Source, case: cases.Case) -> list[Any]:
    """The case's arguments, one of which, or how two lie in memory, is not what the row asks."""
    row = OPERATORS[case.operator]
    args = [a.clone() if i in case.mutated else a for i, a in enumerate(case.args)]
    i = s.integer(0, len(args) - 1)
    if isinstance(row.parameters[i], Attribute):
        args[i] = s.choice(ATTRIBUTE_FAULTS)
    elif args[i] is not None:
        others = [j for j, a in enumerate(args) if j != i and isinstance(a, Tensor) and a.dtype == args[i].dtype]
        fault = s.choice([*TENSOR_FAULTS, None] if others else TENSOR_FAULTS)
        if fault is not None:
            args[i] = fault(s, args[i])
        else:  # two operands in one piece of memory
            j = s.choice(others)
            memory = torch.zeros(args[i].numel() + args[j].numel() + 8, dtype=args[i].dtype)
            shift = s.choice((0, 1, args[i].numel()))
            views = (
                memory[: args[i].numel()].view(args[i].shape),
                memory[shift : shift + args[j].numel()].view(args[j].shape),
            )
            args[i], args[j] = (v.copy_(a) for v, a in zip(views, (args[i].clone(), args[j].clone()), strict=True))
    return args


@pytest.fixture(autouse=True)
def native() -> Iterator[None]:
    ops.backends.use("cpu")
    with torch.no_grad():
        yield


@pytest.mark.parametrize("operator", OPERATORS)
@given(data=st.data())
@settings(max_examples=settings().max_examples, phases=(Phase.generate,))
def test_served_or_refused(operator: str, data: st.DataObject) -> None:
    s = cases.Drawn(data)
    args = _faulty(s, cases.BUILDERS[operator](s))
    refusal = _refusal(operator, args)
    if refusal is not None:
        with pytest.raises(BackendError) as caught:
            _call(operator, args)
        assert str(caught.value) == refusal or "no backend serves operands on 'meta'" in str(caught.value)
        assert refusal.startswith(f"{operator}: ")
        return
    mutated = [i for i, p in enumerate(OPERATORS[operator].parameters) if getattr(p, "mutated", False)]
    copies = [a.clone() if i in mutated else a for i, a in enumerate(args)]
    try:
        expected = getattr(reference, operator)(*copies)
    except BackendError:  # values outside a table (ids, slots, positions): refused by both
        with pytest.raises(BackendError, match=f"^{operator}: "):
            _call(operator, args)
        return
    expected = [] if expected is None else [expected] if isinstance(expected, Tensor) else list(expected)
    actual = _call(operator, args) + [args[i] for i in mutated]
    for a, b in zip(actual, expected + [copies[i] for i in mutated], strict=True):
        assert_same_bits(a, b, operator)


SEQS = torch.tensor([[0, 4, 0, 0, 4]], dtype=torch.int32)


def _attention_backward(**changed: Tensor) -> Any:
    x, ml = torch.zeros(4, 2, 8), torch.zeros(2, 4)
    operands = {"dout": x, "q": x, "k": x, "v": x, "out": x, "m": ml, "l": ml} | changed
    return schemas.attention_backward(*operands.values(), SEQS, 1, 1.0, 0, 16, False)


# What read beside its operands, or crashed, when Python's checks were written by hand.
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.linear(torch.zeros(2, 8), torch.zeros(64, 8), torch.zeros(1)), r"bias is \[1\], expected \[N\] with N=64"),
        (
            lambda: ops.moe_combine(torch.zeros(2, 8), torch.zeros(2, 2, dtype=torch.int64), torch.zeros(1, 1)),
            r"weights is \[1, 1\], expected \[T, k\] with T=2, k=2",
        ),
        (lambda: _attention_backward(dout=torch.zeros(1, 2, 8)), r"q is \[4, 2, 8\], expected \[Tq, Hq, D\] with Tq=1"),
        (lambda: _attention_backward(out=torch.zeros(1, 2, 8)), r"out is \[1, 2, 8\]"),
        (lambda: _attention_backward(m=torch.zeros(2, 1)), r"m is \[2, 1\]"),
        (lambda: _attention_backward(l=torch.zeros(1, 4)), r"l is \[1, 4\]"),
        (lambda: ops.linear(torch.zeros(2, 8), Wrapped(torch.zeros(8, 8))), "weight is a Wrapped, expected a plain tensor"),
        (
            lambda: ops.linear_dw(torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(1).expand(4, 4)),
            r"grad has strides \[0, 0\]",
        ),
        (lambda: ops.swiglu(torch.zeros(2, 8, device="meta")), "x is on meta|no backend serves operands on 'meta'"),
        (
            lambda: ops.paged_attention(
                torch.zeros(2, 1, 8), torch.zeros(1, 1, 16, 16), torch.zeros(1, 1, dtype=torch.int32),
                torch.tensor([0, 9], dtype=torch.int32), torch.tensor([9], dtype=torch.int32), scale=1.0,
            ),  # fmt: skip
            "outside its table",
        ),
    ],
)  # fmt: skip
def test_each_known_fault_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(BackendError, match=message):
        call()


def test_a_distributed_parameter_is_refused() -> None:
    """FSDP2 makes parameters DTensors: a pointer to one is no pointer to its local rows."""
    import torch.distributed as dist
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        weight = torch.nn.Parameter(distribute_tensor(torch.zeros(8, 8), DeviceMesh("cpu", [0]), [Shard(0)]))
        with torch.enable_grad(), pytest.raises(BackendError, match=r"weight is a DTensor.*to_local"):
            ops.linear(torch.zeros(2, 8), weight)
    finally:
        dist.destroy_process_group()


def test_a_direct_call_records_or_refuses() -> None:
    x = torch.randn(2, 8, requires_grad=True)
    with torch.enable_grad():
        schemas.swiglu(x).sum().backward()
        recorded, x.grad = x.grad, None
        ops.swiglu(x).sum().backward()
        assert recorded is not None and torch.equal(recorded, x.grad)
        with pytest.raises(BackendError, match="y requires a gradient, but this operator records none"):
            schemas.moe_combine(x, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))


def test_the_backend_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """MINDSPEED_TPI_BACKEND names one for its own type of device; another device asks for its own."""
    monkeypatch.setattr(ops.backends, "_active", {})
    monkeypatch.setattr(ops.backends, "_kernels", {})
    monkeypatch.setenv("MINDSPEED_TPI_BACKEND", "reference")
    monkeypatch.setenv("MINDSPEED_TPI", "1")  # strict asks the stand-in for a record of its self-test
    assert ops.backends.active("cpu").module is reference
    with pytest.raises(BackendError, match="no backend serves operands on 'npu'"):
        ops.backends.active("npu")
    monkeypatch.setattr(ops.backends, "available", lambda: {"cpu": cpu.__name__, "npu": "npu_backend"})
    monkeypatch.setattr(ops.backends, "load", lambda name: ops.backends.Backend(name, _NPU if name == "npu" else cpu))
    assert ops.backends.active("npu").name == "npu"
    with pytest.raises(BackendError, match="has no operator 'swiglu'"):
        ops.backends.kernel("swiglu", "npu")


class _NPU:
    DEVICE = "npu"
