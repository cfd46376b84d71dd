"""Hugging Face ↔ Megatron-core parameters: loading into the shards of any layout, and export for a running engine.

Megatron-core keeps Q, K and V in one matrix, grouped by KV head as [q … | k | v], of which a tensor-parallel rank owns
an equal run of rows; and gate and up in one, the rank's gate rows first.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mindspeed_tpi.errors import InputError
from mindspeed_tpi.parallel import moe, tree

Model: TypeAlias = torch.nn.Module | Sequence[torch.nn.Module]
"""A GPTModel, or the model chunks of a virtual pipeline."""

_REDUNDANT = (".rotary_emb.inv_freq",)  # buffers that old checkpoints carry; made anew from the configuration


def _whole(parameter: Tensor) -> Tensor:
    return parameter


@dataclass(frozen=True)
class Entry:
    """One Megatron-core parameter and the Hugging Face tensors it is made of.

    Attributes:
        parameter: the parameter or persistent buffer, as this rank holds it. view: the part of it that this entry is about.
        name: its name in the whole model, with global layer and expert numbers.
        tensors: names and shapes of the Hugging Face tensors.
        merge: those tensors → the whole value; split: the inverse (views).
        dim: dimension that is sharded over `group`; None: every rank holds all of it.
        parts: runs along `dim` that are sharded separately (gate and up).
        group: process group over which it is sharded; None: this process alone.
        vocabulary: rows are token ids: a checkpoint may hold more of them, which are padding.
    """

    parameter: Tensor
    name: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    merge: Callable[[list[Tensor]], Tensor]
    split: Callable[[Tensor], list[Tensor]]
    dim: int | None = None
    parts: int = 1
    group: Any = None
    vocabulary: bool = False
    view: Callable[[Tensor], Tensor] = _whole

    def shard(self, whole: Tensor) -> Tensor:
        """This rank's slice of the whole value."""
        if self.dim is None or tree.size(self.group) == 1:
            return whole
        rank, ranks = tree.rank(self.group), tree.size(self.group)
        return torch.cat([p.chunk(ranks, self.dim)[rank] for p in whole.chunk(self.parts, self.dim)], self.dim)

    def gather(self, value: Tensor) -> Tensor:
        """The whole of a tensor sharded as the parameter's view is; every rank of the group calls it."""
        mine = value.contiguous()
        if self.dim is None or tree.size(self.group) == 1:
            return mine
        shards = tree.gather(mine.view(torch.uint8), self.group).view(mine.dtype)
        runs = [shard.chunk(self.parts, self.dim) for shard in shards]
        return torch.cat([run for part in zip(*runs, strict=True) for run in part], self.dim)


def entries(model: Model) -> list[Entry]:
    """The mapping of this rank's part of a GPTModel (wrappers such as DistributedDataParallel are looked through).

    Raises:
        InputError: the model has a parameter this mapping does not know.
    """
    return [entry for chunk in chunks(model) for entry in _chunk_entries(chunk)]


def load(model: Model, checkpoint: str | Path) -> None:
    """Fill a GPTModel from a safetensors checkpoint, tensor by tensor; values are rounded to the parameters' dtype.

    Args:
        model: a GPTModel built for the checkpoint's configuration. All ranks of its layout call this together.
        checkpoint: directory with `model.safetensors`, or with shards and `model.safetensors.index.json`.

    Raises:
        InputError: a tensor is missing, unexpected or of another shape (all are named), or a file cannot be read.
    """
    mapping = entries(model)
    names = _Names.of(chunks(model)[0].config)
    with ExitStack() as files, torch.no_grad():
        sources = _open(Path(checkpoint), files, names)
        _check_names(mapping, set(sources), Path(checkpoint), names)
        for entry in mapping:
            parts = [sources[name].read(name, shape, entry.vocabulary) for name, shape in entry.tensors]
            entry.view(entry.parameter).copy_(entry.shard(entry.merge(parts)))


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


