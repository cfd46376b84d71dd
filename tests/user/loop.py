"""Training as a user writes it: own TransformerConfig and layer spec, Megatron-core's DistributedDataParallel, optimizer,
clipping and schedule, log-probabilities by GPTModel itself. Nothing of `mindspeed_tpi.parity` is imported.

    python -m torch.distributed.run --nproc-per-node N -m tests.user.loop SCENARIOS.json OUT.pt
"""

# ruff: noqa: E402
from __future__ import annotations

import json
import os
import sys

import mindspeed_tpi  # noqa: F401  before Megatron-core
from mindspeed_tpi.platform import cpu

cpu.enable()  # this machine has no accelerator

import hashlib
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from mindspeed_tpi import contract, weights

VOCAB, EXPERTS = 100, 8
EXPERT_FIELDS = {
    "num_moe_experts": EXPERTS, "moe_router_topk": 2, "moe_ffn_hidden_size": 64, "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, "moe_token_dispatcher_type": "alltoall",
}  # fmt: skip
# family -> fields of the TransformerConfig that differ, arguments of the GPTModel that differ
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {}),
    "qwen2": ({"add_qkv_bias": True, "kv_channels": 16}, {}),
    "mistral": ({"window_size": (15, 0)}, {}),
    "dense": ({"qk_layernorm": True}, {"share_embeddings_and_output_weights": True}),
    "moe": ({"qk_layernorm": True, **EXPERT_FIELDS}, {}),
    "mixtral": (EXPERT_FIELDS, {}),
    "qwen2-moe": (
        {
            "add_qkv_bias": True, "kv_channels": 16, "moe_router_pre_softmax": True, "moe_shared_expert_intermediate_size": 128,
            "moe_shared_expert_gate": True, **EXPERT_FIELDS,
        },
        {},
    ),
    "glm4-moe": (
        EXPERT_FIELDS | {
            "qk_layernorm": True, "add_qkv_bias": True, "moe_layer_freq": [0, 1], "moe_router_topk": 4,
            "moe_router_score_function": "sigmoid", "moe_router_num_groups": 4, "moe_router_group_topk": 2,
            "moe_router_topk_scaling_factor": 2.5, "moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.0,
            "moe_shared_expert_intermediate_size": 128,
        },
        {"rotary_percent": 0.5},
    ),
}  # fmt: skip


def config(job: dict[str, Any]) -> TransformerConfig:
    layout = job["layout"]
    made = TransformerConfig(**{
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 32, "ffn_hidden_size": 96,
        "layernorm_epsilon": 1e-6, "normalization": "RMSNorm", "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu, "add_bias_linear": False, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "params_dtype": torch.bfloat16, "bf16": True, "use_cpu_initialization": True, "bias_activation_fusion": False,
        "bias_dropout_fusion": False, "masked_softmax_fusion": False, "calculate_per_token_loss": True,
        "perform_initialization": job.get("initialize", True),
        "tensor_model_parallel_size": layout.get("tp", 1), "sequence_parallel": layout.get("tp", 1) > 1,
        "expert_model_parallel_size": layout.get("ep", 1), "expert_tensor_parallel_size": layout.get("etp", 1),
        **FAMILIES[job["kind"]][0], **job.get("fields", {}),
    })  # fmt: skip
    made.unpadded_vocab_size = VOCAB
    return made


def layer(settings: TransformerConfig, experts: bool) -> ModuleSpec:
    norm = WrappedTorchNorm if settings.qk_layernorm else None
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear,
        q_layernorm=norm, k_layernorm=norm,
    )  # fmt: skip
    dense = ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
    return ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            self_attention=ModuleSpec(SelfAttention, {"attn_mask_type": AttnMaskType.causal}, attention),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False) if experts else dense,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def spec(settings: TransformerConfig, transformer_engine: bool) -> TransformerBlockSubmodules:
    """A spec of the user's own, or upstream's with TransformerEngine's classes."""
    if transformer_engine:
        return get_gpt_decoder_block_spec(settings, use_transformer_engine=True)
    frequency = settings.moe_layer_freq if settings.num_moe_experts else [0, 0]
    experts = [1, 1] if frequency == 1 else frequency
    return TransformerBlockSubmodules([layer(settings, bool(e)) for e in experts], layer_norm=WrappedTorchNorm)


def groups(layout: dict[str, int]) -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.get("tp", 1), expert_model_parallel_size=layout.get("ep", 1),
        expert_tensor_parallel_size=layout.get("etp", 1),
    )  # fmt: skip


def digest(tensors: Any) -> dict[str, str]:
    return {n: hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for n, t in tensors}


