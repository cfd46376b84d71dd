"""Hugging Face tensors ↔ Megatron-core parameters, as this process's rank of any layout holds them.

Megatron-core keeps Q, K and V in one matrix, grouped by KV head as [q … | k | v], of which a tensor-parallel rank owns
an equal run of rows; and gate and up in one, the rank's gate rows first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mindspeed_tpi.errors import InputError
from mindspeed_tpi.parallel import moe, tree
from mindspeed_tpi.weights.names import Names

Model: TypeAlias = torch.nn.Module | Sequence[torch.nn.Module]
"""A GPTModel, or the model chunks of a virtual pipeline."""


def _whole(parameter: Tensor) -> Tensor:
    return parameter


@dataclass(frozen=True)
class Entry:
    """One Megatron-core parameter and the Hugging Face tensors it is made of.

    Attributes:
        parameter: the parameter or persistent buffer, as this rank holds it. view: the part of it that this entry is about.
        name: its name in the whole model by the local spec, with global layer and expert numbers.
        tensors: names and shapes of the Hugging Face tensors.
        merge: those tensors → the whole value; split: the inverse (views).
        dim: dimension that is sharded over `group`; None: every rank holds all of it.
        parts: runs along `dim` that are sharded separately (gate and up).
        group: process group over which it is sharded; None: this process alone.
    """

    parameter: Tensor
    name: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    merge: Callable[[list[Tensor]], Tensor]
    split: Callable[[Tensor], list[Tensor]]
    dim: int | None = None
    parts: int = 1
    group: Any = None
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


def chunks(model: Model) -> list[Any]:
    """The GPTModels inside Float16Module, DistributedDataParallel and the like."""
    found = []
    for module in [model] if isinstance(model, torch.nn.Module) else model:
        while isinstance(inner := getattr(module, "module", None), torch.nn.Module):
            module = inner
        found.append(module)
    return found


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
_TE_EXPERT_NAME = re.compile(r"mlp\.experts\.(linear_fc[12]\.weight)(\d+)")
_TE_NORMS = {  # a TransformerEngine spec keeps them in the linear layer that follows
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_GROUPED = {  # GroupedMLP: one parameter of all local experts
    "mlp.experts.weight1": ("linear_fc1.weight", moe.grouped_fc1),
    "mlp.experts.weight2": ("linear_fc2.weight", moe.grouped_fc2),
}


def _chunk_entries(model: Any) -> list[Entry]:
    """Entries of one model chunk."""
    config = model.config
    names = Names.of_megatron(config)
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
        prefix, number, local = "decoder.layers.", layer.layer_number - 1, _TE_NORMS.get(match[2], match[2])
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
    if expert := _TE_EXPERT_NAME.fullmatch(name):
        return [(layer.mlp.local_expert_indices[int(expert[2])], expert[1], _whole)]
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


def _moe_layer(names: Names) -> dict[str, tuple[tuple[str, ...], str]]:
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
    return Entry(parameter, name, tensors, merge, split, dim, parts, group, view)


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
