"""Log-probabilities at the sampling temperature (`logprobs_mode="processed_logprobs"`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from mindspeed_tpi.patches.vllm._versions import UNTIL, VERSIONS
from mindspeed_tpi.patches.vllm.v1.sample.sampler import compute_logprobs
from mindspeed_tpi.patching import Patch

Sampled = tuple[Tensor, Tensor | None]


def _with_contract_logprobs(original: Callable[..., Sampled]) -> Callable[..., Sampled]:
    @wraps(original)
    def forward(self: Any, logits: Tensor, generators: Any, k: Tensor | None, p: Tensor | None) -> Sampled:
        if self.logprobs_mode != "processed_logprobs":
            return original(self, logits, generators, k, p)
        self.logprobs_mode = "processed_logits"
        try:
            sampled, processed = original(self, logits, generators, k, p)
        finally:
            self.logprobs_mode = "processed_logprobs"
        assert processed is not None
        return sampled, compute_logprobs(processed)

    return forward


PATCHES = tuple(
    Patch(
        target=f"vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.{method}",
        factory=_with_contract_logprobs,
        reason="calls the library's log_softmax itself; only its sampling is kept",
        versions=VERSIONS,
        parameters=("self", "logits", "generators", "k", "p"),
        until=UNTIL,
        anytime=True,
        kind="wrap",
    )
    for method in ("forward_cpu", "forward_native")
)
