"""Which modules of a built model are served, by the code that a call of them will run and not by names.

Each upstream's `_coverage` says which of its functions were read and add nothing up themselves (`KEPT`), and what else decides
the code of one of its modules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as nn_module
from torch.utils._pytree import tree_leaves

from mindspeed_tpi import strict
from mindspeed_tpi.patching import active, resolve

_TORCH = (
    torch.nn.Module.__call__,
    torch.nn.Module.forward,  # not implemented: a container
)
_GUARDED = "tpi_guarded"


class Known:
    """The functions that may run in a model of one upstream: this package's, and upstream's that were read.

    Args:
        upstream: key of its registry. functions: further ones that may run.
    """

    def __init__(self, upstream: str, functions: Iterable[Any] = ()) -> None:
        registry = active[upstream]
        kept = registry.kept_functions()
        ours = registry.replacements()
        self._ids = ours.keys() | {id(resolve.function(f)) for f in (*_TORCH, *functions, *kept.values())}
        self._methods: dict[type, set[str]] = {}
        for target in (*kept, *ours.values()):
            holder, _, name = target.rpartition(".")
            if ":" in holder and isinstance(owner := resolve.reached(holder), type):
                self._methods.setdefault(owner, set()).add(name)

    def holds(self, value: Any) -> bool:
        return id(resolve.function(value)) in self._ids

    def problems(self, module: torch.nn.Module, attributes: Iterable[str] = ()) -> Iterator[str]:
        """What of one module, its children apart, is not served: `forward`, own or inherited, and its other methods that a
        replacement or upstream calls.

        Args:
            attributes: those of its own that hold a function, if it has them.
        """
        kind, own = type(module), vars(module)
        names = {"forward", "__call__"}.union(*(self._methods.get(base, ()) for base in kind.__mro__)) - {
            "__init__",
            "__new__",
        }
        for name in sorted(names):
            found = own.get(name) if name != "__call__" else None
            found = inspect.getattr_static(kind, name) if found is None else found
            if not self.holds(found):
                yield f"{name} is {resolve.described(found)}"
        for name in attributes:
            found = own.get(name)
            if found is not None and not self.holds(found):
                yield f"{name} is {resolve.described(found)}"
        if module._compiled_call_impl is not None:
            yield "compiled by Module.compile()"


def listed(model: torch.nn.Module, problems: Callable[[torch.nn.Module], Iterable[str]]) -> list[str]:
    """`name (class: what)` of every module of a model of which `problems` finds something."""
    return [
        f"{name or 'model'} ({type(module).__module__}.{type(module).__qualname__}: {', '.join(found)})"
        for name, module in model.named_modules()
        if (found := list(problems(module)))
    ]


class Watch:
    """The modules of one model as they were last checked.

    Args:
        attributes: those besides `forward` that hold what decides a module's code.
    """

    def __init__(self, *attributes: str) -> None:
        self._attributes = ("forward", *attributes)
        self._seen: list[tuple[dict[str, Any], tuple[Any, ...]]] = []

    def look(self, model: torch.nn.Module, check: Callable[[], None]) -> None:
        """Call `check` the first time and whenever anything about the modules has changed since; their hooks may only look."""
        if self._seen and all(self._state(own) == before for own, before in self._seen):
            return
        check()
        for hooks in (nn_module._global_forward_pre_hooks, nn_module._global_forward_hooks):
            _guard(hooks)
        for module in model.modules():
            _guard(module._forward_pre_hooks)
            _guard(module._forward_hooks)
        self._seen = [(vars(module), self._state(vars(module))) for module in model.modules()]

    def _state(self, own: dict[str, Any]) -> tuple[Any, ...]:
        held = [own.get(name) for name in self._attributes]
        return (
            *held,
            *(len(vars(value)) for value in held if hasattr(value, "__dict__")),
            len(own),
            len(own["_forward_hooks"]),
            len(own["_forward_pre_hooks"]),
            *map(id, own["_modules"].values()),
        )


def _guard(hooks: dict[int, Any]) -> None:
    """Let the hooks of a module, which may be probes or a value head's, look at what it takes and gives, and change nothing."""
    for key, hook in list(hooks.items()):
        if not hasattr(hook, _GUARDED):
            hooks[key] = _looking_only(hook)


def _looking_only(hook: Callable[..., Any]) -> Callable[..., Any]:
    def look(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and not x.is_inference()]
        before = [x._version for x in tensors]
        result = hook(module, *args, **kwargs)
        if result is not None or [x._version for x in tensors] != before:
            strict.outside(
                f"the hook {resolve.described(hook)} changes what a {type(module).__qualname__} takes or gives (a hook may read: "
                "let it return None and edit nothing in place)"
            )
        return result

    setattr(look, _GUARDED, True)
    return look
