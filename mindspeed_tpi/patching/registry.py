"""Applies patches when their modules are imported, reverts them in reverse order, and says what state each is in.

The state is read from the targets, never remembered: who patches after us is seen.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from mindspeed_tpi.errors import PatchError
from mindspeed_tpi.patching import resolve
from mindspeed_tpi.patching.import_hooks import PostImportFinder
from mindspeed_tpi.patching.patch import Patch

logger = logging.getLogger("mindspeed_tpi")
_MISSING = resolve.MISSING


@dataclass(frozen=True)
class Status:
    """State of one patch: `applied`, `pending` (its module is not imported yet), `not needed`, `refused` or `overwritten`
    (somebody replaced the target after us), and why."""

    patch: Patch
    state: str
    why: str = ""


@dataclass(frozen=True)
class _Applied:
    patch: Patch
    owner: Any
    name: str
    original: Any
    replacement: Any
    names: set[str] = field(default_factory=set)
    """Further names, `module:name`, under which the replacement of a function or class was seen (`from x import y`)."""

    @property
    def has_aliases(self) -> bool:
        """Whether other names that hold this replacement were bound from the target: a function's, or a class's that was made for
        it and bears its name (others, such as one stand-in for two classes, have no identity of their own)."""
        made = self.replacement
        named = isinstance(made, type) and f"{made.__module__}:{made.__qualname__}" == self.patch.target
        return isinstance(self.original, FunctionType) or (named and self.patch.kind != "add")

    def look(self) -> None:
        """Note the names that hold the replacement now."""
        if self.has_aliases:
            self.names.update(resolve.names(self.replacement, self.patch.module))

    def lost(self) -> dict[str, Any]:
        """Each name that somebody replaced → what it holds now."""
        now = {target: resolve.reached(target) for target in (self.patch.target, *sorted(self.names))}
        return {target: value for target, value in now.items() if value is not self.replacement}


class Registry:
    """The patches of one process.

    Args:
        patches: what is replaced.
        kept: `module:Class.function` of upstream code that runs as upstream wrote it, because it was read and adds nothing
            up itself; a target that the installed version lacks is left out.
        strict: raise when a patch is refused, or comes after its module was imported; otherwise refuse with a warning, or
            apply late.
    """

    def __init__(self, patches: Iterable[Patch], kept: Iterable[str] = (), strict: bool = False) -> None:
        self.patches = tuple(patches)
        self.kept = tuple(kept)
        self.strict = strict
        self._applied: list[_Applied] = []
        self._originals: dict[str, Any] = {}
        self._status: dict[str, Status] = {}
        self._links: tuple[tuple[Mapping[str, Any], str, Any], ...] | None = None
        self._finder = PostImportFinder(self._on_import)
        targets = [*(p.target for p in self.patches), *self.kept]
        twice = sorted({t for t in targets if targets.count(t) > 1})
        if twice:
            raise PatchError(f"patched twice: {', '.join(twice)}; merge the two replacements into one patch")

    def apply(self) -> None:
        """Apply every patch whose module is imported, and watch for the others; on a target that somebody overwrote, apply on
        top of what is there now. Applying again is otherwise a no-op.

        Raises:
            PatchError: strict, and a patch is refused or a module was imported before this package.
        """
        self._reapply()
        done = {entry.patch.target for entry in self._applied}
        waiting = [p for p in self.patches if p.target not in done]
        late = sorted({p.module for p in waiting if p.module in sys.modules and not p.anytime and self._wanted(p)})
        if late and self.strict:
            raise PatchError(
                f"imported too late: {', '.join(late)} came before mindspeed_tpi, and objects made from them may keep stock numerics. "
                "Import mindspeed_tpi first (MINDSPEED_TPI=1 applies late instead)."
            )
        if late:
            logger.warning(
                "mindspeed_tpi applies late to %s: models built before this keep stock numerics", ", ".join(late)
            )
        kept = {target.partition(":")[0] for target in self.kept}
        self._finder.watched = {p.module for p in waiting} | {m for m in kept if m not in sys.modules}
        self._finder.install()
        for module in kept & set(sys.modules):
            self._keep(module)
        for patch in waiting:
            if patch.module in sys.modules:
                self._apply_one(patch)

    def revert(self) -> None:
        """Put every original back, last applied first.

        Raises:
            PatchError: a target no longer holds our replacement; nothing more is reverted, and the message names it.
        """
        self._finder.remove()
        self._links = None
        while self._applied:
            entry = self._applied[-1]
            found = resolve.stored(entry.owner, entry.name)
            if found is not entry.replacement:
                raise PatchError(
                    f"cannot revert {entry.patch.target}: somebody replaced it after mindspeed_tpi ({resolve.described(found)}). "
                    "Undo that patch first, then disable again."
                )
            if entry.original is resolve.MISSING:
                delattr(entry.owner, entry.name)
            else:
                setattr(entry.owner, entry.name, entry.original)
            _rename(entry, entry.replacement, entry.original)
            self._applied.pop()
        self._status.clear()
        self._originals.clear()

    def status(self) -> list[Status]:
        """One line per patch, in declaration order, read from the targets."""
        lost = {entry.patch.target: "; ".join(_now(entry.lost())) for entry in self._applied}
        return [
            Status(p, "overwritten", lost[p.target])
            if lost.get(p.target)
            else self._status.get(p.target) or Status(p, "pending", "its module is not imported")
            for p in self.patches
        ]

    def intact(self) -> bool:
        """Whether every applied target, and every function that is kept, is reached as it was at the last look; a few identity
        comparisons, for use at every step."""
        if self._links is not None and all(
            mapping.get(name, _MISSING) is value for mapping, name, value in self._links
        ):
            return True
        self._links = None if self.disturbed() else self._look()
        return self._links is not None

    def disturbed(self) -> list[str]:
        """`target is now …` of every target and kept function that somebody replaced."""
        found = [line for entry in self._applied for line in _now(entry.lost())]
        kept = {target: resolve.reached(target) for target in self._originals}
        return found + _now({target: now for target, now in kept.items() if now is not self._originals[target]})

    def replacements(self) -> dict[int, str]:
        """Identity of every function that was put in a target's place → the target."""
        return {id(resolve.function(entry.replacement)): entry.patch.target for entry in self._applied}

    def kept_functions(self) -> dict[str, Any]:
        """Kept target → the upstream function, of the modules imported so far."""
        return dict(self._originals)

    def stray_aliases(self) -> list[str]:
        """Every name in a loaded module under which upstream's original can still be reached that was replaced elsewhere. What another
        package, such as MindSpeed, had put there before us is that package's own to call."""
        ours = {
            id(e.original): e.patch.target
            for e in self._applied
            if isinstance(e.original, FunctionType) and resolve.as_written(e.original, e.patch.module)
        }
        return [
            f"{module.__name__}:{name} is the original of {ours[id(value)]}"
            for module in resolve.loaded()
            for name, value in list(vars(module).items())
            if id(value) in ours
        ]

    def _look(self) -> tuple[tuple[Mapping[str, Any], str, Any], ...]:
        for entry in self._applied:
            entry.look()
        targets = [t for entry in self._applied for t in (entry.patch.target, *entry.names)]
        found = {}
        for target in (*targets, *self._originals):
            found.update(
                {(id(holder), name): (vars(holder), name, value) for holder, name, value in resolve.links(target)}
            )
        return tuple(found.values())

    def _reapply(self) -> None:
        """Put our replacements back where somebody overwrote them; what is there now is the new original."""
        self._links = None
        for entry in [entry for entry in self._applied if entry.lost()]:
            lost = entry.lost()
            if entry.patch.target in lost:
                self._applied.remove(entry)
                self._apply_one(entry.patch, again=True)
            new = next((e for e in self._applied if e.patch is entry.patch), None)
            if new is not None:  # None: refused
                _rename(entry, entry.replacement, new.replacement)
                for alias in lost.keys() - {entry.patch.target}:
                    setattr(*resolve.holder(alias), new.replacement)

    def _wanted(self, patch: Patch) -> bool:
        why = patch.applies() if patch.applies else None
        if not why and patch.optional and patch.module in sys.modules and resolve.absent(patch.target):
            why = "the installed upstream does not have it"
        if why:
            self._status[patch.target] = Status(patch, "not needed", why)
        return not why

    def _on_import(self, module: str) -> None:
        self._keep(module)
        for patch in self.patches:
            if patch.module == module:
                self._apply_one(patch)

    def _keep(self, module: str) -> None:
        """Note the kept functions of a module that upstream itself wrote there; before any of it is patched."""
        for target in self.kept:
            if target.partition(":")[0] == module and target not in self._originals:
                found = resolve.reached(target)
                if found is not resolve.MISSING and resolve.as_written(found, module):
                    self._originals[target] = found
                    self._links = None

    def _apply_one(self, patch: Patch, again: bool = False) -> None:
        if not self._wanted(patch) or any(entry.patch is patch for entry in self._applied):
            return
        try:
            owner, name = resolve.holder(patch.target)
            original = resolve.stored(owner, name)
            resolve.check(patch, original, again)
        except PatchError as error:
            self._status[patch.target] = Status(patch, "refused", str(error))
            if self.strict:
                raise
            logger.warning("%s; it runs as upstream wrote it", error)
            return
        replacement = patch.factory(original)
        setattr(owner, name, replacement)
        self._links = None
        self._applied.append(_Applied(patch, owner, name, original, resolve.stored(owner, name)))
        _rename(self._applied[-1], original, replacement)
        self._status[patch.target] = Status(patch, "applied")


def _rename(entry: _Applied, old: Any, new: Any) -> None:
    """Every other name of a function or class that is patched: one that holds `old` gets `new`. Where a missing extension left None
    or False, only the replacement is told from other values."""
    if entry.has_aliases and callable(old):
        for name in resolve.names(old, entry.patch.module):
            setattr(*resolve.holder(name), new)


def _now(held: Mapping[str, Any]) -> list[str]:
    return [f"{target} is now {resolve.described(value)}" for target, value in held.items()]


active: dict[str, Registry] = {}
"""Upstream → its patches in this process, in the order in which they were enabled."""
