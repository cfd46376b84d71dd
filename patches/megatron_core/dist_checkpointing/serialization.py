"""Checkpoints carry the numerics contract that their weights were trained under; training goes on under no other one."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from mindspeed_tpi.patches.megatron_core._checkpoint import BUILT, KEY, check, document
from mindspeed_tpi.patches.megatron_core.support import UNTIL, VERSIONS
from mindspeed_tpi.patching import Patch


def save(original: Callable[..., Any]) -> Callable[..., Any]:
    """`save`: the contract and its fingerprint join the common state."""

    @wraps(original)
    def save_with_contract(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        return original({**sharded_state_dict, KEY: document(list(BUILT))}, checkpoint_dir, *args, **kwargs)

    return save_with_contract


def load(original: Callable[..., Any]) -> Callable[..., Any]:
    """`load`: another contract is refused in strict mode before a tensor is read, and a warning otherwise."""

    @wraps(original)
    def load_with_contract(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron.core.dist_checkpointing.serialization import load_common_state_dict

        check(load_common_state_dict(str(checkpoint_dir)).get(KEY), str(checkpoint_dir), list(BUILT))
        loaded = original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        (loaded[0] if isinstance(loaded, tuple) else loaded).pop(KEY, None)  # a tuple: with the keys that did not match
        return loaded

    return load_with_contract


PATCHES: tuple[Patch, ...] = (
    Patch(
        target="megatron.core.dist_checkpointing.serialization:save",
        factory=save,
        reason="no bits: a checkpoint does not say under which numerics it was trained",
        versions=VERSIONS,
        parameters=(
            "sharded_state_dict",
            "checkpoint_dir",
            "sharded_strategy",
            "common_strategy",
            "validate_access_integrity",
            "async_sharded_save",
            "preprocess_common_before_consistancy_check",
            "content_metadata",
        ),
        until=UNTIL,
        kind="wrap",
    ),
    Patch(
        target="megatron.core.dist_checkpointing.serialization:load",
        factory=load,
        reason="training that goes on under another contract has other bits from there on",
        versions=VERSIONS,
        parameters=(
            "sharded_state_dict",
            "checkpoint_dir",
            "sharded_strategy",
            "common_strategy",
            "validate_access_integrity",
            "strict",
        ),
        until=UNTIL,
        kind="wrap",
    ),
)
