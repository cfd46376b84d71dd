"""Hugging Face ↔ Megatron-core parameters of dense decoders: loading, and export for a running engine.

Megatron-core keeps Q, K and V in one matrix, grouped by KV head as [q … | k | v], and gate and up in one, gate first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mindspeed_tpi.errors import InputError

_REDUNDANT = (".rotary_emb.inv_freq",)  # buffers that old checkpoints carry; made anew from the configuration


@dataclass(frozen=True)
class Entry:
    """One Megatron-core parameter and the Hugging Face tensors it is made of.

    Attributes:
        parameter: the parameter, as the model holds it.
        name: its name in the model.
        tensors: names and shapes of the Hugging Face tensors.
        merge: those tensors → the parameter's value; split: the inverse (views).
        vocabulary: rows are token ids: a checkpoint may hold more of them, which are padding.
    """

    parameter: Tensor
    name: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    merge: Callable[[list[Tensor]], Tensor]
    split: Callable[[Tensor], list[Tensor]]
    vocabulary: bool = False


def entries(model: torch.nn.Module) -> list[Entry]:
    """The mapping of a whole GPTModel (wrappers such as DistributedDataParallel are looked through).

    Raises:
        InputError: the model has a parameter this mapping does not know.
    """
    model = unwrap(model)
    config: Any = model.config
    dim, groups = config.kv_channels, config.num_query_groups
    queries = config.num_attention_heads // groups
    found = []
    for name, parameter in model.named_parameters():
        hf, kind = _hf_names(name)
        shape = tuple(parameter.shape)
        if kind == "qkv":
            rows = (groups * queries * dim, groups * dim, groups * dim)
            shapes = [(n, *shape[1:]) for n in rows]
            merge, split = _qkv(groups, (queries * dim, dim, dim))
        elif kind == "gate_up":
            shapes = [(shape[0] // 2, *shape[1:])] * 2
            merge, split = torch.cat, _halves
        else:
            shapes, merge, split = [shape], _only, _as_list
        found.append(
            Entry(parameter, name, tuple(zip(hf, shapes, strict=True)), merge, split, vocabulary=kind == "vocabulary")
        )
    return found


def load(model: torch.nn.Module, checkpoint: str | Path) -> None:
    """Fill a GPTModel from a safetensors checkpoint, tensor by tensor; values are rounded to the parameters' dtype.

    Args:
        model: a GPTModel built for the checkpoint's configuration.
        checkpoint: directory with `model.safetensors`, or with shards and `model.safetensors.index.json`.

    Raises:
        InputError: a tensor is missing, unexpected or of another shape (all are named), or a file cannot be read.
    """
    mapping = entries(model)
    with ExitStack() as files, torch.no_grad():
        tensors = _open(Path(checkpoint), files)
        _check_names(mapping, set(tensors), Path(checkpoint))
        for entry in mapping:
            parts = [_read(tensors[name], name, shape, entry.vocabulary) for name, shape in entry.tensors]
            entry.parameter.copy_(entry.merge(parts))


def hf_tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every Hugging Face tensor of a GPTModel, contiguous, one at a time; a tied output projection is not repeated."""
    for entry in entries(model):
        parts = entry.split(entry.parameter.detach())
        for (name, _), part in zip(entry.tensors, parts, strict=True):
            yield name, part.contiguous()


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The GPTModel inside Float16Module, DistributedDataParallel and the like."""
    while isinstance(inner := getattr(model, "module", None), torch.nn.Module):
        model = inner
    return model


_LAYER = {
    "input_layernorm.weight": (("input_layernorm.weight",), ""),
    "pre_mlp_layernorm.weight": (("post_attention_layernorm.weight",), ""),
    "self_attention.linear_qkv.weight": (tuple(f"self_attn.{n}_proj.weight" for n in "qkv"), "qkv"),
    "self_attention.linear_qkv.bias": (tuple(f"self_attn.{n}_proj.bias" for n in "qkv"), "qkv"),
    "self_attention.q_layernorm.weight": (("self_attn.q_norm.weight",), ""),
    "self_attention.k_layernorm.weight": (("self_attn.k_norm.weight",), ""),
    "self_attention.linear_proj.weight": (("self_attn.o_proj.weight",), ""),
    "mlp.linear_fc1.weight": (("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gate_up"),
    "mlp.linear_fc2.weight": (("mlp.down_proj.weight",), ""),
}
_MODEL = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}


def _hf_names(name: str) -> tuple[tuple[str, ...], str]:
    """Hugging Face names of a Megatron-core parameter, and how they are merged."""
    if name in _MODEL:
        return (_MODEL[name],), "" if name.endswith("norm.weight") else "vocabulary"
    prefix, _, rest = name.partition("decoder.layers.")
    number, _, local = rest.partition(".")
    if prefix or local not in _LAYER:
        raise InputError(f"parameter {name} of the Megatron-core model has no known Hugging Face counterpart")
    hf, kind = _LAYER[local]
    return tuple(f"model.layers.{number}.{n}" for n in hf), kind


def _qkv(
    groups: int, rows: tuple[int, int, int]
) -> tuple[Callable[[list[Tensor]], Tensor], Callable[[Tensor], list[Tensor]]]:
    def merge(parts: list[Tensor]) -> Tensor:
        return torch.cat([p.unflatten(0, (groups, n)) for p, n in zip(parts, rows, strict=True)], dim=1).flatten(0, 1)

    def split(merged: Tensor) -> list[Tensor]:
        return [p.flatten(0, 1) for p in merged.unflatten(0, (groups, sum(rows))).split(rows, dim=1)]

    return merge, split


def _halves(merged: Tensor) -> list[Tensor]:
    return list(merged.chunk(2))


def _only(parts: list[Tensor]) -> Tensor:
    return parts[0]


def _as_list(value: Tensor) -> list[Tensor]:
    return [value]


def _open(directory: Path, files: ExitStack) -> dict[str, Any]:
    """Tensor name → the open safetensors file (memory-mapped) that holds it."""
    index = directory / "model.safetensors.index.json"
    try:
        names = (
            sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if index.is_file()
            else ["model.safetensors"]
        )
        handles = [files.enter_context(safe_open(str(directory / name), framework="pt")) for name in names]
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise InputError(f"cannot read the checkpoint {directory}: {error}") from None
    return {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118


def _check_names(mapping: list[Entry], present: set[str], directory: Path) -> None:
    expected = {name for entry in mapping for name, _ in entry.tensors}
    allowed = expected | {"lm_head.weight"}  # a tied checkpoint may hold a copy
    unexpected = sorted(name for name in present - allowed if not name.endswith(_REDUNDANT))
    missing = sorted(expected - present)
    problems = [
        f"{what} {', '.join(names)}" for what, names in (("lacks", missing), ("has unexpected", unexpected)) if names
    ]
    if problems:
        raise InputError(f"checkpoint {directory} {' and '.join(problems)}; it does not fit the model's configuration")


def _read(file: Any, name: str, shape: tuple[int, ...], vocabulary: bool) -> Tensor:
    view = file.get_slice(name)
    found = tuple(view.get_shape())
    if vocabulary and found[0] > shape[0] and found[1:] == shape[1:]:
        return view[: shape[0]]  # type: ignore[no-any-return]
    if found != shape:
        raise InputError(f"checkpoint tensor {name} has shape {found}, the model needs {shape}")
    return file.get_tensor(name)  # type: ignore[no-any-return]
