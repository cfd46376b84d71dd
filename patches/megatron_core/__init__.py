"""Replacements in Megatron-core: GPTModel computes by the numerics contract."""

from __future__ import annotations

from mindspeed_tpi.patches.megatron_core._coverage import KEPT
from mindspeed_tpi.patches.megatron_core.dist_checkpointing import serialization
from mindspeed_tpi.patches.megatron_core.distributed import (
    distributed_data_parallel,
    finalize_model_grads,
    param_and_grad_buffer,
)
from mindspeed_tpi.patches.megatron_core.extensions import transformer_engine
from mindspeed_tpi.patches.megatron_core.fusions import fused_bias_dropout
from mindspeed_tpi.patches.megatron_core.models.common.embeddings import (
    rope_utils,
    rotary_pos_embedding,
    yarn_rotary_pos_embedding,
)
from mindspeed_tpi.patches.megatron_core.models.gpt import gpt_layer_specs, gpt_model
from mindspeed_tpi.patches.megatron_core.optimizer import clip_grads, optimizer
from mindspeed_tpi.patches.megatron_core.tensor_parallel import cross_entropy, layers
from mindspeed_tpi.patches.megatron_core.transformer import attention, dot_product_attention, mlp, torch_norm
from mindspeed_tpi.patches.megatron_core.transformer.moe import (
    grouped_gemm_util,
    moe_layer,
    token_dispatcher,
)
from mindspeed_tpi.patching import Patch

__all__ = ["KEPT", "PATCHES"]

PATCHES: tuple[Patch, ...] = (
    *layers.PATCHES,
    *cross_entropy.PATCHES,
    *torch_norm.PATCHES,
    *dot_product_attention.PATCHES,
    *attention.PATCHES,
    *mlp.PATCHES,
    *moe_layer.PATCHES,
    *grouped_gemm_util.PATCHES,
    *token_dispatcher.PATCHES,
    *rope_utils.PATCHES,
    *rotary_pos_embedding.PATCHES,
    *yarn_rotary_pos_embedding.PATCHES,
    *fused_bias_dropout.PATCHES,
    *transformer_engine.PATCHES,
    *gpt_layer_specs.PATCHES,
    *gpt_model.PATCHES,
    *distributed_data_parallel.PATCHES,
    *finalize_model_grads.PATCHES,
    *param_and_grad_buffer.PATCHES,
    *clip_grads.PATCHES,
    *serialization.PATCHES,
    *optimizer.PATCHES,
)
