"""Checkpoint → the shards of a GPTModel in any layout, and back: whole Hugging Face tensors for a running engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_tpi.parallel import tree
from mindspeed_tpi.weights.headers import Checkpoint
from mindspeed_tpi.weights.mapping import Entry, Model, chunks, entries
from mindspeed_tpi.weights.names import EMBEDDING, HEAD, Names


def load(model: Model, checkpoint: str | Path) -> None:
    """Fill a GPTModel from a safetensors checkpoint, tensor by tensor; values are rounded to the parameters' dtype (a
    router's expert bias stays f32).

    Rows of the embedding and the output projection beyond the model's vocabulary are padding, and left out.

    Args:
        model: a GPTModel built for the checkpoint's configuration. All ranks of its layout call this together.
        checkpoint: directory with `model.safetensors`, or with shards and `model.safetensors.index.json`.

    Raises:
        InputError: a tensor is missing, unexpected or of another shape, or a file cannot be read (see `Checkpoint`).
    """
    mapping = entries(model)
    config = chunks(model)[0].config
    expected = {name: shape for held in _everywhere(_shapes(mapping)) for name, shape in held.items()}
    with Checkpoint(checkpoint) as files, torch.no_grad():
        found = files.unpacked(Names.of_megatron(config))
        for name in {EMBEDDING, HEAD} & set(found):
            found[name] = found[name].first_rows(expected[EMBEDDING][0])
        mtp = int(config.moe_router_score_function == "sigmoid")  # a Glm4-MoE checkpoint may hold one such layer
        files.require(found, expected, config.num_layers, mtp)
        for entry in mapping:
            if entry.name.endswith(
                "router.expert_bias"
            ):  # kept in f32 by Megatron-core, whatever the model was cast to
                entry.parameter.data = entry.parameter.data.float()
            parts = [files.read(found[name]) for name, _ in entry.tensors]
            entry.view(entry.parameter).copy_(entry.shard(entry.merge(parts)))


def _shapes(mapping: list[Entry]) -> dict[str, tuple[int, ...]]:
    return {name: shape for entry in mapping for name, shape in entry.tensors}


def hf_tensors(model: Model, value: Callable[[Tensor], Tensor | None] = Tensor.detach) -> Iterator[tuple[str, Tensor]]:
    """Every Hugging Face tensor of a GPTModel, whole and contiguous, one at a time; a tied output projection is not repeated.

    All ranks of the model's layout run the iteration to its end together; rank 0 is given the tensors.

    Args:
        value: what to export of each parameter, in its shape: by default its data, or for example its `main_grad`.
            None leaves the parameter out.
    """
    mine: dict[str, tuple[Entry, Tensor]] = {}
    for entry in entries(model):
        exported = value(entry.parameter)
        if exported is not None:
            mine.setdefault(entry.name, (entry, entry.view(exported)))
    listings = _everywhere({name: (entry.tensors, exported.dtype) for name, (entry, exported) in mine.items()})
    owners = {name: rank for rank, listing in reversed(list(enumerate(listings))) for name in listing}
    for name, owner in sorted(owners.items(), key=lambda item: item[1]):
        parts: list[Tensor] = []
        if name in mine and owner in _ranks(mine[name][0].group):
            entry, exported = mine[name]
            parts = [part.contiguous() for part in entry.split(entry.gather(exported))]
        here = tree.rank(dist.group.WORLD) if len(listings) > 1 else 0
        tensors, dtype = listings[owner][name]
        for index, (tensor, shape) in enumerate(tensors):
            if here == owner != 0:
                dist.send(parts[index].view(torch.uint8), 0)
            elif here == 0:
                yield tensor, parts[index] if owner == 0 else _receive(shape, dtype, owner)


def _everywhere(value: Any) -> list[Any]:
    """Every rank's value, in rank order."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _ranks(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group) if group is not None else [0]


def _receive(shape: tuple[int, ...], dtype: torch.dtype, source: int) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    dist.recv(tensor.view(torch.uint8), source)
    return tensor
