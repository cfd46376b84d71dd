"""Cross entropy by the contract's logprob (contract section 6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from mindspeed_tpi.parallel.logprob import token_logprob
from mindspeed_tpi.patches.megatron_core.support import UNTIL, VERSIONS, outside, tensor_parallel_group
from mindspeed_tpi.patching import Patch

_temperature: ContextVar[Tensor | None] = ContextVar("temperature", default=None)


@contextmanager
def temperature(value: Tensor | None) -> Iterator[None]:
    """Divide logits by `value` (f32, [1] or one per token in [s, b] order) in every cross entropy of this context."""
    token = _temperature.set(value)
    try:
        yield
    finally:
        _temperature.reset(token)


def current_temperature() -> Tensor | None:
    """The temperature of this context; None: 1."""
    return _temperature.get()


def vocab_parallel_cross_entropy(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """−log softmax(logits / temperature) at the targets, f32 [s, b]."""

    def cross_entropy(vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
        if label_smoothing > 0 or vocab_parallel_logits.dtype != torch.float32:
            outside(
                f"cross entropy of {vocab_parallel_logits.dtype} logits with label_smoothing={label_smoothing} "
                "(served: float32 logits, no smoothing)"
            )
            return original(vocab_parallel_logits, target, label_smoothing)
        logits = vocab_parallel_logits.reshape(-1, vocab_parallel_logits.shape[-1])
        logprob: Tensor = token_logprob(logits, target.reshape(-1), _temperature.get(), group=tensor_parallel_group())
        return -logprob.view(target.shape)

    return cross_entropy


PATCHES: tuple[Patch, ...] = (
    Patch(
        target="megatron.core.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy",
        factory=vocab_parallel_cross_entropy,
        reason="exp, log and the sum over the vocabulary depend on library and threads",
        versions=VERSIONS,
        parameters=("vocab_parallel_logits", "target", "label_smoothing"),
        until=UNTIL,
    ),
)
