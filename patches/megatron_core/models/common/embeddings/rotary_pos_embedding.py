"""Rotary tables in the place of rotary angles (contract section 4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi import ops
from mindspeed_tpi.errors import InputError
from mindspeed_tpi.parallel import tree, zigzag
from mindspeed_tpi.patches.megatron_core.support import UNTIL, VERSIONS, by_version, context_parallel_group
from mindspeed_tpi.patching import Patch


def tables(config: ops.RopeConfig, length: int, offset: int = 0, group: Any = None) -> Tensor:
    """cos and sin of positions `offset` to `offset + length`, f32 [length, 1, 2, R/2]; of these, the positions that a rank of
    the context-parallel `group` holds.

    Raises:
        InputError: a position beyond the model's tables.
    """
    if offset + length > config.max_position:
        raise InputError(
            f"a sequence of {offset + length} tokens exceeds the model's {config.max_position} positions "
            "(max_sequence_length of GPTModel, max_position_embeddings of the checkpoint)"
        )
    cos, sin = ops.rope_tables(config)
    rows = torch.arange(offset, offset + length)
    if tree.size(group) > 1:
        rows = rows[zigzag.positions(length // tree.size(group), group)]
    return torch.stack((cos[rows], sin[rows]), dim=1).unsqueeze(1)


def sequence_group(packed_seq: bool = False, cp_group: Any = None) -> Any:
    """Ranks that share a sequence's positions, from the last arguments of a rotary embedding's `forward`; a pack is whole."""
    return None if packed_seq else context_parallel_group()


def forward(original: Any) -> Callable[..., Tensor]:
    """`RotaryEmbedding.forward`: tables once a served GPTModel has bound its `rope_config`, angles before."""

    def rotary_forward(self: Any, max_seq_len: int, offset: int = 0, *args: Any, **kwargs: Any) -> Tensor:
        config = getattr(self, "rope_config", None)
        if config is None:
            return original(self, max_seq_len, offset, *args, **kwargs)  # type: ignore[no-any-return]
        return tables(config, max_seq_len, offset, sequence_group(*args, **kwargs))

    rotary_forward.cache_clear = original.cache_clear  # type: ignore[attr-defined]
    return rotary_forward


PATCHES: tuple[Patch, ...] = (
    Patch(
        target="megatron.core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding.forward",
        factory=forward,
        reason="stock angles are products of f32 numbers, so cos and sin are off by many units at large positions",
        versions=VERSIONS,
        parameters=by_version(
            ("0.16", ("self", "max_seq_len", "offset", "packed_seq", "cp_group")),
            ("0.13", ("self", "max_seq_len", "offset", "packed_seq")),
        ),
        until=UNTIL,
    ),
)
