"""Declared, checked and reversible monkey-patches."""

from mindspeed_tpi.patching.patch import Patch
from mindspeed_tpi.patching.registry import Registry, Status, active

__all__ = ["Patch", "Registry", "Status", "active"]
