"""Applies patches when their modules are imported, reverts them in reverse order, and says what state each is in."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mindspeed_tpi.errors import PatchError
from mindspeed_tpi.patching import resolve
from mindspeed_tpi.patching.import_hooks import PostImportFinder
from mindspeed_tpi.patching.patch import Patch

logger = logging.getLogger("mindspeed_tpi")


@dataclass(frozen=True)
class Status:
    """State of one patch: `applied`, `pending` (its module is not imported yet), `not needed` or `refused`, and why."""

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


class Registry:
    """The patches of one process.

    Args:
        strict: raise when a patch is refused, or comes after its module was imported; otherwise refuse with a warning, or
            apply late.
    """

    def __init__(self, patches: Iterable[Patch], strict: bool = False) -> None:
        self.patches = tuple(patches)
        self.strict = strict
        self._applied: list[_Applied] = []
        self._status: dict[str, Status] = {}
        self._finder = PostImportFinder(self._on_import)
        targets = [p.target for p in self.patches]
        twice = sorted({t for t in targets if targets.count(t) > 1})
        if twice:
            raise PatchError(f"patched twice: {', '.join(twice)}; merge the two replacements into one patch")

    def apply(self) -> None:
        """Apply every patch whose module is imported, and watch for the others. Applying again is a no-op.

        Raises:
            PatchError: strict, and a patch is refused or a module was imported before this package.
        """
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
        self._finder.watched = {p.module for p in waiting}
        self._finder.install()
        for patch in waiting:
            if patch.module in sys.modules:
                self._apply_one(patch)

    def revert(self) -> None:
        """Put every original back, last applied first.

        Raises:
            PatchError: a target no longer holds our replacement; nothing more is reverted, and the message names it.
        """
        self._finder.remove()
        while self._applied:
            entry = self._applied[-1]
            if resolve.stored(entry.owner, entry.name) is not entry.replacement:
                raise PatchError(
                    f"cannot revert {entry.patch.target}: somebody replaced it after mindspeed_tpi. Undo that patch first, then disable again."
                )
            if entry.original is resolve.MISSING:
                delattr(entry.owner, entry.name)
            else:
                setattr(entry.owner, entry.name, entry.original)
            self._applied.pop()
        self._status.clear()

    def status(self) -> list[Status]:
        """One line per patch, in declaration order."""
        return [self._status.get(p.target) or Status(p, "pending", "its module is not imported") for p in self.patches]

    def _wanted(self, patch: Patch) -> bool:
        why = patch.applies() if patch.applies else None
        if not why and patch.optional and patch.module in sys.modules and resolve.absent(patch.target):
            why = "the installed upstream does not have it"
        if why:
            self._status[patch.target] = Status(patch, "not needed", why)
        return not why

    def _on_import(self, module: str) -> None:
        for patch in self.patches:
            if patch.module == module:
                self._apply_one(patch)

    def _apply_one(self, patch: Patch) -> None:
        if not self._wanted(patch) or any(entry.patch is patch for entry in self._applied):
            return
        try:
            owner, name = resolve.holder(patch.target)
            original = resolve.stored(owner, name)
            resolve.check(patch, original)
        except PatchError as error:
            self._status[patch.target] = Status(patch, "refused", str(error))
            if self.strict:
                raise
            logger.warning("%s; it runs as upstream wrote it", error)
            return
        replacement = patch.factory(original)
        self._bind(patch, owner, name, original, replacement)
        for alias in patch.aliases:
            if alias.partition(":")[0] in sys.modules:
                alias_owner, alias_name = resolve.holder(alias)
                if resolve.stored(alias_owner, alias_name) is original:
                    self._bind(patch, alias_owner, alias_name, original, replacement)
        self._status[patch.target] = Status(patch, "applied")

    def _bind(self, patch: Patch, owner: Any, name: str, original: Any, replacement: Any) -> None:
        setattr(owner, name, replacement)
        self._applied.append(_Applied(patch, owner, name, original, resolve.stored(owner, name)))