def identity(checkpoint: str | Path) -> str:
    """SHA-256 that tells checkpoints apart without reading them whole: configuration, names and sizes of the files, and
    64 samples of each.

    Raises:
        InputError: a file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for path in sorted([Path(checkpoint) / "config.json", *Path(checkpoint).glob("*.safetensors")]):
            size = path.stat().st_size
            digest.update(f"{path.name} {size} ".encode())
            with path.open("rb") as file:
                for sample in range(64):
                    file.seek(size * sample // 64)
                    digest.update(file.read(4096))
    except OSError as error:
        raise InputError(f"cannot read the checkpoint {checkpoint}: {error}") from None
    return digest.hexdigest()


def chunks(model: Model) -> list[Any]:
    """The GPTModels inside Float16Module, DistributedDataParallel and the like."""
    found = []
    for module in [model] if isinstance(model, torch.nn.Module) else model:
        while isinstance(inner := getattr(module, "module", None), torch.nn.Module):
            module = inner
        found.append(module)
    return found


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


@dataclass(frozen=True)
class _Names:
    """How a family names its experts in a checkpoint.

    Attributes:
        block: the layer's module; gate, up, down: an expert's projections.
        shared: the shared experts.
        mtp: start of the names of an extra multi-token-prediction layer, which is not used.
    """

    block: str
    gate: str
    up: str
    down: str
    shared: str
    mtp: tuple[str, ...]

    @classmethod
    def of(cls, config: Any) -> _Names:
        """The names of the family that a TransformerConfig describes; only Mixtral has neither q/k-norm nor shared experts."""
        sigmoid = config.moe_router_score_function == "sigmoid"
        shared = config.moe_shared_expert_intermediate_size is not None
        if not (sigmoid or shared or config.qk_layernorm):
            return cls("block_sparse_moe", "w1", "w3", "w2", "", ())
        return cls(
            "mlp",
            "gate_proj",
            "up_proj",
            "down_proj",
            "shared_expert" if getattr(config, "moe_shared_expert_gate", False) else "shared_experts",
            (f"model.layers.{config.num_layers}.",) if sigmoid else (),
        )

    def expert(self, number: int) -> tuple[str, str, str]:
        """Names of gate, up and down of one expert, inside a layer."""
        prefix = f"{self.block}.experts.{number}."
        gate, up, down = (f"{prefix}{name}.weight" for name in (self.gate, self.up, self.down))
        return gate, up, down


_LAYER: dict[str, tuple[tuple[str, ...], str]] = {
    "input_layernorm.weight": (("input_layernorm.weight",), ""),
    "pre_mlp_layernorm.weight": (("post_attention_layernorm.weight",), ""),
    "self_attention.linear_qkv.weight": (tuple(f"self_attn.{n}_proj.weight" for n in "qkv"), "qkv"),
    "self_attention.linear_qkv.bias": (tuple(f"self_attn.{n}_proj.bias" for n in "qkv"), "qkv"),
    "self_attention.q_layernorm.weight": (("self_attn.q_norm.weight",), ""),
    "self_attention.k_layernorm.weight": (("self_attn.k_norm.weight",), ""),
    "self_attention.linear_proj.weight": (("self_attn.o_proj.weight",), "row"),
    "mlp.linear_fc1.weight": (("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gate_up"),
    "mlp.linear_fc2.weight": (("mlp.down_proj.weight",), "row"),
}
_MODEL = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight", "vocabulary"),
    "output_layer.weight": ("lm_head.weight", "vocabulary"),
    "decoder.final_layernorm.weight": ("model.norm.weight", ""),
}
_DIM = {"qkv": 0, "gate_up": 0, "vocabulary": 0, "row": 1}
_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT_NAME = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.weight)")
_GROUPED = {  # GroupedMLP: one parameter of all local experts
    "mlp.experts.weight1": ("linear_fc1.weight", moe.grouped_fc1),
    "mlp.experts.weight2": ("linear_fc2.weight", moe.grouped_fc2),
}


def _chunk_entries(model: Any) -> list[Entry]:
    """Entries of one model chunk."""
    config = model.config
    names = _Names.of(config)
    known = _LAYER | _moe_layer(names)
    groups = getattr(model, "pg_collection", None)
    tp, expert_tp = getattr(groups, "tp", None), getattr(groups, "expt_tp", None)
    buffers = [(n, b) for n, b in model.named_buffers() if n.endswith(".router.expert_bias")]
    hf_names: tuple[str, ...]
    found = []
    for name, parameter in [*model.named_parameters(), *buffers]:
        match = _LAYER_NAME.fullmatch(name)
        if match is None:
            if name not in _MODEL:
                raise _unknown(name)
            tied = name == "output_layer.weight" and model.share_embeddings_and_output_weights
            name = "embedding.word_embeddings.weight" if tied else name
            hf, kind = _MODEL[name]
            real = getattr(config, "unpadded_vocab_size", None) or model.vocab_size
            found.append(_entry(parameter, name, (hf,), kind, config, tp, vocabulary=real))
            continue
        layer = model.decoder.layers[int(match[1])]
        prefix, number, local = "decoder.layers.", layer.layer_number - 1, match[2]
        where = f"model.layers.{number}."
        matrices = _expert_matrices(local, layer, config.hidden_size)
        for index, which, view in matrices:
            gate, up, down = names.expert(index)
            hf_names, kind = ((gate, up), "gate_up") if which == "linear_fc1.weight" else ((down,), "row")
            whole = f"{prefix}{number}.mlp.experts.{index}.{which}"
            hf_names = tuple(where + n for n in hf_names)
            found.append(_entry(parameter, whole, hf_names, kind, config, expert_tp, view=view))
        if not matrices:
            if local not in known:
                raise _unknown(name)
            hf_names, kind = known[local]
            found.append(
                _entry(parameter, f"{prefix}{number}.{local}", tuple(where + n for n in hf_names), kind, config, tp)
            )
    return found


def _expert_matrices(name: str, layer: Any, hidden: int) -> list[tuple[int, str, Callable[[Tensor], Tensor]]]:
    """(expert, which of its matrices, where it is in the parameter) of a layer's parameter that holds experts; else none."""
    if expert := _EXPERT_NAME.fullmatch(name):
        return [(layer.mlp.local_expert_indices[int(expert[1])], expert[2], _whole)]
    if name not in _GROUPED:
        return []
    which, matrices = _GROUPED[name]
    indices = layer.mlp.local_expert_indices
    return [(e, which, partial(_one_of, matrices, len(indices), hidden, place)) for place, e in enumerate(indices)]


