"""A layer spec that names the contract's norms itself, and TransformerEngine's specs without TransformerEngine."""

from __future__ import annotations

import copy
import importlib
from typing import Any

from mindspeed_tpi.patches.megatron_core.extensions.transformer_engine import installed
from mindspeed_tpi.patches.megatron_core.support import UNTIL, VERSIONS
from mindspeed_tpi.patches.megatron_core.transformer.torch_norm import RMSNorm
from mindspeed_tpi.patching import Patch


def get_gpt_layer_parity_spec(config: Any, vp_stage: int | None = None) -> Any:
    """The local layer specs, of dense and MoE layers, with the contract's RMSNorm for every norm, the final one included.

    The stock local spec gives the same model where Megatron-core falls back to its torch norm; with Transformer Engine
    or apex installed it picks theirs, and this spec is the way to the contract.

    Args:
        config: TransformerConfig.
        vp_stage: virtual pipeline stage.

    Returns:
        TransformerBlockSubmodules for GPTModel's `transformer_layer_spec`.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
    block = copy.deepcopy(block)  # upstream shares specs between layers
    block.layer_norm = RMSNorm
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        if config.qk_layernorm:
            attention = layer.submodules.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    return block


def _added(name: str, module: str) -> Patch:
    def import_from(original: Any) -> Any:
        return getattr(importlib.import_module(module), name)

    return Patch(
        target=f"megatron.core.models.gpt.gpt_layer_specs:{name}",
        factory=import_from,
        reason="no bits: get_gpt_layer_with_transformer_engine_spec, most scripts' default, names it without TransformerEngine too",
        versions=VERSIONS,
        parameters=None,  # a class
        until=UNTIL,
        kind="add",
        applies=installed,
    )


PATCHES: tuple[Patch, ...] = (
    _added("TESpecProvider", "megatron.core.extensions.transformer_engine_spec_provider"),
    _added("TENorm", "megatron.core.extensions.transformer_engine"),
)
