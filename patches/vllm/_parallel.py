"""vLLM's process groups, as `mindspeed_tpi.parallel` takes them."""

from __future__ import annotations

from typing import Any


def tp_group() -> Any:
    """The tensor-parallel group, None for one rank."""
    from vllm.distributed import get_tp_group

    return _torch_group(get_tp_group())


def dp_group() -> Any:
    """The data-parallel group, None for one rank."""
    from vllm.distributed import get_dp_group

    return _torch_group(get_dp_group())


def ep_group() -> Any:
    """The group that experts are spread over, whole or in shards (all tensor- and data-parallel ranks); None for one rank."""
    from vllm.distributed import get_ep_group

    return _torch_group(get_ep_group())


def _torch_group(coordinator: Any) -> Any:
    return None if coordinator.world_size == 1 else coordinator.device_group
