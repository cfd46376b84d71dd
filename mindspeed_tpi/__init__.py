"""Training–inference parity: one numerics contract for the trainer and the rollout engine, so that logdiff is exactly 0.

Import this package before Megatron-core or MindSpeed. With `MINDSPEED_TPI=0` the import changes nothing.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from mindspeed_tpi import envs
from mindspeed_tpi.errors import ParityError
from mindspeed_tpi.patching import Registry, Status
from mindspeed_tpi.patching import active as _registries

if TYPE_CHECKING:
    from mindspeed_tpi.parity.check import check, contract_of
    from mindspeed_tpi.parity.logprobs import logprobs
    from mindspeed_tpi.parity.rollout import Rollout
    from mindspeed_tpi.weights.transfer import hf_tensors
    from mindspeed_tpi.weights.update import update_weights

__version__ = "0.1.0"
__all__ = [
    "ParityError",
    "Rollout",
    "__version__",
    "check",
    "contract_of",
    "disable",
    "enable",
    "hf_tensors",
    "logprobs",
    "patch_status",
    "update_weights",
]

TRAINING_UPSTREAMS = ("megatron_core", "mindspeed")

_LAZY = {
    "Rollout": "mindspeed_tpi.parity.rollout",
    "check": "mindspeed_tpi.parity.check",
    "contract_of": "mindspeed_tpi.parity.check",
    "hf_tensors": "mindspeed_tpi.weights.transfer",
    "logprobs": "mindspeed_tpi.parity.logprobs",
    "update_weights": "mindspeed_tpi.weights.update",
}
"""Public names whose modules are imported at first use, so that importing the package stays light."""

_exported = False
"""Whether `MINDSPEED_TPI` was unset and this package set it."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def enable(*upstreams: str) -> None:
    """Apply the patches of the named upstreams (default: the training side) now or as soon as each is imported; where somebody
    has overwritten one, on top of that.

    A rollout engine's patches (`vllm`) are applied by its plugin entry point in every one of its processes. With `MINDSPEED_TPI`
    unset this acts as 1 and sets it, so that an engine in this process or in a child has parity too: one side alone has none.

    Raises:
        PatchError: in strict mode, when a target is missing or changed, or its module was imported before this package.
    """
    global _exported
    from mindspeed_tpi import patches

    if not envs.MODE.is_set:
        os.environ[envs.MODE.name], _exported = envs.MODE.get(), True
    logging.getLogger("mindspeed_tpi").setLevel(envs.LOG.get().upper())
    for upstream in upstreams or TRAINING_UPSTREAMS:
        if upstream not in _registries:
            _registries[upstream] = Registry(
                patches.declared((upstream,)), patches.kept(upstream), strict=envs.strict()
            )
        _registries[upstream].strict = envs.strict()  # MindSpeed's --tpi-strict comes after the import
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
    global _exported
    if _exported:
        os.environ.pop(envs.MODE.name, None)
        _exported = False
    while _registries:
        upstream = next(reversed(_registries))
        _registries[upstream].revert()
        del _registries[upstream]


def patch_status() -> list[Status]:
    """State of every patch that `enable` knows about in this process."""
    return [status for registry in _registries.values() for status in registry.status()]


if envs.MODE.get() != "0":
    enable()
    _plugin = sys.modules.get("mindspeed_tpi_vllm_plugin")
    if getattr(_plugin, "declined", False):  # vLLM loads its plugins once, and did so while MINDSPEED_TPI was unset
        _plugin.register()  # type: ignore[union-attr]
