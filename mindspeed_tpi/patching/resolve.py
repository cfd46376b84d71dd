"""From `module:qualname` to the object that holds the attribute, with checks that fail by name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from mindspeed_tpi.errors import PatchError
from mindspeed_tpi.patching.patch import Patch
from mindspeed_tpi.versions import mismatch

MISSING: Any = object()


def holder(target: str) -> tuple[Any, str]:
    """The imported module or class that holds the target's last name, and that name.

    Raises:
        PatchError: a name on the way does not exist.
    """
    module, _, qualname = target.partition(":")
    owner: Any = sys.modules[module]
    *path, name = qualname.split(".")
    for part in path:
        if not hasattr(owner, part):
            raise PatchError(
                f"{target}: {part!r} does not exist in the installed upstream; this version is not supported"
            )
        owner = getattr(owner, part)
    return owner, name


def stored(owner: Any, name: str) -> Any:
    """The attribute as its own dictionary holds it (descriptors unbound), or MISSING when absent or inherited."""
    return vars(owner).get(name, MISSING)


def links(target: str) -> Iterator[tuple[Any, str, Any]]:
    """Every look-up on the way to a target: (module or class, the name, what its own dictionary holds, or MISSING)."""
    module, _, qualname = target.partition(":")
    owner: Any = sys.modules.get(module, MISSING)
    for name in qualname.split("."):
        holders = owner.__mro__ if isinstance(owner, type) else (owner,) if owner is not MISSING else ()
        owner = MISSING
        for holder in holders:
            owner = stored(holder, name)
            yield holder, name, owner
            if owner is not MISSING:
                break


def reached(target: str) -> Any:
    """What a target leads to now, inherited or not (descriptors unbound); MISSING when a name on the way is gone."""
    *_, (_, _, found) = ((None, "", MISSING), *links(target))
    return found


def described(value: Any) -> str:
    """Where a value was written, for a message: `module.qualname (file)`."""
    found = function(value)
    name = getattr(found, "__qualname__", None)
    if name is None:
        return "missing" if value is MISSING else repr(value)
    code = getattr(found, "__code__", None)
    return f"{found.__module__}.{name}" + (f" ({code.co_filename}:{code.co_firstlineno})" if code else "")


def function(value: Any) -> Any:
    """The function inside a static or class method; anything else as it is."""
    return getattr(value, "__func__", value)


def as_written(value: Any, module: str) -> bool:
    """Whether a function's code, decorators included, stands in the files of that module's top package, and is the module's own."""
    code, top = None, sys.modules[module.partition(".")[0]]
    folders = tuple(getattr(top, "__path__", ())) or (str(top.__file__),)
    value = function(value)
    while value is not None:
        code = getattr(value, "__code__", None)
        if code is None or not code.co_filename.startswith(folders):
            return False
        value = getattr(value, "__wrapped__", None)
    return code is not None and code.co_filename == sys.modules[module].__file__


def names(value: Any, module: str) -> list[str]:
    """`module:name` of every name of a value in the imported modules of that module's top package."""
    return [
        f"{other.__name__}:{name}"
        for other in loaded(module.partition(".")[0])
        for name, held in list(vars(other).items())
        if held is value
    ]


def loaded(package: str | None = None) -> list[ModuleType]:
    """The imported modules of a top package; without one, all."""
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and (package is None or name == package or name.startswith(f"{package}."))
    ]


def absent(target: str) -> bool:
    """Whether the holder, which must be imported, lacks the target's last name."""
    return stored(*holder(target)) is MISSING


def check(patch: Patch, original: Any, again: bool = False) -> None:
    """Refuse a target that is missing, of another version, or of another signature than the patch was written for.

    Args:
        again: somebody has replaced upstream's object since; whoever calls it still keeps to upstream's signature.

    Raises:
        PatchError: names the target, what was expected and what was found.
    """
    wrong = mismatch(patch.versions)
    if wrong:
        raise PatchError(f"patch {patch.target}: {wrong}. Install a supported version, or set MINDSPEED_TPI=0.")
    if patch.kind == "add" and not again:
        if original is not MISSING:
            raise PatchError(f"patch {patch.target}: upstream defines it already, so there is nothing to add")
        return
    if original is MISSING:
        raise PatchError(f"patch {patch.target}: the target does not exist in the installed upstream")
    if patch.parameters is not None and not again:
        function: Callable[..., Any] = getattr(original, "__func__", original)
        found = tuple(inspect.signature(function).parameters)
        if found != patch.parameters:
            raise PatchError(
                f"patch {patch.target}: written for parameters ({', '.join(patch.parameters)}), upstream has ({', '.join(found)})"
            )
