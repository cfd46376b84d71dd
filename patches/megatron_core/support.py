"""What the patches of Megatron-core serve, decided in one place from the model's configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from mindspeed_tpi import contract
from mindspeed_tpi.errors import LayoutError
from mindspeed_tpi.ops import gradient_groups
from mindspeed_tpi.parallel import tree
from mindspeed_tpi.strict import outside as outside
from mindspeed_tpi.versions import MEGATRON_CORE, mismatch

_Variant = TypeVar("_Variant")

VERSIONS = MEGATRON_CORE
UNTIL = "Megatron-core offers operators with a stated order of summation for this module"


@dataclass(frozen=True)
class _Limit:
    """A setting the patches do not serve: its name, when it is in use, and what works instead."""

    setting: str
    used: Callable[[Any], bool]
    remedy: str


def _off(name: str, remedy: str = "leave it off", neutral: tuple[Any, ...] = (None, False, 0, 0.0)) -> _Limit:
    return _Limit(name, lambda config: getattr(config, name, neutral[0]) not in neutral, remedy)


_LIMITS = (
    _off("moe_shared_expert_overlap"),
    _off("overlap_moe_expert_parallel_comm", "leave it off: its schedule takes MoELayer apart"),
    _Limit("moe_router_load_balancing_type", lambda c: c.moe_router_load_balancing_type == "sinkhorn", "use 'none'"),
    _Limit(
        "moe_aux_loss_coeff",
        lambda c: any(c.moe_aux_loss_coeff if isinstance(c.moe_aux_loss_coeff, list) else [c.moe_aux_loss_coeff]),
        "set it to 0.0: auxiliary losses change gradients outside the contract",
    ),
    _off("moe_z_loss_coeff"),
    _off("moe_input_jitter_eps"),
    _off("moe_expert_capacity_factor", "leave it off: the contract drops no tokens"),
    _off("moe_router_force_load_balancing"),
    _off("moe_router_padding_for_quantization"),
    _off("moe_apply_probs_on_input"),
    _off("moe_latent_size"),
    _Limit(
        "add_bias_linear",
        lambda c: c.add_bias_linear and c.num_moe_experts,
        "set it to False: biases of routers and experts are not served; add_qkv_bias=True keeps the attention's",
    ),
    _off("moe_router_fusion"),
    _off("moe_permute_fusion"),
    _Limit(
        "moe_router_num_groups",
        lambda c: c.moe_router_num_groups and c.moe_router_score_function != "sigmoid",
        "groups are served with moe_router_score_function='sigmoid'",
    ),
    _Limit(
        "moe_router_group_topk",
        lambda c: c.moe_router_num_groups and c.moe_router_topk // (c.moe_router_group_topk or 1) != 2,
        "a group's score is the sum of its two largest: moe_router_topk must be 2 or 3 times it",
    ),
    _off("multi_latent_attention", "only grouped-query attention is served"),
    _off("mtp_num_layers"),
    _off("hidden_dropout", "set it to 0.0 (its default is 0.1)"),
    _off("attention_dropout", "set it to 0.0 (its default is 0.1)"),
    _Limit("normalization", lambda c: c.normalization != "RMSNorm", "set it to 'RMSNorm'"),
    _off("layernorm_zero_centered_gamma"),
    _off("qk_l2_norm"),
    _off("qk_clip"),
    _Limit(
        "activation_func",
        lambda c: not (c.gated_linear_unit and c.activation_func is torch.nn.functional.silu),
        "set it to torch.nn.functional.silu with gated_linear_unit=True",
    ),
    _off("glu_linear_offset"),
    _off("activation_func_clamp_value"),
    _off("use_te_activation_func"),
    _off("softmax_type", "only 'vanilla' is served", ("vanilla",)),
    _off("apply_query_key_layer_scaling"),
    _off("attention_output_gate"),
    _off("rotary_interleaved"),
    _off("apply_rope_fusion"),
    _off("fused_single_qkv_rope"),
    _off("fp32_residual_connection"),
    _off("apply_residual_connection_post_layernorm"),
    _off("cross_entropy_loss_fusion"),
    _off("defer_embedding_wgrad_compute"),
    _off("cpu_offloading"),
    _off("fine_grained_activation_offloading"),
    _off("fp8"),
    _off("fp4"),
    _off("use_kitchen"),
    _off("batch_invariant_mode", "leave it off: the contract's operators are batch-invariant"),
    _off("experimental_attention_variant"),
    _off("linear_attention_freq"),
    _off("inference_fuse_tp_communication"),
    _off("flash_decode"),
    _off("enable_cuda_graph"),
    _off("external_cuda_graph"),
    _off("cuda_graph_impl", neutral=(None, "none")),
    _off("quant_recipe"),
)


def unsupported(config: Any) -> list[str]:
    """One clause per setting of a TransformerConfig that the patches do not serve, with the way out."""
    return [
        f"{limit.setting}={getattr(config, limit.setting)!r} ({limit.remedy})"
        for limit in _LIMITS
        if limit.used(config)
    ]


def served(config: Any) -> bool:
    """Whether a model of this configuration runs on the contract's operators; if not, all of it runs as upstream wrote it.

    Raises:
        ParityError: strict mode, and some setting is not served; the message names each one.
    """
    clauses = unsupported(config)
    if clauses:
        outside(f"a Megatron-core model with {'; '.join(clauses)}")
    return not clauses


def tensor_parallel_group() -> Any:
    """The tensor-parallel process group of this rank."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def expert_tensor_parallel_group() -> Any:
    """The process group that shares each expert of this rank."""
    from megatron.core import parallel_state

    return parallel_state.get_expert_tensor_parallel_group()


def context_parallel_group() -> Any:
    """The context-parallel process group of this rank."""
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group()


def gradient_row_group() -> Any:
    """The ranks whose parts of each row a parameter's gradient gathers: the context-parallel ones, under gradient groups."""
    group = context_parallel_group() if gradient_groups.count() else None
    return group if tree.size(group) > 1 else None


def real_vocab(config: Any, rows: int) -> int:
    """Vocabulary rows that exist; the others are padding and take part in nothing.

    Args:
        config: a TransformerConfig whose attribute `unpadded_vocab_size` says it; without one, all rows exist.
        rows: rows of the whole embedding or output projection.
    """
    return getattr(config, "unpadded_vocab_size", None) or rows


def check_vocab(config: Any, rows: int) -> None:
    """Refuse a padding that does not cut into whole leaves over the tensor-parallel ranks.

    Raises:
        LayoutError: names the rows that work.
    """
    vocab = real_vocab(config, rows)
    padded = contract.current().padded_vocab(vocab)
    if config.tensor_model_parallel_size > 1 and rows != padded:
        raise LayoutError(
            f"{rows} vocabulary rows over {config.tensor_model_parallel_size} tensor-parallel ranks: a vocabulary of {vocab} must "
            f"be padded to {padded} rows, whatever the number of ranks, and config.unpadded_vocab_size be {vocab}"
        )


def by_version(*variants: tuple[str, _Variant]) -> _Variant:
    """What holds for the installed version: parameter names of an upstream callable whose signature grew, or a new name.

    Args:
        variants: (first megatron-core version, value), newest first.
    """
    for version, value in variants[:-1]:
        if mismatch(f"megatron-core>={version}") is None:
            return value
    return variants[-1][1]
