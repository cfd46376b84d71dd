"""vLLM's plug-in point (`vllm.general_plugins`): runs in the parent, the engine core and every worker."""

from __future__ import annotations

import importlib

import mindspeed_tpi
from mindspeed_tpi import envs
from mindspeed_tpi.errors import PatchError
from mindspeed_tpi.patches.vllm._status import statuses


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
    for module in sorted({status.patch.module for status in statuses()}):
        importlib.import_module(module)
    refused = [status.why for status in statuses() if status.state != "applied"]
    if refused:
        raise PatchError("; ".join(refused))
