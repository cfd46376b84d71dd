"""The numerics contract that the weights of a checkpoint were trained under; training goes on under no other one."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch

from mindspeed_tpi import contract, envs
from mindspeed_tpi.contract import NumericsContract
from mindspeed_tpi.errors import ContractError
from mindspeed_tpi.ops import table_hash
from mindspeed_tpi.patching import active

logger = logging.getLogger("mindspeed_tpi")
KEY = "mindspeed_tpi"
"""Key of a distributed checkpoint's common state, and of the metadata of a model's state dict."""

BUILT: WeakSet[Any] = WeakSet()
"""Served models of this process."""


def current(models: Iterable[Any]) -> NumericsContract:
    """This process's contract, with the rotary tables of these models where they have the same ones."""
    tables = {table_hash(model.rotary_pos_emb.rope_config) for model in models if hasattr(model, "rotary_pos_emb")}
    return contract.current().overridden({"rope_table": tables.pop() if len(tables) == 1 else ""})


def document(models: Iterable[Any]) -> dict[str, Any]:
    """What a checkpoint of these models carries, JSON-able; `check` takes it."""
    mine = current(models)
    return {"contract": json.loads(mine.to_json()), "fingerprint": mine.fingerprint}


def attach(model: torch.nn.Module) -> None:
    """Have the state dicts of a model carry the contract in their metadata, which `torch.save` keeps and `load_state_dict` reads:
    so do Megatron's checkpoints of format `torch`. Weights from elsewhere have none, and none is asked for."""
    model.register_state_dict_post_hook(_note)
    model.register_load_state_dict_pre_hook(_compare)


def _note(model: torch.nn.Module, state: Any, prefix: str, metadata: dict[str, Any]) -> None:
    if active:
        metadata[KEY] = document([model])


def _compare(model: torch.nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
    if active and KEY in metadata:
        check(metadata[KEY], f"(state dict of a {type(model).__name__})", [model])


def check(document: Any, checkpoint: str, models: Iterable[Any]) -> None:
    """Refuse a checkpoint of another contract.

    Args:
        document: what `document` gave; None in a checkpoint that was saved without this package.

        models: those that the checkpoint is for.

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
    mine = json.loads(current(models).to_json())
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
