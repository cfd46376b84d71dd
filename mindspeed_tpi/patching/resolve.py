"""From `module:qualname` to the object that holds the attribute, with checks that fail by name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
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


def absent(target: str) -> bool:
    """Whether the holder, which must be imported, lacks the target's last name."""
    return stored(*holder(target)) is MISSING


def check(patch: Patch, original: Any) -> None:
    """Refuse a target that is missing, of another version, or of another signature than the patch was written for.

    Raises:
        PatchError: names the target, what was expected and what was found.
    """
    wrong = mismatch(patch.versions)
    if wrong:
        raise PatchError(f"patch {patch.target}: {wrong}. Install a supported version, or set MINDSPEED_TPI=0.")
    if patch.kind == "add":
        if original is not MISSING:
            raise PatchError(f"patch {patch.target}: upstream defines it already, so there is nothing to add")
        return
    if original is MISSING:
        raise PatchError(f"patch {patch.target}: the target does not exist in the installed upstream")
    if patch.parameters is not None:
        function: Callable[..., Any] = getattr(original, "__func__", original)
        found = tuple(inspect.signature(function).parameters)
        if found != patch.parameters:
            raise PatchError(
                f"patch {patch.target}: written for parameters ({', '.join(patch.parameters)}), upstream has ({', '.join(found)})"
            )
