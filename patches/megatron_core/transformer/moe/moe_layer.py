"""Mixture of experts on the contract's operators (contract section 5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi import envs, ops
from mindspeed_tpi.errors import LayoutError, ParityError
from mindspeed_tpi.ops import gradient_groups
from mindspeed_tpi.parallel import moe, tree, zigzag
from mindspeed_tpi.parallel.linear import replicated_linear
from mindspeed_tpi.patches.megatron_core.extensions.transformer_engine import GroupedLinear
from mindspeed_tpi.patches.megatron_core.support import (
    UNTIL,
    VERSIONS,
    by_version,
    context_parallel_group,
    expert_tensor_parallel_group,
    gradient_row_group,
    outside,
    served,
)
from mindspeed_tpi.patching import Patch

EPS = 1e-20  # moe_utils.topk_routing_with_score_function, sigmoid


def routing(config: Any) -> dict[str, Any]:
    """Arguments of `ops.moe_route` from a TransformerConfig.

    `moe_router_pre_softmax` takes the softmax over all experts and keeps it; otherwise the chosen weights sum to 1.
    """
    sigmoid = config.moe_router_score_function == "sigmoid"
    return {
        "topk": config.moe_router_topk,
        "score": config.moe_router_score_function,
        "renormalize": config.moe_router_topk > 1 if sigmoid else not config.moe_router_pre_softmax,
        "groups": config.moe_router_num_groups or 1,
        "topk_groups": config.moe_router_group_topk or 1,
        "scaling": config.moe_router_topk_scaling_factor or 1.0,
        "eps": EPS if sigmoid else 0.0,
    }


def forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """`MoELayer.forward`: router, experts and shared expert; hidden [s, b, h] → ([s, b, h], None)."""

    def moe_forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        if not served(self.config):
            return original(self, hidden_states, *args, **kwargs)  # type: ignore[no-any-return]
        parameters = _parameters(self.experts)
        if parameters is None:
            outside(
                f"experts of class {type(self.experts).__qualname__}; build the layers from get_gpt_layer_local_spec, whose "
                "SequentialMLP and GroupedMLP are served"
            )
            return original(self, hidden_states, *args, **kwargs)  # type: ignore[no-any-return]
        if any(value is not None for value in (*args, *kwargs.values())):
            raise ParityError(
                "outside the numerics contract: MoELayer with intermediate_tensors (CUDA graphs) or a padding_mask; pass neither"
            )
        if self.training and tree.size(self.attn_tp_group) > 1 and not self.config.sequence_parallel:
            raise ParityError(
                f"training experts with tensor_model_parallel_size={tree.size(self.attn_tp_group)} needs sequence_parallel=True: "
                "without it every rank computes every token"
            )
        if self.moe_layer_recompute and self.training:
            from megatron.core import tensor_parallel

            return tensor_parallel.checkpoint(lambda x: _layer(self, x, parameters), False, hidden_states), None
        return _layer(self, hidden_states, parameters), None

    return moe_forward


def _layer(self: Any, hidden: Tensor, parameters: tuple[list[Tensor], list[Tensor], bool]) -> Tensor:
    config, router, etp_group = self.config, self.router, expert_tensor_parallel_group()
    length, batch, width = hidden.shape
    to_experts, to_router, to_shared, to_gate = moe.fork(hidden, 4)
    logits = replicated_linear(
        to_router,
        router.weight,
        group=self.attn_tp_group,
        sequence_parallel=config.sequence_parallel,
        out_dtype=torch.float32,
        batch=batch,
        row_group=gradient_row_group(),
    ).flatten(0, 1)
    bias = router.expert_bias
    if bias is not None:
        bias.data = bias.data.float()  # as upstream's own forward pass keeps it after the model was cast
    weights, ids = ops.moe_route(logits, expert_bias=bias, **routing(config))
    _count(router, ids)
    _check_replay(router, ids)
    keys, rows = _keys(self, length, batch, hidden.device)
    dispatch = moe.Dispatch(
        ids,
        keys,
        config.num_moe_experts,
        self.ep_group,
        etp_group,
        "allgather" if config.moe_token_dispatcher_type == "allgather" else "alltoall",
        rows=rows,
    )
    fc1, fc2, grouped = parameters
    out = moe.experts(
        to_experts.flatten(0, 1),
        weights,
        dispatch,
        fc1,
        fc2,
        etp_group=etp_group,
        rows=rows,
        grouped=grouped,
    ).view(length, batch, width)
    if not self.use_shared_expert:
        return out
    return ops.residual_add(out, _shared_expert(self.shared_experts, to_shared, to_gate))


def _parameters(experts: Any) -> tuple[list[Tensor], list[Tensor], bool] | None:
    """(fc1, fc2, grouped) of `moe.experts`; None for experts of another storage."""
    if hasattr(experts, "local_experts"):
        local = experts.local_experts
        return [e.linear_fc1.weight for e in local], [e.linear_fc2.weight for e in local], False
    if isinstance(getattr(experts, "linear_fc1", None), GroupedLinear):
        return experts.linear_fc1.weights(), experts.linear_fc2.weights(), False
    if hasattr(experts, "weight1"):
        return [experts.weight1], [experts.weight2], True
    return None


def _shared_expert(shared: Any, hidden: Tensor, to_gate: Tensor) -> Tensor:
    from megatron.core.transformer.mlp import MLP

    y: Tensor = MLP.forward(shared, hidden)[0]
    if not shared.use_shared_expert_gate:
        return y
    logits = replicated_linear(
        to_gate,
        shared.gate_weight,
        group=shared.tp_group,
        sequence_parallel=shared.config.sequence_parallel,
        out_dtype=torch.float32,
        batch=hidden.shape[1],
        row_group=gradient_row_group(),
    )
    return ops.sigmoid_gate(y.flatten(0, 1), logits.flatten(0, 1)).view(y.shape)


def _keys(self: Any, length: int, batch: int, device: torch.device) -> tuple[Tensor, moe.Rows]:
    """int64 key of each token of [s, b], and how keys number rows: rows of the whole expert-parallel group by batch column,
    then by rank, so that the micro-batch size does not decide the order; tokens of a row by position."""
    from megatron.core import parallel_state

    parts = tree.size(self.attn_tp_group) if self.config.sequence_parallel else 1
    first = length * tree.rank(self.attn_tp_group) if parts > 1 else 0
    row_group = gradient_row_group()
    grouped = gradient_groups.count() > 0
    peers = _peers(self) if grouped else parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    peer = parallel_state.get_data_parallel_rank(with_context_parallel=not grouped) % peers
    row_length = length * parts * tree.size(row_group)
    row = torch.arange(batch) * peers + peer
    position = zigzag.positions(length * parts, row_group)[first : first + length]
    keys = (row * row_length + position.unsqueeze(1)).flatten()
    return keys.to(device), moe.Rows(row_length, batch, batch * peers, peers if grouped else 1)


def _peers(self: Any) -> int:
    """Data-parallel ranks whose tokens meet in this rank's experts, all of whose tokens must.

    Raises:
        LayoutError: gradient groups, and a row that is spread over copies of an expert.
    """
    tp, cp = tree.size(self.attn_tp_group), tree.size(context_parallel_group())
    ep, etp = tree.size(self.ep_group), tree.size(expert_tensor_parallel_group())
    if ep * etp % (tp * cp):
        raise LayoutError(
            f"{envs.GRADIENT_GROUPS.name} with tp={tp}, cp={cp}, ep={ep}, etp={etp}: a row would be spread over copies of an "
            f"expert; make ep * etp a multiple of {tp * cp}"
        )
    return ep * etp // (tp * cp)


def _count(router: Any, ids: Tensor) -> None:
    """Tokens per expert, from which Megatron-core updates the expert bias; exact integers."""
    if router.enable_expert_bias and torch.is_grad_enabled():
        with torch.no_grad():
            router.local_tokens_per_expert += torch.bincount(ids.flatten().long(), minlength=router.num_experts)


def _check_replay(router: Any, ids: Tensor) -> None:
    """Router replay is not needed where routing has equal bits; where it is on, it must agree."""
    replay = getattr(router, "router_replay", None)  # from 0.16 on
    if replay is None or replay.router_replay_action is None:
        return
    action = replay.router_replay_action.value
    if action == "record":
        replay.record_indices(ids.long())
        return
    target = replay.replay_backward_list.pop(0) if action == "replay_backward" else replay.target_topk_idx
    wanted = target.to(ids.dtype).sort(dim=1).values
    differing = (wanted != ids).any(dim=1).nonzero().flatten()
    if differing.numel():
        token = int(differing[0])
        raise ParityError(
            f"router replay of layer {router.layer_number} differs at {differing.numel()} of {ids.shape[0]} tokens (token {token}: "
            f"replayed {wanted[token].tolist()}, computed {ids[token].tolist()}): the rollout ran other weights or another "
            "contract; turn replay off and compare with `mindspeed-tpi parity`"
        )


def shared_forward(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`SharedExpertMLP.forward`: output rounded, times the sigmoid of an f32 logit, rounded."""

    def shared_expert_forward(self: Any, hidden_states: Tensor) -> Tensor:
        if not served(self.config):
            return original(self, hidden_states)
        to_mlp, to_gate = moe.fork(hidden_states, 2)
        return _shared_expert(self, to_mlp, to_gate)

    return shared_expert_forward


PATCHES: tuple[Patch, ...] = (
    Patch(
        target="megatron.core.transformer.moe.moe_layer:MoELayer.forward",
        factory=forward,
        reason="stock routing, expert products and the weighted sum of their outputs follow rank, dispatcher and library order",
        versions=VERSIONS,
        parameters=by_version(
            ("0.16", ("self", "hidden_states", "intermediate_tensors", "padding_mask")),
            ("0.13", ("self", "hidden_states")),
        ),
        until=UNTIL,
    ),
    Patch(
        target="megatron.core.transformer.moe.shared_experts:SharedExpertMLP.forward",
        factory=shared_forward,
        reason="stock gates with a bf16 logit and sums its product in library order",
        versions=VERSIONS,
        parameters=("self", "hidden_states"),
        until=UNTIL,
    ),
)
