"""Whether this process's vLLM is patched."""

from __future__ import annotations

from mindspeed_tpi import patch_status
from mindspeed_tpi.patching import Status


def statuses() -> list[Status]:
    """State of each patch of vLLM in this process; empty when the plugin was never loaded."""
    return [status for status in patch_status() if status.patch.target.startswith("vllm.")]


def in_force() -> bool:
    """Whether every patch of vLLM was applied; `strict.check_patches` asks whether it still is."""
    states = {status.state for status in statuses()}
    return bool(states) and states <= {"applied", "overwritten"}
