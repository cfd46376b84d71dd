"""Training–inference parity: one numerics contract for the trainer and the rollout engine, so that logdiff is exactly 0.

Import this package before Megatron-core or MindSpeed. With `MINDSPEED_TPI=0` the import changes nothing.
"""

from __future__ import annotations

import logging
import sys

from mindspeed_tpi import envs
from mindspeed_tpi.errors import ParityError
from mindspeed_tpi.patching import Registry, Status

__version__ = "0.1.0"
__all__ = ["ParityError", "__version__", "disable", "enable", "patch_status"]

TRAINING_UPSTREAMS = ("megatron_core",)

_registries: dict[str, Registry] = {}


def enable(*upstreams: str) -> None:
    """Apply the patches of the named upstreams (default: the training side) now or as soon as each is imported.

    A rollout engine's patches (`vllm`) are applied by its plugin entry point in every one of its processes.

    Raises:
        PatchError: in strict mode, when a target is missing or changed, or its module was imported before this package.
    """
    from mindspeed_tpi import patches

    logging.getLogger("mindspeed_tpi").setLevel(envs.LOG.get().upper())
    for upstream in upstreams or TRAINING_UPSTREAMS:
        if upstream not in _registries:
            _registries[upstream] = Registry(patches.declared((upstream,)), strict=envs.strict())
        _registries[upstream].apply()
    if envs.MODE.get() == "audit":
        from mindspeed_tpi import audit

        audit.start()


def disable() -> None:
    """Undo everything: every patched target is its original object again, and an audit ends.

    Raises:
        PatchError: somebody else replaced a target after this package did; the message names it.
        ParityError: the audit cannot end here (`audit.stop`).
    """
    if "mindspeed_tpi.audit" in sys.modules:
        from mindspeed_tpi import audit

        audit.stop()
    while _registries:
        upstream = next(reversed(_registries))
        _registries[upstream].revert()
        del _registries[upstream]


def patch_status() -> list[Status]:
    """State of every patch that `enable` knows about in this process."""
    return [status for registry in _registries.values() for status in registry.status()]


if envs.MODE.get() != "0":
    enable()
