"""Rotary tables of YaRN, its factor included (contract section 4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mindspeed_tpi.patches.megatron_core.models.common.embeddings.rotary_pos_embedding import sequence_group, tables
from mindspeed_tpi.patches.megatron_core.support import UNTIL, VERSIONS, by_version
from mindspeed_tpi.patching import Patch


def forward(original: Any) -> Callable[..., tuple[Tensor, float]]:
    """`YarnRotaryEmbedding.forward`: (tables, 1.0), because the factor is multiplied before the tables are rounded."""

    def yarn_forward(self: Any, max_seq_len: int, offset: int = 0, *args: Any, **kwargs: Any) -> tuple[Tensor, float]:
        config = getattr(self, "rope_config", None)
        if config is None:
            return original(self, max_seq_len, offset, *args, **kwargs)  # type: ignore[no-any-return]
        return tables(config, max_seq_len, offset, sequence_group(*args, **kwargs)), 1.0

    yarn_forward.cache_clear = original.cache_clear  # type: ignore[attr-defined]
    return yarn_forward


PATCHES: tuple[Patch, ...] = (
    Patch(
        target="megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding.forward",
        factory=forward,
        reason="stock angles are products of f32 numbers, and its factor multiplies values already rounded",
        versions=VERSIONS,
        parameters=by_version(
            ("0.16", ("self", "max_seq_len", "offset", "packed_seq", "cp_group")),
            ("0.14", ("self", "max_seq_len", "offset", "packed_seq")),
            ("0.13", ("self", "max_seq_len", "offset")),
        ),
        until=UNTIL,
    ),
)
