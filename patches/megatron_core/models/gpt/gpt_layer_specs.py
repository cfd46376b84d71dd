"""Residual add of the local layer spec, and a spec that names the contract's norms itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor

from mindspeed_tpi import ops
from mindspeed_tpi.patches.megatron_core.support import UNTIL, VERSIONS, outside
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


def get_bias_dropout_add(original: Callable[..., Any]) -> Callable[..., Any]:
    """The residual add, rounded once and never compiled.

    Its input has two readers, the norm and the next residual add, each with one rounded gradient; autograd adds the two
    in f32 and rounds, which is the contract's rounded(dx_norm) + d_skip (section 4) in either order of arrival.
    """

    def get(training: bool, fused: bool) -> Callable[..., Tensor]:
        def add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
            x, bias = x_with_bias
            if bias is not None or (training and prob > 0) or x.dtype != residual.dtype:
                outside(
                    f"residual add with bias={bias is not None}, dropout={prob if training else 0.0}, dtypes {x.dtype} and "
                    f"{residual.dtype} (served: no bias, no dropout, one dtype)"
                )
                return original(training, fused)(x_with_bias, residual, prob)  # type: ignore[no-any-return]
            return ops.residual_add(x, residual)

        return add

    return get


PATCHES: tuple[Patch, ...] = (
    Patch(
        target="megatron.core.models.gpt.gpt_layer_specs:get_bias_dropout_add",
        factory=get_bias_dropout_add,
        reason="the fused form is compiled, and a compiler may drop roundings between bias, dropout and add",
        versions=VERSIONS,
        parameters=("training", "fused"),
        until=UNTIL,
    ),
)
