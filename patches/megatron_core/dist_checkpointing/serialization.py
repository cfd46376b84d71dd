"""Checkpoints carry the numerics contract that their weights were trained under; training goes on under no other one."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

from mindspeed_tpi import contract, envs
from mindspeed_tpi.contract import NumericsContract
from mindspeed_tpi.errors import ContractError
from mindspeed_tpi.ops import table_hash
from mindspeed_tpi.patches.megatron_core.models.gpt.gpt_model import BUILT
from mindspeed_tpi.patches.megatron_core.support import UNTIL, VERSIONS
from mindspeed_tpi.patching import Patch

logger = logging.getLogger("mindspeed_tpi")
KEY = "mindspeed_tpi"
"""Key of the checkpoint's common state; `load` takes it out again."""


def current() -> NumericsContract:
    """This process's contract, with the rotary tables of its served models where they have the same ones."""
    tables = {table_hash(model.rotary_pos_emb.rope_config) for model in list(BUILT)}
    return contract.current().overridden({"rope_table": tables.pop() if len(tables) == 1 else ""})


def save(original: Callable[..., Any]) -> Callable[..., Any]:
    """`save`: the contract and its fingerprint join the common state."""

    @wraps(original)
    def save_with_contract(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        mine = current()
        document = {"contract": json.loads(mine.to_json()), "fingerprint": mine.fingerprint}
        return original({**sharded_state_dict, KEY: document}, checkpoint_dir, *args, **kwargs)

    return save_with_contract


def load(original: Callable[..., Any]) -> Callable[..., Any]:
    """`load`: another contract is refused in strict mode before a tensor is read, and a warning otherwise."""

    @wraps(original)
    def load_with_contract(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron.core.dist_checkpointing.serialization import load_common_state_dict

        check(load_common_state_dict(str(checkpoint_dir)).get(KEY), str(checkpoint_dir))
        loaded = original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        (loaded[0] if isinstance(loaded, tuple) else loaded).pop(KEY, None)  # a tuple: with the keys that did not match
        return loaded

    return load_with_contract


def check(document: Any, checkpoint: str) -> None:
    """Refuse a checkpoint of another contract.

    Args:
        document: what `save` put under `KEY`; None in a checkpoint that was saved without this package.

    Raises:
        ContractError: a damaged document; or strict mode and another contract: names every field and both values.
    """
    if document is None:
        logger.warning(
            "checkpoint %s carries no numerics contract: it was saved without mindspeed_tpi; from here on this process's "
            "contract holds",
            checkpoint,
        )
        return
    recorded = document["contract"]
    canonical = contract.fingerprint_of(recorded)
    if canonical != document["fingerprint"]:
        raise ContractError(
            f"checkpoint {checkpoint}: its fingerprint {document['fingerprint']!r} is not that of its contract, {canonical!r}: it was "
            "changed or damaged; load another one"
        )
    mine = json.loads(current().to_json())
    if not (mine["rope_table"] and recorded.get("rope_table")):
        mine.pop("rope_table")
    differing = [f"{k} (here {mine[k]!r}, there {recorded.get(k)!r})" for k in mine if mine[k] != recorded.get(k)]
    if not differing:
        return
    message = (
        f"checkpoint {checkpoint} was trained under another numerics contract: {'; '.join(differing)}. Going on changes bits: "
        "train on with its MINDSPEED_TPI_CONTRACT, model configuration and package version"
    )
    if envs.strict():
        raise ContractError(f"{message}, or accept that with MINDSPEED_TPI=1 for the load.")
    logger.warning("%s.", message)


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
