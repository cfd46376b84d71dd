"""Log-probability of chosen tokens, with temperature and entropy (contract section 6); fused with the output projection:
`mindspeed_tpi.parallel.logprob`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi import contract
from mindspeed_tpi.ops import schemas
from mindspeed_tpi.ops._autograd import needs_grad


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


def per_row(temperature: Tensor | None, rows: int) -> Tensor | None:
    """f32 [rows] from a temperature of one or `rows` elements."""
    if temperature is None:
        return None
    return temperature.to(torch.float32).reshape(-1).expand(rows).contiguous()


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
