"""The rank of the sampled token, counted eagerly."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mindspeed_tpi.patches.vllm._versions import UNTIL, VERSIONS
from mindspeed_tpi.patching import Patch


def _batched_count_greater_than(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def batched_count_greater_than(x: Tensor, values: Tensor) -> Tensor:
        return (x >= values).sum(-1)

    return batched_count_greater_than


PATCHES = (
    Patch(
        target="vllm.v1.sample.ops.logprobs:batched_count_greater_than",
        factory=_batched_count_greater_than,
        reason="no bits: upstream compiles it at the first logprob, seconds into the first request, for one comparison",
        versions=VERSIONS,
        parameters=None,
        until=UNTIL,
        anytime=True,
    ),
)
