"""The check of a call against its row of `ops/table.py`: what every backend may rely on. Reads no operand's values, except
those of operands that live on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from mindspeed_tpi.errors import BackendError
from mindspeed_tpi.ops.table import INT_LIMIT, OPERATORS, Attribute, Dimension, Operand, Operator

STORAGE = (torch.float32, torch.bfloat16, torch.float16)
FIXED = {"f32": torch.float32, "i32": torch.int32, "i64": torch.int64}
_KINDS: dict[str, Any] = {"int": int, "float": (int, float), "bool": bool, "dtype": torch.dtype, "str": str}


@cache
def _compiled(expression: str) -> CodeType:
    return compile(expression, "<ops/table.py>", "eval")


def evaluate(expression: str, names: dict[str, Any]) -> Any:
    """A condition or a size of the table."""
    return eval(_compiled(expression), {"__builtins__": {}}, names)


def is_plain(kind: type) -> bool:
    """Whether instances are tensors that own ordinary memory: no subclass that computes in `__torch_dispatch__`."""
    return kind in (Tensor, Parameter) or (
        issubclass(kind, Tensor)
        and kind.__torch_dispatch__ in (Tensor.__torch_dispatch__, torch._C._disabled_torch_dispatch_impl)
    )


def check(operator: str, args: Sequence[Any]) -> None:
    """Refuse a call that its row excludes.

    Raises:
        BackendError: names the operator, the operand, what was found and what is expected.
    """
    row = OPERATORS[operator]
    if len(args) != len(row.parameters):
        raise BackendError(f"{operator}: got {len(args)} arguments, expected {row.signature}")
    names: dict[str, Any] = {}
    dtypes: dict[str, torch.dtype] = {}
    device: torch.device | None = None
    for parameter, value in zip(row.parameters, args, strict=True):
        if isinstance(parameter, Attribute):
            names[parameter.name] = _attribute(operator, parameter, value)
        elif value is None and parameter.optional:
            names[parameter.name] = False
        else:
            _memory(operator, parameter, value)
            _dtype(operator, parameter, value, dtypes)
            _shape(operator, parameter, value, names)
            if parameter.host:
                device_of, wanted = value.device, torch.device("cpu")
            else:
                device = device or value.device
                device_of, wanted = value.device, device
            if device_of != wanted:
                raise BackendError(f"{operator}: {parameter.name} is on {device_of}, expected {wanted}: move it there")
            if parameter.optional:
                names[parameter.name] = True
    for condition in row.conditions:
        if not evaluate(condition, names):
            used = {name: names[name] for name in _compiled(condition).co_names}
            found = ", ".join(f"{name}={value}" for name, value in used.items())
            raise BackendError(f"{operator}: got {found}, expected {condition}")
    _aliasing(row, args)
    if row.values is not None:
        given = {p.name: value for p, value in zip(row.parameters, args, strict=True)}
        problem = row.values({**names, **given})
        if problem:
            raise BackendError(f"{operator}: got {problem}")


def checked(operator: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel behind `check`."""

    def call(*args: Any) -> Any:
        check(operator, args)
        return kernel(*args)

    return call


def _attribute(operator: str, attribute: Attribute, value: Any) -> Any:
    if value is None and attribute.optional:
        return None
    kind = attribute.kind
    fits = isinstance(value, _KINDS[kind]) and (kind == "bool" or not isinstance(value, bool))
    if kind == "int" or (kind == "float" and isinstance(value, int)):
        fits = fits and -INT_LIMIT <= value < INT_LIMIT
    elif kind == "dtype":
        fits = fits and value in STORAGE
    elif kind == "str":
        fits = fits and value in attribute.choices
    if not fits:
        expected = {
            "int": f"an int below {INT_LIMIT} in magnitude",
            "dtype": "float32, bfloat16 or float16",
            "str": " or ".join(attribute.choices),
        }.get(kind, f"a {kind}")
        raise BackendError(f"{operator}: {attribute.name} is {value!r}, expected {expected}")
    return attribute.choices.index(value) if kind == "str" else value


