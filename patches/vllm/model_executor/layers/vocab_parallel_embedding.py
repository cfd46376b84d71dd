"""Embedding lookup and output projection; logits are f32 over the real vocabulary (upstream: rounded, then sliced)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi import contract, ops
from mindspeed_tpi.parallel import tree
from mindspeed_tpi.patches.vllm._parallel import tp_group
from mindspeed_tpi.patches.vllm._versions import UNTIL, VERSIONS
from mindspeed_tpi.patching import Patch


def _process_weights_after_loading(original: Callable[..., None]) -> Callable[..., None]:
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        layer.tpi_leaves = contract.current().leaves(layer.weight.shape[1], "whole")

    return process_weights_after_loading


def _apply(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = layer.weight.shape[0]
        if layer.tp_size == 1:  # otherwise padding goes after the gather
            rows = layer.org_vocab_size
        bias = None if bias is None else bias[:rows]
        return ops.linear(x, layer.weight[:rows], bias, leaves=layer.tpi_leaves, out_dtype=torch.float32)

    return apply


def _forward(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(self: Any, input_: Tensor) -> Tensor:
        start = self.shard_indices.org_vocab_start_index
        own = ops.embedding(self.weight, input_.long(), vocab_start=start, vocab_size=self.org_vocab_size)
        return tree.owned_sum(own, tp_group()) if self.tp_size > 1 else own

    return forward


_METHOD = "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod"
PATCHES = (
    Patch(
        target=f"{_METHOD}.process_weights_after_loading",
        factory=_process_weights_after_loading,
        reason="upstream keeps a packed copy of the output projection, which goes stale when weights are updated",
        versions=VERSIONS,
        parameters=("self", "layer"),
        until=UNTIL,
        anytime=True,
    ),
    Patch(
        target=f"{_METHOD}.apply",
        factory=_apply,
        reason="upstream's logits are rounded to the model's dtype",
        versions=VERSIONS,
        parameters=("self", "layer", "x", "bias"),
        until=UNTIL,
        anytime=True,
    ),
    Patch(
        target="vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding.forward",
        factory=_forward,
        reason="the same operator as in the trainer: an id outside the vocabulary is an error, not a row of padding; "
        "adding other ranks' zeros would lose a negative zero",
        versions=VERSIONS,
        parameters=("self", "input_"),
        until=UNTIL,
        anytime=True,
    ),
)
