"""vLLM's plug-in point (`vllm.general_plugins`): runs in the parent, the engine core and every worker."""

from __future__ import annotations

import importlib

import mindspeed_tpi
from mindspeed_tpi import envs
from mindspeed_tpi.errors import PatchError
from mindspeed_tpi.patching import Status


def register() -> None:
    """Make this process's vLLM engines compute with the contract's operators; calling it again is a no-op.

    Without `MINDSPEED_TPI`, or with 0, nothing happens: installing the package must not change anybody's engine.

    Raises:
        PatchError: a target is missing or changed. An engine with only some of the patches would have neither set of
            numerics, so this is an error in every mode.
    """
    if not envs.MODE.is_set or envs.MODE.get() == "0":
        return
    mindspeed_tpi.enable("vllm")
    for module in sorted({s.patch.module for s in _status()}):
        importlib.import_module(module)
    refused = [s.why for s in _status() if s.state != "applied"]
    if refused:
        raise PatchError("; ".join(refused))


def _status() -> list[Status]:
    return [s for s in mindspeed_tpi.patch_status() if s.patch.target.startswith("vllm.")]