def _one_of(
    matrices: Callable[[Tensor, int, int], Tensor], experts: int, hidden: int, place: int, parameter: Tensor
) -> Tensor:
    return matrices(parameter, experts, hidden)[place]


def _unknown(name: str) -> InputError:
    return InputError(f"parameter {name} of the Megatron-core model has no known Hugging Face counterpart")


def _moe_layer(names: _Names) -> dict[str, tuple[tuple[str, ...], str]]:
    """What an expert layer holds beside its experts."""
    shared = f"mlp.{names.shared}."
    return {
        "mlp.router.weight": ((f"{names.block}.gate.weight",), ""),
        "mlp.router.expert_bias": ((f"{names.block}.gate.e_score_correction_bias",), ""),
        "mlp.shared_experts.linear_fc1.weight": ((f"{shared}gate_proj.weight", f"{shared}up_proj.weight"), "gate_up"),
        "mlp.shared_experts.linear_fc2.weight": ((f"{shared}down_proj.weight",), "row"),
        "mlp.shared_experts.gate_weight": (("mlp.shared_expert_gate.weight",), ""),
    }


def _entry(
    parameter: Tensor,
    name: str,
    hf: tuple[str, ...],
    kind: str,
    config: Any,
    group: Any,
    *,
    vocabulary: int = 0,
    view: Callable[[Tensor], Tensor] = _whole,
) -> Entry:
    """The entry of a parameter, or of a view of it, that is merged and sharded as `kind` says."""
    dim = _DIM.get(kind)
    shape = list(view(parameter).shape)
    if dim is not None:
        shape[dim] *= tree.size(group)
    rest = tuple(shape[1:])
    merge: Callable[[list[Tensor]], Tensor] = _only
    split: Callable[[Tensor], list[Tensor]] = _as_list
    shapes = [tuple(shape)]
    if kind == "qkv":
        head, groups = config.kv_channels, config.num_query_groups
        queries = config.num_attention_heads // groups
        shapes = [(groups * n * head, *rest) for n in (queries, 1, 1)]
        merge, split = _qkv(groups, (queries * head, head, head))
    elif kind == "gate_up":
        shapes = [(shape[0] // 2, *rest)] * 2
        merge, split = torch.cat, _halves
    elif kind == "vocabulary":
        shapes = [(vocabulary, *rest)]
        merge, split = _padded(vocabulary, shape[0])
    tensors = tuple(zip(hf, shapes, strict=True))
    parts = 2 if kind == "gate_up" else 1
    return Entry(parameter, name, tensors, merge, split, dim, parts, group, kind == "vocabulary", view)


Merge: TypeAlias = tuple[Callable[[list[Tensor]], Tensor], Callable[[Tensor], list[Tensor]]]


def _qkv(groups: int, rows: tuple[int, int, int]) -> Merge:
    def merge(parts: list[Tensor]) -> Tensor:
        return torch.cat([p.unflatten(0, (groups, n)) for p, n in zip(parts, rows, strict=True)], dim=1).flatten(0, 1)

    def split(merged: Tensor) -> list[Tensor]:
        return [p.flatten(0, 1) for p in merged.unflatten(0, (groups, sum(rows))).split(rows, dim=1)]

    return merge, split


def _padded(rows: int, padded: int) -> Merge:
    """Zero rows follow the vocabulary."""

    def merge(parts: list[Tensor]) -> Tensor:
        return torch.nn.functional.pad(parts[0], (0, 0, 0, padded - rows)) if padded > rows else parts[0]

    return merge, lambda merged: [merged[:rows]]


def _halves(merged: Tensor) -> list[Tensor]:
    return list(merged.chunk(2))


def _only(parts: list[Tensor]) -> Tensor:
    return parts[0]


def _as_list(value: Tensor) -> list[Tensor]:
    return [value]


@dataclass(frozen=True)
class _Source:
    """Where a tensor is in a checkpoint: an open safetensors file (memory-mapped), or a slice of a packed tensor there.

    Attributes:
        expert: index into a tensor of all experts. half: 0 or 1: its gate or up rows.
    """

    file: Any
    name: str
    expert: int | None = None
    half: int | None = None

    def read(self, name: str, shape: tuple[int, ...], vocabulary: bool) -> Tensor:
        """The tensor, checked to have `shape`.

        Raises:
            InputError: it has another one.
        """
        view = self.file.get_slice(self.name)
        found = tuple(view.get_shape())
        if self.expert is not None:
            rows = found[1] // (1 if self.half is None else 2)
            start = rows * (self.half or 0)
            found = (rows, *found[2:])
        if vocabulary and found[0] > shape[0] and found[1:] == shape[1:]:
            return view[: shape[0]]  # type: ignore[no-any-return]
        if found != shape:
            raise InputError(f"checkpoint tensor {name} has shape {found}, the model needs {shape}")
        if self.expert is not None:
            return view[self.expert : self.expert + 1, start : start + rows][0]  # type: ignore[no-any-return]
        return self.file.get_tensor(self.name)  # type: ignore[no-any-return]


_PACKED = re.compile(r"(model\.layers\.\d+\.)(?:mlp|block_sparse_moe)\.experts\.(gate_up_proj|down_proj)")


def _open(directory: Path, files: ExitStack, names: _Names) -> dict[str, _Source]:
    """Tensor name → where it is; experts stored as one tensor [experts, out, in] appear under their own names."""
    index = directory / "model.safetensors.index.json"
    try:
        paths = (
            sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if index.is_file()
            else ["model.safetensors"]
        )
        handles = [files.enter_context(safe_open(str(directory / path), framework="pt")) for path in paths]
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise InputError(f"cannot read the checkpoint {directory}: {error}") from None
    found = {}
    for handle in handles:
        for name in handle.keys():  # noqa: SIM118
            packed = _PACKED.fullmatch(name)
            if packed is None:
                found[name] = _Source(handle, name)
                continue
            for expert in range(handle.get_slice(name).get_shape()[0]):
                gate, up, down = (packed[1] + n for n in names.expert(expert))
                if packed[2] == "down_proj":
                    found[down] = _Source(handle, name, expert)
                else:
                    found[gate], found[up] = (_Source(handle, name, expert, half) for half in (0, 1))
    if names.block != "mlp":  # a newer name of the same router
        found = {re.sub(r"\.mlp\.gate\.weight$", f".{names.block}.gate.weight", name): s for name, s in found.items()}
    return found


def _check_names(mapping: list[Entry], present: set[str], directory: Path, names: _Names) -> None:
    expected = {name for held in _everywhere({n for e in mapping for n, _ in e.tensors}) for name in held}
    allowed = expected | {"lm_head.weight"}  # a tied checkpoint may hold a copy
    unexpected = sorted(n for n in present - allowed if not n.endswith(_REDUNDANT) and not n.startswith(names.mtp))
    missing = sorted(expected - present)
    problems = [f"{what} {', '.join(n)}" for what, n in (("lacks", missing), ("has unexpected", unexpected)) if n]
    if problems:
        raise InputError(f"checkpoint {directory} {' and '.join(problems)}; it does not fit the model's configuration")
