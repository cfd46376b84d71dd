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
    """The local layer spec with the contract's RMSNorm for every norm, the final one included.

    The stock local spec gives the same model where Megatron-core falls back to its torch norm; with Transformer Engine
    or apex installed it picks theirs, and this spec is the way to the contract.

    Args:
        config: TransformerConfig.
        vp_stage: virtual pipeline stage.

    Returns:
        TransformerBlockSubmodules for GPTModel's `transformer_layer_spec`.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    layer = copy.deepcopy(get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm"))
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    if config.qk_layernorm:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    stage = {} if vp_stage is None else {"vp_stage": vp_stage}
    count = get_num_layers_to_build(config, **stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=RMSNorm)


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
