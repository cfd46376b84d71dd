"""Declared, checked and reversible monkey-patches."""

from mindspeed_tpi.patching.patch import Patch
from mindspeed_tpi.patching.registry import Registry, Status

__all__ = ["Patch", "Registry", "Status"]
