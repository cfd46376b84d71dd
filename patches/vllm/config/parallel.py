"""Experts see the same tokens on every tensor-parallel rank."""

from __future__ import annotations

from typing import Any

from mindspeed_tpi.patches.vllm._versions import UNTIL, VERSIONS
from mindspeed_tpi.patching import Patch


def _use_sequence_parallel_moe(original: Any) -> Any:
    return property(lambda self: False)


PATCHES = (
    Patch(
        target="vllm.config.parallel:ParallelConfig.use_sequence_parallel_moe",
        factory=_use_sequence_parallel_moe,
        reason="with tensor, data and expert parallelism together, upstream's layers deal tokens to the tensor-parallel ranks, "
        "which ours take whole from every data-parallel rank",
        versions=VERSIONS,
        parameters=None,
        until=UNTIL,
        anytime=True,
    ),
)
