"""Linear layers and the embedding on the contract's operators (contract sections 2, 4, 6 and 9)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from mindspeed_tpi import contract
from mindspeed_tpi.parallel import tree
from mindspeed_tpi.parallel.embedding import vocab_parallel_embedding
from mindspeed_tpi.parallel.linear import column_parallel_linear, row_parallel_linear
from mindspeed_tpi.parallel.mappings import gather_columns, split_columns
from mindspeed_tpi.patches.megatron_core.stand_in import StandIn, stand_in
from mindspeed_tpi.patches.megatron_core.support import UNTIL, VERSIONS, gradient_row_group, real_vocab, served
from mindspeed_tpi.patching import Patch

HEAD_GRAD = "head_main_grad"
PAIRED = "tpi_paired"
"""Attribute of a ColumnParallelLinear whose weight is [gate; up]."""


def column_parallel_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """`ColumnParallelLinear.forward`: the bias is part of the f32 sum; the output projection gives f32 logits of the
    vocabulary's existing rows."""

    def forward(
        self: Any, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        if not served(self.config):
            return original(self, input_, weight, runtime_gather_output)  # type: ignore[no-any-return]
        parameter = self.weight if weight is None else weight
        if parameter is None or parameter.shape != (self.output_size_per_partition, self.input_size):
            raise RuntimeError(
                f"ColumnParallelLinear needs a weight of shape {(self.output_size_per_partition, self.input_size)}, got "
                f"{None if parameter is None else tuple(parameter.shape)}"
            )
        gather = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if not getattr(parameter, "is_embedding_or_output_parameter", False):
            y = column_parallel_linear(
                input_,
                parameter,
                self.bias,
                group=self.tp_group,
                sequence_parallel=self.sequence_parallel,
                paired=getattr(self, PAIRED, False),
                batch=_batch(input_),
                row_group=gradient_row_group(),
            )
            return (gather_columns(y, self.tp_group) if gather else y), None
        parameter = head_weight(self, parameter)
        vocab = real_vocab(self.config, self.output_size)
        rows = self.output_size_per_partition
        logits = column_parallel_linear(
            input_,
            parameter,
            self.bias,
            group=self.tp_group,
            sequence_parallel=self.sequence_parallel,
            dx_leaves=contract.current().head_leaves(vocab),
            used=max(0, min(vocab - rows * tree.rank(self.tp_group), rows)),
            out_dtype=torch.float32,
            batch=_batch(input_),
            row_group=gradient_row_group(),
        )
        return (gather_columns(logits, self.tp_group) if gather else logits), None

    return forward


def row_parallel_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """`RowParallelLinear.forward`: the bias is part of the f32 sum, so none is left for the caller to add."""

    def forward(self: Any, input_: Tensor) -> tuple[Tensor, None]:
        if not served(self.config):
            return original(self, input_)  # type: ignore[no-any-return]
        if not self.input_is_parallel:
            input_ = split_columns(input_, self.tp_group)
        y = row_parallel_linear(
            input_,
            self.weight,
            self.bias,
            group=self.tp_group,
            sequence_parallel=self.sequence_parallel,
            batch=_batch(input_),
            row_group=gradient_row_group(),
        )
        return y, None

    return forward


def vocab_parallel_embedding_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """`VocabParallelEmbedding.forward`: ids [B, S] → [B, S, H], or this rank's rows of [S, B, H] under sequence parallelism;
    duplicate ids' gradients are added row by row."""

    def forward(self: Any, input_: Tensor) -> Tensor:
        return vocab_parallel_embedding(
            self.weight,
            input_,
            group=self.tp_group,
            vocab_start=self.vocab_start_index,
            vocab_size=self.num_embeddings,
            sequence_parallel=self.reduce_scatter_embeddings,
            row_group=gradient_row_group(),
        )

    return forward


def _batch(x: Tensor) -> int:
    """B of an [S, B, K] activation."""
    return x.shape[1] if x.dim() == 3 else 1


def head_weight(layer: Any, weight: Tensor) -> Tensor:
    """The weight as an output projection sees it. A tied one is a leaf of its own, whose f32 gradient stays apart from the
    embedding's until both are complete (contract section 4)."""
    main_grad = getattr(weight, "main_grad", None)
    if layer.weight is not None or main_grad is None or not (torch.is_grad_enabled() and weight.requires_grad):
        return weight
    if not hasattr(weight, HEAD_GRAD):
        setattr(weight, HEAD_GRAD, torch.zeros_like(main_grad, dtype=torch.float32))
    head: Any = weight.detach().requires_grad_()
    head.main_grad = getattr(weight, HEAD_GRAD)
    return head  # type: ignore[no-any-return]


def head_gradient(parameter: Tensor) -> Tensor | None:
    """The f32 gradient of a tied output projection that has not joined its embedding's yet."""
    return getattr(parameter, HEAD_GRAD, None)


def drop_head_gradient(parameter: Tensor) -> None:
    """Forget it, as a gradient buffer is zeroed."""
    if hasattr(parameter, HEAD_GRAD):
        delattr(parameter, HEAD_GRAD)


def add_head_gradient(parameter: Tensor) -> None:
    """Add it to the embedding's `main_grad`, once per optimizer step, after the data-parallel sum of both."""
    head = head_gradient(parameter)
    if head is not None:
        parameter.main_grad.add_(head)  # type: ignore[attr-defined]
        drop_head_gradient(parameter)


def mark_shards(model: torch.nn.Module) -> None:
    """Give every sharded weight the `tensor_model_parallel` mark that Megatron-core's initialisation sets, and with
    `perform_initialization=False` does not: without it the gradient norm takes a shard for a copy and leaves it out."""
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer.moe.experts import GroupedMLP

    for module in model.modules():
        if isinstance(module, layers.ColumnParallelLinear | layers.VocabParallelEmbedding):
            sharded = [(module.weight, 0)]
        elif isinstance(module, layers.RowParallelLinear):
            sharded = [(module.weight, 1)]
        elif isinstance(module, GroupedMLP):
            sharded = [(module.weight1, 1), (module.weight2, 0)]
        else:
            continue
        for weight, dim in sharded:
            if weight is not None and not hasattr(weight, "tensor_model_parallel"):
                layers.set_tensor_model_parallel_attributes(weight, True, dim, 1)


def _fusion(name: str, value: Any, kind: Literal["replace", "add"]) -> Patch:
    return stand_in(
        f"megatron.core.tensor_parallel.layers:{name}",
        value,
        extension="apex's fused_weight_gradient_mlp_cuda",
        instead="this package's operators add weight gradients into main_grad themselves",
        kind=kind,
    )


PATCHES = (
    Patch(
        target="megatron.core.tensor_parallel.layers:ColumnParallelLinear.forward",
        factory=column_parallel_forward,
        reason="library matrix products sum in an order that depends on shape and threads; stock logits are rounded to bf16",
        versions=VERSIONS,
        parameters=("self", "input_", "weight", "runtime_gather_output"),
        until=UNTIL,
    ),
    Patch(
        target="megatron.core.tensor_parallel.layers:RowParallelLinear.forward",
        factory=row_parallel_forward,
        reason="library matrix products sum in an order that depends on shape and threads",
        versions=VERSIONS,
        parameters=("self", "input_"),
        until=UNTIL,
    ),
    Patch(
        target="megatron.core.tensor_parallel.layers:VocabParallelEmbedding.forward",
        factory=vocab_parallel_embedding_forward,
        reason="the stock gradient adds duplicate ids in storage precision, in an order of its own",
        versions=VERSIONS,
        parameters=("self", "input_"),
        until=UNTIL,
    ),
    _fusion("_grad_accum_fusion_available", True, "replace"),
    _fusion(
        "fused_weight_gradient_mlp_cuda",
        StandIn("apex's fused_weight_gradient_mlp_cuda", "gradient_accumulation_fusion"),
        "add",
    ),
)
