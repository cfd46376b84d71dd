"""Micro-batches through a model, by Megatron-core's own forward-backward schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mindspeed_tpi.parallel.layout import Layout
from mindspeed_tpi.parity.batches import Batch

Consume: TypeAlias = Callable[[Batch, Tensor, Tensor], Tensor]
"""(micro-batch, its cross entropy f32 [b, s of this rank], positions int64 [s of this rank]) -> what to differentiate."""


def run(
    chunks: list[Any], layout: Layout, batches: Iterable[Batch], temperature: float, consume: Consume, *, stock: bool
) -> None:
    """Every micro-batch forward only under `torch.no_grad`; else with a backward pass from what `consume` returns, and then
    the models' `finalize_model_grads_func`.

    Args:
        chunks: this rank's GPTModels, wrapped or not.
        stock: whether cross entropy is upstream's.
    """
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    todo = list(batches)
    lines, length = (max(batch.tokens.shape[i] for batch in todo) for i in (0, 1))
    if layout.pp > 1:  # stages expect activations of one shape
        todo = [batch.padded(lines, length) for batch in todo]
    if layout.vpp > 1:  # the interleaved schedule takes whole groups
        todo += [Batch.of([], [], length, lines)] * (-len(todo) % layout.pp)

    def step(iterator: Iterator[Batch], chunk: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        batch = next(iterator)
        output = cross_entropy(chunk, batch, temperature, stock=stock)
        none = torch.zeros((), dtype=torch.int)  # no tokens to divide gradients by: `consume` has weighed the loss
        return output, lambda loss: (consume(batch, loss, positions(batch)), none, {})

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(todo) for _ in chunks],
        model=chunks,
        num_microbatches=len(todo),
        seq_length=length,
        micro_batch_size=lines,
        forward_only=not torch.is_grad_enabled(),
    )


def cross_entropy(chunk: Any, batch: Batch, temperature: float, *, stock: bool = False) -> Tensor:
    """Cross entropy f32 [b, s of this rank] of one micro-batch at a temperature; or what an earlier pipeline stage hands on."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    tokens, labels, places = get_batch_on_this_cp_rank(
        {
            "tokens": batch.tokens,
            "labels": batch.labels,
            "positions": torch.arange(batch.tokens.shape[1]).repeat(len(batch.tokens), 1),
        }
    ).values()
    if stock and temperature != 1:
        from megatron.core import tensor_parallel

        output = chunk(tokens, places, None)
        if not getattr(chunk, "module", chunk).post_process:
            return output  # type: ignore[no-any-return]
        logits = (output.float() / temperature).transpose(0, 1).contiguous()
        return tensor_parallel.vocab_parallel_cross_entropy(logits, labels.t().contiguous()).t()  # type: ignore[no-any-return]
    from mindspeed_tpi.patches.megatron_core.tensor_parallel import cross_entropy as patched

    with nullcontext() if temperature == 1 else patched.temperature(torch.tensor([temperature])):
        return chunk(tokens, places, None, labels=labels)  # type: ignore[no-any-return]


def positions(batch: Batch) -> Tensor:
    """Position in its row of every token that this context-parallel rank holds, int64 [s of this rank]."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    whole = torch.arange(batch.tokens.shape[1]).unsqueeze(0)
    return get_batch_on_this_cp_rank({"positions": whole})["positions"][0]  # type: ignore[no-any-return]
