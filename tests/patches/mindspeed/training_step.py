"""A user's training step: own config, spec and model, one forward and backward pass; prints hashes of loss and gradients."""

from __future__ import annotations

import hashlib
import sys

import mindspeed_tpi  # first, as the README says

if "--mindspeed" in sys.argv:
    import mindspeed.megatron_adaptor  # type: ignore[import-not-found]

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed_tpi.parity.megatron import start_megatron

EXPERTS = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48, "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0, "moe_router_dtype": "fp32", "moe_token_dispatcher_type": "alltoall",
}  # fmt: skip


def main() -> None:
    if "--features" in sys.argv:
        from mindspeed.features_manager import create_features_list  # type: ignore[import-not-found]

        from mindspeed_tpi.patches.mindspeed.features_manager.features_manager import SETTLED

        found = {type(feature).__name__ for feature in create_features_list()}
        assert found == SETTLED.keys(), (
            f"not settled {sorted(found - SETTLED.keys())}, gone {sorted(SETTLED.keys() - found)}"
        )
        print(f"all {len(found)} settled")
        return
    if "--repatch" in sys.argv:
        mindspeed.megatron_adaptor.repatch({"use_flash_attn": True})
    start_megatron()
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, kv_channels=32, ffn_hidden_size=96,
        layernorm_epsilon=1e-6, normalization="RMSNorm", gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16, bf16=True,
        use_cpu_initialization=True, bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        **(EXPERTS if "moe" in sys.argv else {}),
    )  # fmt: skip
    experts = config.num_moe_experts
    spec = get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm")
    if "--te" in sys.argv:
        spec = get_gpt_layer_with_transformer_engine_spec(num_experts=experts, moe_grouped_gemm=bool(experts))
    model = GPTModel(config, spec, 120, 128, position_embedding_type="rope", share_embeddings_and_output_weights=False)
    model.bfloat16()
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=random) + ("norm" in name))
    tokens = torch.randint(0, 120, (2, 64), generator=random)
    loss = model(tokens, torch.arange(64).expand(2, 64), None, labels=tokens.roll(-1, 1))
    loss.sum().backward()
    digest = hashlib.sha256(loss.detach().numpy().tobytes())
    for _, parameter in sorted(model.named_parameters()):
        digest.update(parameter.grad.float().numpy().tobytes())
    states = {status.state for status in mindspeed_tpi.patch_status()}
    assert not states & {"overwritten", "refused"}, states
    print(digest.hexdigest())


main()
