"""Log-probabilities of given tokens, the same bits as the rollout engine reports: the public `mindspeed_tpi.logprobs`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi.errors import InputError, LayoutError
from mindspeed_tpi.parallel.logprob import linear_logprob, token_logprob


def logprobs(
    scores: Tensor,
    labels: Tensor,
    *,
    weight: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    model: Any = None,
    group: Any = None,
    vocab: int | None = None,
) -> Any:
    """log softmax(logits / temperature) at the labels, differentiable in scores and weight.

    Args:
        scores: f32 [*, V], logits of the vocabulary's existing rows: GPTModel's output, or any model's whose output layer runs
            the contract's `linear`. With `weight`: [*, H], the hidden states before the output projection.
        labels: int64 [*], the token to score at each place (for a causal model, the next token); negative: no token there,
            which gives +0 and no gradient. Packed sequences are [T] or [1, T], like the model's output.
        weight: [V, H], the output projection; the logits are then never held as a whole, and have the same bits. Leading
            dimensions of the hidden states are [batch, length], as of `labels`; one dimension is a pack.
        temperature: one for all, or a tensor that broadcasts to the labels' shape (for [batch, length]: [batch, 1]).
        entropy: also return the entropy of each place.
        model: the Megatron-core GPTModel (wrapped or not) that made the logits; says over which ranks the vocabulary is spread.
        group: that process group, for models of another make: rank r holds the columns after rank r − 1's.
        vocab: existing rows of the whole `weight`, the others being padding (default: the model's; without one, all exist).

    Returns:
        f32 of the labels' shape, or (logprob, entropy), the same on every rank.

    Raises:
        InputError: shapes or dtypes other than these, or a temperature that is not positive.
        LayoutError: shards that cut the contract's leaves; or neither `model` nor `group` under tensor parallelism.
    """
    if scores.dim() < 2 or scores.shape[:-1] != labels.shape or labels.dtype != torch.int64:
        raise InputError(
            f"scores {tuple(scores.shape)} need int64 labels of shape {tuple(scores.shape[:-1])}, got {labels.dtype} "
            f"{tuple(labels.shape)}"
        )
    if weight is None and scores.dtype != torch.float32:
        raise InputError(
            f"logits are {scores.dtype}, but the engine reports log-probabilities of float32 logits; take the output of a model "
            "built under mindspeed_tpi, or pass its last hidden states and weight="
        )
    group = _group(model, group)
    counts = labels >= 0
    tokens = labels.clamp(min=0)
    scale = _scale(temperature, labels)
    if weight is None:
        flat = token_logprob(scores.flatten(0, -2), tokens.flatten(), _flat(scale), group=group, entropy=entropy)
        found = flat if entropy else (flat,)
        results = [value.view(labels.shape) for value in found]
    else:
        results = _fused(scores, weight, tokens, scale, entropy, group, _vocab(model) if vocab is None else vocab)
    results[0] = torch.where(counts, results[0], torch.zeros((), dtype=results[0].dtype, device=results[0].device))
    return (results[0], results[1]) if entropy else results[0]


def _fused(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    scale: Tensor | None,
    entropy: bool,
    group: Any,
    vocab: int | None,
) -> list[Tensor]:
    """Through the fused head, whose weight gradient sums row by row: tokens go in as [length, batch]."""
    if hidden.shape[-1] != weight.shape[-1]:
        raise InputError(f"hidden states {tuple(hidden.shape)} do not fit the output projection {tuple(weight.shape)}")
    if tokens.dim() > 2:
        raise InputError(f"labels of shape {tuple(tokens.shape)} with weight=: use [batch, length] or [tokens]")
    rows = tokens.dim() == 2 and tokens.shape[0] > 1
    batch = tokens.shape[0] if rows else 1

    def by_position(x: Tensor) -> Tensor:
        return (x.transpose(0, 1) if rows else x).reshape(-1, *x.shape[tokens.dim() :])

    flat = linear_logprob(
        by_position(hidden),
        weight,
        by_position(tokens),
        temperature=None if scale is None else by_position(scale),
        entropy=entropy,
        group=group,
        vocab=vocab,
        batch=batch,
    )
    found = flat if entropy else (flat,)
    if not rows:
        return [value.view(tokens.shape) for value in found]
    return [value.view(tokens.shape[1], batch).t() for value in found]


def _group(model: Any, group: Any) -> Any:
    """The ranks that share the vocabulary; None for this process alone."""
    state = sys.modules.get("megatron.core.parallel_state")
    if model is not None:
        from mindspeed_tpi.parity.check import gpt_model
        from mindspeed_tpi.patches.megatron_core.support import tensor_parallel_group

        return tensor_parallel_group() if gpt_model(model).parallel_output else None
    if group is None and state is not None and state.model_parallel_is_initialized():
        ranks = state.get_tensor_model_parallel_world_size()
        if ranks > 1:
            raise LayoutError(
                f"Megatron-core runs {ranks} tensor-parallel ranks here: say with model= or group= how the vocabulary is "
                "spread (group of one rank: these logits are whole)"
            )
    return group


def _vocab(model: Any) -> int | None:
    """Existing rows of a model's output projection; None: all."""
    if model is None:
        return None
    from mindspeed_tpi.parity.check import gpt_model
    from mindspeed_tpi.patches.megatron_core.support import real_vocab

    inner = gpt_model(model)
    return real_vocab(inner.config, inner.vocab_size)


def _scale(temperature: float | Tensor, labels: Tensor) -> Tensor | None:
    """f32 of the labels' shape, None for 1."""
    if not isinstance(temperature, Tensor):
        if temperature == 1:
            return None
        temperature = torch.tensor(temperature, dtype=torch.float32, device=labels.device)
    if not bool((temperature > 0).all()):
        raise InputError(f"temperature {temperature} must be positive; greedy sampling is reported at temperature 1")
    return temperature.to(torch.float32).expand(labels.shape)


def _flat(scale: Tensor | None) -> Tensor | None:
    return None if scale is None else scale.reshape(-1)