def _memory(operator: str, operand: Operand, value: Any) -> None:
    where = f"{operator}: {operand.name} is "
    if not isinstance(value, Tensor):
        raise BackendError(f"{where}{value!r}, expected a tensor {operand.shape}")
    if not is_plain(type(value)):
        raise BackendError(
            f"{where}a {type(value).__name__}, expected a plain tensor: pass the local one (DTensor: .to_local())"
        )
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        raise BackendError(f"{where}wrapped by torch.func, expected a plain tensor: the operators have no such rule")
    if value.layout is not torch.strided:
        raise BackendError(f"{where}{value.layout}, expected strided memory: call .to_dense()")
    if value.is_meta:
        raise BackendError(f"{where}on meta, expected a tensor that holds data")
    if value.is_neg():
        raise BackendError(f"{where}a lazily negated view, expected plain values: call .resolve_neg()")


def _dtype(operator: str, operand: Operand, value: Tensor, dtypes: dict[str, torch.dtype]) -> None:
    found, wanted = value.dtype, FIXED.get(operand.dtype) or dtypes.get(operand.dtype)
    if wanted is None and found in STORAGE:
        dtypes[operand.dtype] = found
    elif found != wanted:
        expected = wanted or "float32, bfloat16 or float16"
        raise BackendError(f"{operator}: {operand.name} is {found}, expected {expected}: cast it")


def _shape(operator: str, operand: Operand, value: Tensor, names: dict[str, Any]) -> None:
    shape = tuple(value.shape)
    fixed = len(operand.leading) + len(operand.trailing)
    star = len(shape) - fixed
    fits = star >= 0 if operand.star else star == 0
    before = dict(names)
    if fits:
        split = len(operand.leading)
        middle = shape[split : split + star]
        if operand.star:
            fits = names.setdefault("*", middle) == middle
            names["star"] = len(names["*"])
        sizes = shape[:split] + shape[split + star :]
        fits = fits and all(_bind(d, n, names) for d, n in zip(operand.leading + operand.trailing, sizes, strict=True))
    if not fits:
        wanted = dict.fromkeys([*(d.name for d in operand.leading + operand.trailing), *"*" * operand.star])
        given = ", ".join(f"{name}={before[name]}" for name in wanted if name in before)
        raise BackendError(
            f"{operator}: {operand.name} is {list(shape)}, expected {operand.shape}{f' with {given}' if given else ''}"
        )
    dense = 1
    for d in range(1, operand.dense + 1):
        if value.stride(-d) != dense and value.shape[-d] != 1 and value.numel():
            turned = operand.transposable and value.t().is_contiguous()
            if not turned:
                raise BackendError(
                    f"{operator}: {operand.name} has strides {list(value.stride())} for {list(shape)}, expected its last "
                    f"{operand.dense} dimension{'s' * (operand.dense > 1)} dense"
                )
            break
        dense *= value.shape[-d]


def _bind(dimension: Dimension, size: int, names: dict[str, Any]) -> bool:
    if not dimension.name:
        return size == dimension.offset
    count, rest = divmod(size - dimension.offset, dimension.factor)
    return rest == 0 and count >= 0 and names.setdefault(dimension.name, count) == count


def _extent(value: Tensor) -> tuple[int, int]:
    """First byte, and the one past the last."""
    first = value.data_ptr()
    last = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    return first, first + (last + 1) * value.element_size()


def _aliasing(row: Operator, args: Sequence[Any]) -> None:
    """An operand that is written shares no memory with itself or another one."""
    for i, mutated in enumerate(row.parameters):
        if not isinstance(mutated, Operand) or not mutated.mutated or not args[i].numel():
            continue
        reach = 1
        for stride, size in sorted(zip(args[i].stride(), args[i].shape, strict=True)):
            if size > 1:
                if stride < reach:
                    raise BackendError(
                        f"{row.name}: {mutated.name} has strides {list(args[i].stride())} for {list(args[i].shape)}, "
                        "expected elements that do not share memory: it is written"
                    )
                reach = stride * size
        first, last = _extent(args[i])
        for other, value in zip(row.parameters, args, strict=True):
            if other is mutated or not isinstance(value, Tensor) or not value.numel():
                continue
            start, stop = _extent(value)
            if start < last and first < stop:
                raise BackendError(
                    f"{row.name}: {other.name} overlaps {mutated.name} in memory, expected separate memory: {mutated.name} is written"
                )