def train(job: dict[str, Any]) -> dict[str, Any]:
    layout, options = job["layout"], job.get("options", {})
    os.environ["MINDSPEED_TPI_GRADIENT_GROUPS"] = str(job.get("groups", 0))
    groups(layout)
    settings = config(job)
    rows = contract.current().padded_vocab(VOCAB) if layout.get("tp", 1) > 1 else VOCAB
    arguments = {"share_embeddings_and_output_weights": False} | FAMILIES[job["kind"]][1]
    model = GPTModel(
        settings, spec(settings, "te" in job), rows, 64, position_embedding_type="rope", rotary_base=1e6, **arguments
    ).bfloat16()  # fmt: skip
    weights.load(model, job["model"])
    distributed = options.get("distributed", True)
    overlap = options.get("overlap", False)
    ddp = DistributedDataParallel(
        settings,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed, overlap_grad_reduce=overlap,
            overlap_param_gather=overlap and distributed, bucket_size=5000 if overlap else None,
        ),
        model,
    )  # fmt: skip
    settings.finalize_model_grads_func = finalize_model_grads
    settings.no_sync_func = ddp.no_sync if overlap else None
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-2, weight_decay=0.1, clip_grad=0.5, bf16=True, params_dtype=torch.bfloat16,
            use_distributed_optimizer=distributed, overlap_param_gather=overlap and distributed,
        ),
        [ddp],
    )  # fmt: skip
    settings.grad_scale_func = optimizer.scale_loss

    record = torch.load(job["record"])
    tokens, scored, engine = (record[name] for name in ("tokens", "scored", "logprobs"))
    kept = (slice(job.get("rows", len(tokens))), slice(job.get("length", tokens.shape[1])))
    tokens, scored, engine = (x[kept].contiguous() for x in (tokens, scored, engine))
    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    own = list(range(len(tokens)))[rank * len(tokens) // ranks : (rank + 1) * len(tokens) // ranks]
    positions = torch.arange(tokens.shape[1]).unsqueeze(0)
    differ, results = torch.zeros((), dtype=torch.int64), {"norms": [], "gradients": []}

    def forward_step(iterator: Any, chunk: Any) -> Any:
        row = next(iterator)
        labels = tokens[row : row + 1].roll(-1, 1)
        loss = chunk(tokens[row : row + 1], positions, None, labels=labels)
        counts = scored[row].roll(-1)  # the tokens that the engine sampled

        def reduce(loss: torch.Tensor) -> Any:
            differ.add_((-loss[0, counts].detach() != engine[row].roll(-1)[counts]).sum())
            return (loss[0] * counts).sum(), counts.sum().int(), {}

        return loss, reduce

    num_microbatches_calculator.init_num_microbatches_calculator(0, None, len(tokens), 1, ranks)
    for step in range(job.get("steps", 2)):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        ddp.train()
        get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iter(own), model=[ddp], num_microbatches=len(own),
            seq_length=tokens.shape[1], micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        if step == 0:
            dist.all_reduce(differ)
            results["differ"] = int(differ)
        results["gradients"].append(gradients(ddp, distributed))
        good, norm, _ = optimizer.step()
        results["norms"].append(norm)
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    if overlap and distributed:
        ddp.disable_forward_pre_hook()
    return {**results, "weights": digest(weights.hf_tensors(model))}


def gradients(ddp: Any, sharded: bool) -> dict[str, str]:
    """Hashes of the whole gradient; copies, so that the optimizer meets its own."""
    saved = []
    for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers) if sharded else ():
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            saved.append((bucket.grad_data, bucket.grad_data.clone()))
            shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)
    found = digest(weights.hf_tensors(ddp.module, lambda parameter: getattr(parameter, "main_grad", None)))
    for data, before in saved:
        data.copy_(before)
    return found


class Head(MegatronModule):
    """A user's own module: a value head on this rank's part of the sequence, and parameters of other kinds."""

    def __init__(self, settings: TransformerConfig) -> None:
        super().__init__(settings)
        self.value, self.averaged, self.q_layernorm, self.plain = (
            torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)) for _ in range(4)
        )
        self.value.sequence_parallel = True  # type: ignore[attr-defined]
        self.averaged.average_gradients_across_tp_domain = True  # type: ignore[attr-defined]


def head(job: dict[str, Any]) -> dict[str, Any]:
    """Gradients 1, 2, … of the ranks of a user's module, after finalize_model_grads."""
    groups(job["layout"])
    settings = config(job)
    module = Head(settings)
    ddp = DistributedDataParallel(settings, DistributedDataParallelConfig(grad_reduce_in_fp32=True), module)
    ddp.zero_grad_buffer()
    for parameter in module.parameters():
        parameter.main_grad.fill_(parallel_state.get_tensor_model_parallel_rank() + 1)  # type: ignore[attr-defined]
    module.share_embeddings_and_output_weights = module.pre_process = False  # type: ignore[assignment]
    finalize_model_grads([ddp])
    return {name: parameter.main_grad.item() for name, parameter in module.named_parameters()}  # type: ignore[attr-defined]


def main() -> None:
    dist.init_process_group("gloo")
    results = {}
    for job in json.loads(Path(sys.argv[1]).read_text()):
        try:
            results[job["name"]] = head(job) if job.get("head") else train(job)
        except Exception:
            results[job["name"]] = {"error": traceback.format_exc()}
        dist.barrier()
    if dist.get_rank() == 0:
        torch.save(results, sys.argv[2])


if __name__ == "__main__":
    main()
