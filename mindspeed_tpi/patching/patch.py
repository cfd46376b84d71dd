"""A patch is data, declared next to its replacement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Patch:
    """One replaced upstream object.

    Attributes:
        target: `module:qualname` of the upstream object, where it is *defined*: modules of the same top package that have
            bound a function by another name (`from x import y`) are found and re-bound.
        factory: receives the original (as stored: a `staticmethod` stays one) and returns the replacement. It is called
            after the target's module has been imported, and may import upstream.
        reason: why the bits would differ without it.
        versions: requirements, `|`-separated, one of which must be met (`megatron-core>=0.13,<0.17`).
        parameters: parameter names of the upstream callable the replacement was written against; None for a
            target that is not a function.
        until: what must happen for the patch to go.
        kind: `replace` the original, `wrap` it (the replacement calls it), or `add` an attribute upstream lacks.
        applies: None, or a function that says why the patch is not wanted here (None: it is). Shims for a missing
            accelerator use it.
        optional: some versions in range do not have the target; there the patch is not needed.
        anytime: the patch loses nothing when it comes after its module was imported (shims of torch itself).
    """

    target: str
    factory: Callable[[Any], Any]
    reason: str
    versions: str
    parameters: tuple[str, ...] | None
    until: str
    kind: Literal["replace", "wrap", "add"] = "replace"
    applies: Callable[[], str | None] | None = None
    optional: bool = False
    anytime: bool = False

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def qualname(self) -> str:
        return self.target.partition(":")[2]
