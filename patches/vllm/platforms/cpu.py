"""The platform's last word on the configuration: refuse what the contract does not cover, and name the worker class.

The configuration travels to every process of the engine, so the worker class and what it must prove travel with it,
whoever builds the engine.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from mindspeed_tpi import envs, ops
from mindspeed_tpi.patches.vllm import _limits
from mindspeed_tpi.patches.vllm._versions import UNTIL, VERSIONS
from mindspeed_tpi.patching import Patch

KEY = "mindspeed_tpi"


def expected(hf_config: Any) -> dict[str, str]:
    """What every worker must run: mode, backend and contract fingerprint of this process."""
    return {
        "mode": envs.MODE.get(),
        "backend": ops.backends.active().name,
        "fingerprint": _limits.bound_contract(hf_config).fingerprint,
    }


def _check_and_update_config(original: Any) -> Any:
    function = original.__func__

    @wraps(function)
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        function(cls, vllm_config)
        if vllm_config.model_config is None:
            return
        _limits.check(vllm_config)
        _limits.check_shared_memory(vllm_config)
        vllm_config.parallel_config.worker_cls = _limits.CONTRACT_WORKER
        vllm_config.additional_config[KEY] = expected(vllm_config.model_config.hf_text_config)

    return classmethod(check_and_update_config)


PATCHES = (
    Patch(
        target="vllm.platforms.cpu:CpuPlatform.check_and_update_config",
        factory=_check_and_update_config,
        reason="patches of the parent process do not reach spawned workers: each must prove what it runs",
        versions=VERSIONS,
        parameters=("cls", "vllm_config"),
        until=UNTIL,
        kind="wrap",
        anytime=True,
    ),
)
