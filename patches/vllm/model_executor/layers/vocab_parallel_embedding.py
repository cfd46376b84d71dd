"""Embedding lookup and output projection; logits are f32 over the real vocabulary (upstream: rounded, then sliced)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi import contract, ops
from mindspeed_tpi.patches.vllm._versions import UNTIL, VERSIONS
from mindspeed_tpi.patching import Patch


def _process_weights_after_loading(original: Callable[..., None]) -> Callable[..., None]:
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        layer.tpi_leaves = contract.current().leaves(layer.weight.shape[1])

    return process_weights_after_loading


def _apply(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = layer.org_vocab_size
        bias = None if bias is None else bias[:rows]
        return ops.linear(x, layer.weight[:rows], bias, leaves=layer.tpi_leaves, out_dtype=torch.float32)

    return apply


def _embedding(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def embedding(self: Any, layer: Any, input_: Tensor) -> Tensor:
        return ops.embedding(layer.weight, input_, vocab_size=layer.org_vocab_size)

    return embedding


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
        target=f"{_METHOD}.embedding",
        factory=_embedding,
        reason="the same operator as in the trainer: an id outside the vocabulary is an error, not a row of padding",
        versions=VERSIONS,
        parameters=("self", "layer", "input_"),
        until=UNTIL,
        anytime=True,
    ),
)
