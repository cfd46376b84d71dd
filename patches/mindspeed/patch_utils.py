"""MindSpeed's patch manager sets its functions at adaptor import, and again in `repatch()` (verl and ms-swift call it)."""

from __future__ import annotations

from typing import Any

from mindspeed_tpi.patches.mindspeed._versions import VERSIONS
from mindspeed_tpi.patching import Patch


def apply_patches(original: Any) -> Any:
    """`MindSpeedPatchesManager.apply_patches`: this package's replacements go back on top of what it wrote."""
    upstream = original.__func__

    def apply() -> None:
        import mindspeed_tpi

        upstream()
        mindspeed_tpi.enable()

    return staticmethod(apply)


PATCHES: tuple[Patch, ...] = (
    Patch(
        target="mindspeed.patch_utils:MindSpeedPatchesManager.apply_patches",
        factory=apply_patches,
        reason="it overwrites attention, norm, rotary embedding, embedding and gradient synchronisation with its own",
        versions=VERSIONS,
        parameters=(),
        until="MindSpeed's manager lets a later feature replace what an earlier one replaced",
        kind="wrap",
    ),
)
