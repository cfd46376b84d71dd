"""Log-probability of chosen tokens, with temperature and entropy, alone and fused with the output projection
(contract section 6)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi import contract
from mindspeed_tpi.ops import schemas
from mindspeed_tpi.ops._autograd import needs_grad, parameter_gradient
from mindspeed_tpi.ops._running_tree import RunningTree
from mindspeed_tpi.ops.linear import linear_dw

CHUNK_ELEMENTS = 1 << 24  # logits held at once by the fused form: 64 MiB of f32


def token_logprob(logits: Tensor, tokens: Tensor, temperature: Tensor | None = None, *, entropy: bool = False) -> Any:
    """log softmax(logits / temperature) at the chosen tokens.

    Args:
        logits: f32 [T, V], the real vocabulary only. tokens: int64 [T].
        temperature: f32 [T], or [1] for all rows, or None for 1.
        entropy: also return the entropy of each row.

    Returns:
        f32 [T], or (f32 [T], f32 [T]) with the entropy.

    Raises:
        BackendError: a token id outside the vocabulary, or operands outside the schema.
    """
    temperature = per_row(temperature, tokens.numel())
    if needs_grad(logits):
        logprob, ent = _TokenLogprob.apply(logits, tokens, temperature, entropy)
    else:
        cut = contract.current().vocab_leaves(logits.shape[1])
        logprob, ent, _, _ = schemas.token_logprob(logits, tokens, temperature, cut.size, cut.count, entropy)
    return (logprob, ent) if entropy else logprob


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    temperature: Tensor | None = None,
    *,
    entropy: bool = False,
    batch: int = 1,
    chunk: int | None = None,
) -> Any:
    """`token_logprob(linear(hidden, weight) in f32, tokens)` without a [tokens, vocabulary] tensor; the same bits.

    Args:
        hidden: [T, H]. weight: [V, H], the output projection.
        batch: B when the tokens are laid out [S, B] (rows of the weight gradient).
        chunk: tokens per chunk of the forward pass (default: as many as fit `CHUNK_ELEMENTS` logits).
    """
    temperature = per_row(temperature, tokens.numel())
    step = chunk or max(1, CHUNK_ELEMENTS // weight.shape[0])
    if needs_grad(hidden, weight):
        logprob, ent = _LinearLogprob.apply(hidden, weight, tokens, temperature, entropy, batch, step)
    else:
        logprob, ent, _, _ = _chunked(hidden, weight, tokens, temperature, entropy, step)
    return (logprob, ent) if entropy else logprob


def per_row(temperature: Tensor | None, rows: int) -> Tensor | None:
    """f32 [rows] from a temperature of one or `rows` elements."""
    if temperature is None:
        return None
    return temperature.to(torch.float32).reshape(-1).expand(rows).contiguous()


def _chunked(
    hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: Tensor | None, entropy: bool, step: int
) -> tuple[Tensor, ...]:
    """(logprob, entropy, max, sum), each f32 [T], chunk by chunk of tokens."""
    k, v = contract.current().leaves(weight.shape[1], "whole"), contract.current().vocab_leaves(weight.shape[0])
    parts = []
    for start in range(0, max(tokens.numel(), 1), step):
        rows = slice(start, start + step)
        logits = schemas.linear(hidden[rows], weight, None, k.size, k.count, torch.float32)
        t = None if temperature is None else temperature[rows]
        parts.append(schemas.token_logprob(logits, tokens[rows], t, v.size, v.count, entropy))
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


class _TokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, tokens: Tensor, temperature: Tensor | None, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        cut = contract.current().vocab_leaves(logits.shape[1])
        logprob, ent, largest, total = schemas.token_logprob(logits, tokens, temperature, cut.size, cut.count, entropy)
        ctx.save_for_backward(logits, tokens, temperature, ent, largest, total)
        return logprob, ent

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return logits_gradient(ctx.saved_tensors, grads, 0), None, None, None


def logits_gradient(saved: tuple[Tensor, ...], grads: tuple[Any, ...], vocab_start: int) -> Tensor:
    """dlogits, in the logits' dtype.

    Args:
        saved: logits, tokens, temperature, entropy, maximum and sum of the forward pass.
        grads: gradients of logprob and entropy.
        vocab_start: first column of this rank.
    """
    logits, tokens, temperature, ent, largest, total = saved
    dlogits: Tensor = schemas.vocab_logprob_backward(
        logits,
        tokens,
        largest,
        total,
        ent,
        grads[0],
        _entropy_gradient(ent, grads[1]),
        temperature,
        vocab_start,
        logits.dtype,
    )
    return dlogits


def _entropy_gradient(entropy: Tensor, grad: Tensor | None) -> Tensor | None:
    return grad if entropy.numel() else None


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        tokens: Tensor,
        temperature: Tensor | None,
        entropy: bool,
        batch: int,
        step: int,
    ) -> tuple[Tensor, Tensor]:
        logprob, ent, largest, total = _chunked(hidden, weight, tokens, temperature, entropy, step)
        ctx.save_for_backward(hidden, weight, tokens, temperature, ent, largest, total)
        ctx.batch = batch
        return logprob, ent

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """One pass over blocks of whole vocabulary leaves: a block's logits are made again, its dlogits give its rows of
        dW at once and one node of dX's tree."""
        hidden, weight, tokens, temperature, ent, largest, total = ctx.saved_tensors
        k, v = contract.current().leaves(weight.shape[1], "whole"), contract.current().head_leaves(weight.shape[0])
        grad_entropy = _entropy_gradient(ent, grads[1])
        leaves = v.count  # per block: halved while a block is too large, so that each block is a subtree
        while leaves > 1 and tokens.numel() * leaves * v.size > CHUNK_ELEMENTS:
            leaves //= 2
        tree = RunningTree()

        def blocks(accumulate: Tensor | None) -> None:
            for start in range(0, v.size * v.count, leaves * v.size):
                stop = min(start + leaves * v.size, weight.shape[0])
                if start >= stop:
                    tree.add(torch.zeros_like(hidden, dtype=torch.float32))
                    continue
                part = weight[start:stop]
                logits = schemas.linear(hidden, part, None, k.size, k.count, torch.float32)
                dlogits = schemas.vocab_logprob_backward(
                    logits, tokens, largest, total, ent, grads[0], grad_entropy, temperature, start, hidden.dtype
                )
                if ctx.needs_input_grad[0]:
                    tree.add(schemas.linear_dx(dlogits, part, v.size, leaves, torch.float32, False))
                if accumulate is not None:
                    linear_dw(dlogits, hidden, accumulate[start:stop], batch=ctx.batch)

        dweight = None
        if ctx.needs_input_grad[1]:
            dweight = parameter_gradient(weight, blocks, ctx.batch)
        else:
            blocks(None)
        dhidden = tree.root().to(hidden.dtype) if ctx.needs_input_grad[0] else None
        return dhidden, dweight, None, None, None, None, None
