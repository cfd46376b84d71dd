"""Token embedding: a copy; its gradient adds duplicate ids in token order (contract section 4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi.ops import schemas
from mindspeed_tpi.ops._autograd import needs_grad, parameter_gradient


def embedding(
    weight: Tensor, ids: Tensor, *, vocab_start: int = 0, vocab_size: int | None = None, batch: int = 1
) -> Tensor:
    """Rows of `weight` [rows, H] for int64 `ids` [*] → [*, H].

    Args:
        vocab_start: first id that this rank's rows hold; rows of other ranks' ids are +0.
        vocab_size: ids must lie below it (default: vocab_start + rows).
        batch: B when the ids are laid out [S, B] (order of the gradient).

    Raises:
        BackendError: an id outside the vocabulary.
    """
    size = vocab_start + weight.shape[0] if vocab_size is None else vocab_size
    if needs_grad(weight):
        y: Tensor = _Embedding.apply(weight, ids, vocab_start, size, batch)
        return y
    return schemas.embedding(weight, ids, vocab_start, size)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, vocab_start: int, vocab_size: int, batch: int) -> Tensor:
        ctx.save_for_backward(weight, ids)
        ctx.options = (vocab_start, batch)
        return schemas.embedding(weight, ids, vocab_start, vocab_size)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _gradient(ctx, grads[0]), None, None, None, None


def _gradient(ctx: Any, dy: Tensor) -> Tensor:
    weight, ids = ctx.saved_tensors
    vocab_start, batch = ctx.options
    return parameter_gradient(
        weight,
        lambda g: schemas.embedding_dw(dy.reshape(-1, dy.shape[-1]), ids.reshape(-1), g, vocab_start, batch, None),
        batch,
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.options = (inputs[2], 1)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return _gradient(ctx, dy), None, None, None


schemas.register_autograd("embedding", _backward, _setup)
