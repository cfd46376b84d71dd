"""The operators as torch has them: `schemas.<name>(*args)` with the positional parameters of its row in `ops/table.py`.

A call goes straight to the kernel of the operands' device (the dispatcher would cost more than a small operator) or, under
`torch.compile`, a fake or any other dispatch mode, through the opaque custom operator `torch.ops.mindspeed_tpi.<name>`.
The result is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi.errors import BackendError
from mindspeed_tpi.ops import backends
from mindspeed_tpi.ops.checks import FIXED, check, evaluate, is_plain
from mindspeed_tpi.ops.table import OPERATORS, Attribute, Operand, Operator, Result

NAMESPACE = "mindspeed_tpi"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
DISPATCH_KEYS = ("CPU", "PrivateUse1")

_modes_active: Callable[[], int] = torch._C._len_torch_dispatch_stack
_transform_active: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
_is_grad_enabled: Callable[[], bool] = torch.is_grad_enabled
# Types of arguments that need no look at their class; `Op._other` adds plain subclasses of Tensor as it meets them.
_known_types: set[type] = {Tensor, torch.nn.Parameter, int, float, bool, str, torch.dtype, type(None)}


class Op:
    """One operator: `op(*args)` with the positional parameters of its row.

    Raises:
        BackendError: a call that the row excludes, a device without a backend, or an operand that requires a gradient where the
            operator records none.
    """

    def __init__(self, row: Operator) -> None:
        self.name = row.name
        self.row = row
        self.differentiable = False
        self._operands = [i for i, p in enumerate(row.parameters) if isinstance(p, Operand)]
        LIBRARY.define(row.schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in DISPATCH_KEYS:
            LIBRARY.impl(row.name, self._run, key)
        torch.library.register_fake(f"{NAMESPACE}::{row.name}", self._fake, lib=LIBRARY)
        self.overload: Any = getattr(getattr(torch.ops, NAMESPACE), row.name).default

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling() or _modes_active() or _transform_active() is not None:
            return self.overload(*args)
        if not _known_types.issuperset(map(type, args)):
            return self._other(args)
        recording = _is_grad_enabled()
        try:
            for i in self._operands:
                value = args[i]
                if value is not None and (value.is_neg() or (recording and value.requires_grad)):
                    return self._recorded(args)
        except (AttributeError, IndexError):  # a number where a tensor belongs, or too few arguments
            check(self.name, args)
            raise
        return self._run(*args)

    def _run(self, *args: Any) -> Any:
        device = "cpu" if args and getattr(args[0], "is_cpu", True) else args[0].device.type
        return backends.kernel(self.name, device)(*args)

    def _recorded(self, args: tuple[Any, ...]) -> Any:
        """Autograd records the call, as far as the operator has a gradient."""
        check(self.name, args)
        if not self.differentiable:
            names = [self.row.parameters[i].name for i in self._operands if getattr(args[i], "requires_grad", False)]
            raise BackendError(
                f"{self.name}: {', '.join(names)} requires a gradient, but this operator records none: call it under "
                "torch.no_grad(), or detach the operand"
            )
        return self.overload(*args)

    def _other(self, args: tuple[Any, ...]) -> Any:
        """A call with a type of argument not met before: fakes and the like go through the dispatcher."""
        for value in args:
            kind = type(value)
            if kind not in _known_types:
                if issubclass(kind, Tensor) and is_plain(kind):
                    _known_types.add(kind)
                elif kind.__module__.startswith("torch._subclasses.") or isinstance(
                    value, torch.SymInt | torch.SymFloat
                ):
                    return self.overload(*args)
                else:
                    check(self.name, args)
                    raise BackendError(
                        f"{self.name}: got an argument of type {kind.__name__}, expected {self.row.signature}"
                    )
        return self(*args)

    def _fake(self, *args: Any) -> Any:
        names: dict[str, Any] = {}
        dtypes = dict(FIXED)
        for parameter, value in zip(self.row.parameters, args, strict=True):
            if isinstance(parameter, Attribute):
                is_choice = parameter.kind == "str"
                names[parameter.name] = parameter.choices.index(value) if is_choice else value
            elif value is not None:
                dtypes.setdefault(parameter.dtype, value.dtype)
                split = len(parameter.leading)
                star = len(value.shape) - split - len(parameter.trailing)
                if parameter.star:
                    names.setdefault("*", value.shape[split : split + star])
                sizes = value.shape[:split] + value.shape[split + star :]
                for dimension, size in zip(parameter.leading + parameter.trailing, sizes, strict=True):
                    if dimension.name:
                        names.setdefault(dimension.name, (size - dimension.offset) // dimension.factor)
        results = [self._empty(args[0], result, names, dtypes) for result in self.row.results]
        return results[0] if len(results) == 1 else tuple(results) if results else None

    def _empty(self, like: Tensor, result: Result, names: dict[str, Any], dtypes: dict[str, torch.dtype]) -> Tensor:
        dtype = result.dtype if not result.flag or names[result.flag] else result.otherwise
        shape: list[Any] = []
        for size in result.shape:
            shape += names["*"] if size == "*" else [evaluate(size, names)]
        return like.new_empty(shape, dtype=dtypes.get(dtype) or names[dtype] or dtypes["S"])


OPS: dict[str, Op] = {name: Op(row) for name, row in OPERATORS.items()}
globals().update(OPS)


def register_autograd(name: str, backward: Callable[..., Any], setup_context: Callable[..., Any] | None = None) -> None:
    """Give an operator a gradient formula, as `torch.library.register_autograd` takes it."""
    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=LIBRARY)
    OPS[name].differentiable = True


def __getattr__(name: str) -> Any:
    raise AttributeError(f"no operator {name!r}; there are {', '.join(OPS)}")
