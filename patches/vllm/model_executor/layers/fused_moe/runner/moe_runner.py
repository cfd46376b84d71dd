"""A whole layer of experts: routing, expert products, combination and shared expert (contract section 5)."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mindspeed_tpi import ops
from mindspeed_tpi.errors import ParityError
from mindspeed_tpi.parallel import moe, tree
from mindspeed_tpi.patches.vllm._parallel import dp_group, ep_group
from mindspeed_tpi.patches.vllm._versions import UNTIL, VERSIONS
from mindspeed_tpi.patching import Patch
from mindspeed_tpi.profiles import Profile


def _init(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from vllm.config import get_current_vllm_config

        original(self, *args, **kwargs)
        profile = Profile.from_hf(get_current_vllm_config().model_config.hf_text_config.to_dict())
        _check(self, profile)
        moe = profile.moe
        assert moe is not None
        self.tpi_route = {
            "topk": moe.topk,
            "score": moe.score,
            "renormalize": moe.renormalize,
            "groups": moe.groups,
            "topk_groups": moe.topk_groups,
            "scaling": moe.scaling,
            "eps": moe.eps,
        }

    return __init__


def _check(runner: Any, profile: Profile) -> None:
    """Refuse a layer whose settings are not those the model's configuration promises.

    Raises:
        ParityError: names every setting that differs, and both values.
    """
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    moe = profile.moe
    if moe is None:
        raise ParityError(
            f"{runner.layer_name}: experts in a {profile.family}, which the numerics contract knows as dense"
        )
    router, experts, config = runner.router, runner.routed_experts, runner.moe_config
    if type(router) is not CPURouter:
        raise ParityError(f"{runner.layer_name}: router {type(router).__name__} is outside the numerics contract")
    grouped = router.use_grouped_topk
    found_and_covered = {
        "experts": (config.num_experts, moe.experts),
        "local expert width × tensor-parallel size": (experts.w2_weight.shape[2] * config.tp_size, moe.ffn),
        "hidden size": (experts.w2_weight.shape[1], profile.hidden),
        "topk": (router.top_k, moe.topk),
        "score function": (router.scoring_func, moe.score),
        "renormalize": (bool(router.renormalize), moe.renormalize),
        "expert groups": (router.num_expert_group if grouped else 1, moe.groups),
        "groups per token": (router.topk_group if grouped else 1, moe.topk_groups),
        "correction bias": (router.e_score_correction_bias is not None, moe.bias),
        "routed scaling factor": (router.routed_scaling_factor * runner.routed_scaling_factor, moe.scaling),
        "shared experts": (runner.shared_experts is not None, bool(moe.shared_ffn)),
        "fused shared-expert gate": (runner.shared_expert_gate is not None, False),
        "custom routing function": (router.custom_routing_function, None),
        "hash routing": (router._hash_indices_table is not None, False),
        "expert load balancing": (router.eplb_state, None),
        "transform around the experts": (runner.routed_input_transform or runner.routed_output_transform, None),
        "sequence-parallel experts": (config.is_sequence_parallel, False),
        "expert biases": (config.has_bias, False),
        "activation": (experts.activation, MoEActivation.SILU),
        "SwiGLU limit, alpha or beta": (
            (experts.swiglu_limit, experts.swiglu_alpha, experts.swiglu_beta),
            (None, None, None),
        ),
        "router weight on input": (experts.apply_router_weight_on_input, False),
        "quantisation method": (type(experts.quant_method), UnquantizedFusedMoEMethod),
    }
    differing = [
        f"{name} is {found!r}, the contract serves {covered!r}"
        for name, (found, covered) in found_and_covered.items()
        if found != covered
    ]
    if differing:
        raise ParityError(f"{runner.layer_name}: {'; '.join(differing)}. (MINDSPEED_TPI=0 runs vLLM's own numerics.)")


def _forward(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(
        self: Any,
        hidden_states: Tensor,
        router_logits: Tensor,
        input_ids: Tensor | None = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        if self.gate is not None:  # otherwise the model has applied it
            router_logits, _ = self.gate(hidden_states)
        weights, ids = ops.moe_route(router_logits, expert_bias=self.router.e_score_correction_bias, **self.tpi_route)
        tokens, chosen, own = _all_tokens(hidden_states, ids)
        layer, group = self.routed_experts, ep_group()
        split = self.moe_config.tp_size > 1  # every rank holds a shard of every expert
        by_expert, by_column = (None, group) if split else (group, None)
        experts, local = self.moe_config.num_experts, layer.w13_weight.shape[0]
        dispatch = moe.Dispatch(
            chosen, None, experts, by_expert, by_column, "replicated", expert_map=layer.expert_map, local_experts=local
        )
        y, *_ = moe.outputs(tokens, dispatch, layer.w13_weight, layer.w2_weight, by_column)
        routed = ops.moe_combine(y, dispatch.slots[own], weights)
        shared = self.shared_experts
        return routed if shared is None else ops.residual_add(routed, shared._layer(hidden_states))

    return forward


def _all_tokens(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, slice]:
    """Tokens and choices of all data-parallel ranks in rank order, and which of them are this rank's."""
    from vllm.forward_context import get_forward_context

    group = dp_group()
    if group is None:
        return x, ids, slice(None)
    counts = get_forward_context().dp_metadata.num_tokens_across_dp_cpu.tolist()
    padding = max(counts) - x.shape[0]
    everybodys = [
        torch.cat([rows[:n] for rows, n in zip(tree.gather(pad(t, (0, 0, 0, padding)), group), counts, strict=True)])
        for t in (x, ids)
    ]
    start = sum(counts[: tree.rank(group)])
    return everybodys[0], everybodys[1], slice(start, start + x.shape[0])


_RUNNER = "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner"
PATCHES = (
    Patch(
        target=f"{_RUNNER}.__init__",
        factory=_init,
        reason="a layer with routing the contract does not serve must be named before the model runs",
        versions=VERSIONS,
        parameters=(
            "self",
            "layer_name",
            "moe_config",
            "router",
            "routed_experts",
            "enable_dbo",
            "gate",
            "shared_experts",
            "shared_expert_gate",
            "routed_input_transform",
            "routed_output_transform",
            "routed_scaling_factor",
        ),
        until=UNTIL,
        kind="wrap",
        anytime=True,
    ),
    Patch(
        target=f"{_RUNNER}.forward",
        factory=_forward,
        reason="upstream's routing uses the library's softmax and top-k, weights are summed in another order, the scaling "
        "multiplies a rounded output, and partial sums are reduced after rounding",
        versions=VERSIONS,
        parameters=("self", "hidden_states", "router_logits", "input_ids", "shared_experts_input"),
        until=UNTIL,
        anytime=True,
    ),
)
