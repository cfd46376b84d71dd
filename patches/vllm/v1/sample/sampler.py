"""Log-probabilities of a whole row of logits, for sampled and for prompt tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mindspeed_tpi import ops
from mindspeed_tpi.patches.vllm._versions import UNTIL, VERSIONS
from mindspeed_tpi.patching import Patch


def compute_logprobs(logits: Tensor) -> Tensor:
    """f32 [T, V] → f32 [T, V].

    (z − M) − log S, and the largest logit's logprob is exactly −log S; so every column gets the bits that
    `ops.token_logprob` gives for it.
    """
    largest, token = logits.max(dim=-1)
    minus_log_sum = ops.token_logprob(logits, token)
    return (logits - largest.unsqueeze(-1)).add_(minus_log_sum.unsqueeze(-1))


def _compute_logprobs(original: Any) -> Any:
    return staticmethod(compute_logprobs)


PATCHES = (
    Patch(
        target="vllm.v1.sample.sampler:Sampler.compute_logprobs",
        factory=_compute_logprobs,
        reason="the library's log_softmax sums the vocabulary in its own order, with its own exp and log",
        versions=VERSIONS,
        parameters=("logits",),
        until=UNTIL,
        anytime=True,
    ),
)
