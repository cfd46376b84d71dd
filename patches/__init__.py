"""Replacements of upstream code, one file per upstream module; the path mirrors the dotted upstream path.

Each sub-package lists its `PATCHES`. Nothing here imports an upstream at module level.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if __name__ != "mindspeed_tpi.patches":
    raise ImportError(
        f"patches was imported as {__name__!r}: import mindspeed_tpi.patches, so that there is one patch registry"
    )

if TYPE_CHECKING:
    from mindspeed_tpi.patching import Patch

UPSTREAMS = ("megatron_core", "mindspeed", "vllm")


def declared(upstreams: tuple[str, ...] = UPSTREAMS) -> tuple[Patch, ...]:
    """Every declared patch of the named upstreams, in the order in which they apply."""
    modules = [importlib.import_module(f"mindspeed_tpi.patches.{name}") for name in upstreams]
    return tuple(patch for module in modules for patch in module.PATCHES)


def kept(upstream: str) -> tuple[str, ...]:
    """`module:Class.function` of the upstream's code that was read and runs as upstream wrote it."""
    functions: tuple[str, ...] = importlib.import_module(f"mindspeed_tpi.patches.{upstream}").KEPT
    return functions
