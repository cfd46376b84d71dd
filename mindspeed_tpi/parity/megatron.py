"""The real Megatron-core in this process: its process groups for a layout, and a request's GPTModel."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_tpi import contract, ops
from mindspeed_tpi.contract import Role
from mindspeed_tpi.errors import InputError, LayoutError, ParityError
from mindspeed_tpi.parallel.layout import Layout
from mindspeed_tpi.platform import cpu
from mindspeed_tpi.profiles import Moe, Profile
from mindspeed_tpi.versions import installed, mismatch

TIMEOUT = timedelta(seconds=120)  # of every collective: a rank that has gone ends the others this late at the latest


def import_megatron() -> None:
    """CPU shim and Megatron-core's modules, so that a process that waits for its turn has them already."""
    cpu.enable()
    import megatron.core.models.gpt.gpt_model  # noqa: F401


def world_size() -> int:
    """Ranks of this process's job, as torchrun sets it; 1 when started without."""
    return int(os.environ.get("WORLD_SIZE", "1"))


_attempts = itertools.count()
_layout: Layout | None = None
_world: Any = (
    None  # the default process group the layout's groups were made in; an engine that ends in this process destroys it
)


def start_megatron(layout: Layout | None = None, identity: Mapping[str, str] | None = None) -> None:
    """This process's rank of a layout: CPU shim, gloo, Megatron-core's process groups. Starting the same again is a no-op.

    Args:
        layout: default one rank. Another one of as many ranks replaces the process groups of the last.
        identity: what all ranks must agree on, by name; compared with rank 0's before anything else is exchanged.

    Raises:
        LayoutError: the job has another number of ranks.
        ParityError: a rank differs; names the rank and the field.
    """
    global _layout, _world
    layout = layout or Layout()
    if layout.ranks != world_size():
        raise LayoutError(
            f"train layout {layout} needs {layout.ranks} ranks, this job has {world_size()}; start it with "
            f"torchrun --nproc-per-node {layout.ranks}, as `mindspeed-tpi parity` does"
        )
    import_megatron()
    from megatron.core import parallel_state

    if not dist.is_initialized():
        _join(layout.ranks)
    if layout.ranks > 1:
        found: list[Any] = [None] * layout.ranks
        dist.all_gather_object(found, {"layout": str(layout), **(identity or {})})
        check_agreement(dict(enumerate(found)))
    if parallel_state.model_parallel_is_initialized():
        if _layout in (None, layout) and _world in (None, dist.group.WORLD):
            return
        _leave_groups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=int(TIMEOUT.total_seconds()) // 60,
    )
    _layout, _world = layout, dist.group.WORLD


def _leave_groups() -> None:
    """End the process groups of the last layout: upstream only forgets them, and each keeps threads and sockets."""
    from megatron.core import parallel_state

    if _world is dist.group.WORLD:  # an engine that destroyed the default group took the others with it
        for group in getattr(parallel_state, "_global_process_group_list", None) or ():  # kept from 0.15 on
            if group is not None:  # the default group
                dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def _join(ranks: int) -> None:
    """The default process group; ranks that were started with different world sizes are refused instead of waiting."""
    if ranks == 1:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=alone, rank=0, world_size=1)
        return
    rank = int(os.environ["RANK"])
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address, port, ranks, rank == 0 and not hosted, TIMEOUT, wait_for_workers=False, multi_tenant=True
    )
    # A job that goes on after a refusal must not read what a slower rank said the time before.
    shared = dist.PrefixStore(f"mindspeed_tpi/{next(_attempts)}/world size", store)  # type: ignore[attr-defined]
    shared.set(str(rank), str(ranks))
    for other in range(ranks):
        check_agreement({rank: {"world size": str(ranks)}, other: {"world size": shared.get(str(other)).decode()}})
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)


def check_agreement(found: Mapping[int, Mapping[str, str]]) -> None:
    """Refuse ranks that differ.

    Args:
        found: rank → fields.

    Raises:
        ParityError: names the first rank that differs from the lowest one, each field and both values.
    """
    first = min(found)
    for rank, fields in sorted(found.items()):
        differing = [name for name in found[first] if fields.get(name) != found[first][name]]
        if differing:
            name = differing[0]
            raise ParityError(
                f"rank {rank} differs from rank {first} in {', '.join(differing)}: {name} is {fields.get(name)!r} there and "
                f"{found[first][name]!r} on rank {first}; start all ranks with the same package, settings and checkpoint"
            )


def check_model(profile: Profile, layout: Layout, *, stock: bool = False) -> None:
    """Refuse a layout that a model cannot be cut into, or not with equal bits.

    Raises:
        LayoutError: names the size and what would work.
    """
    moe = profile.moe
    if moe is None:
        for name in ("ep", "etp", "dispatcher"):
            if getattr(layout, name) != getattr(Layout(), name):
                raise LayoutError(
                    f"train layout {layout}: {profile.family} has no experts; leave {name}={getattr(layout, name)} out"
                )
    elif moe.experts % layout.ep:
        raise _uneven(layout, "ep", f"{moe.experts} experts", moe.experts)
    if profile.heads % layout.tp:
        raise _uneven(layout, "tp", f"{profile.heads} attention heads", profile.heads)
    if profile.kv_heads % layout.tp and layout.tp % profile.kv_heads:
        raise _uneven(layout, "tp", f"{profile.kv_heads} KV heads", profile.kv_heads)
    if profile.layers % (layout.pp * layout.vpp):
        raise _uneven(layout, "pp*vpp", f"{profile.layers} layers", profile.layers)
    if stock:
        if layout.sp or layout.cp > 1:
            raise LayoutError(
                f"train layout {layout}: stock's local layers have no sequence or context parallelism; run without stock"
            )
        if profile.vocab % layout.tp:
            raise _uneven(
                layout, "tp", f"stock's vocabulary of {profile.vocab}, which it pads otherwise,", profile.vocab
            )
        return
    lengths = {"attention output": profile.heads * profile.head_dim, "ffn": profile.ffn}
    if moe is not None and moe.shared_ffn:
        lengths["shared expert's ffn"] = moe.shared_ffn
    sizes: list[tuple[Role, int, str, int]] = [("tensor", layout.tp, name, length) for name, length in lengths.items()]
    if moe is not None:
        sizes.append(("expert", layout.etp, "expert's ffn", moe.ffn))
    for role, ranks, name, length in sizes:
        key = "tp" if role == "tensor" else "etp"
        try:
            contract.current().leaves(length, role).shard(ranks)
        except LayoutError as error:
            raise LayoutError(f"train layout {layout}: {key}={ranks}, {name} of {length}: {error}") from None


def _uneven(layout: Layout, key: str, what: str, count: int) -> LayoutError:
    works = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0 and n <= 64)
    return LayoutError(f"train layout {layout}: {what} cannot be split by {key}; divisors that work: {works}")


def build_model(
    profile: Profile, layout: Layout | None = None, *, stock: bool = False, vp_stage: int | None = None
) -> Any:
    """A GPTModel with the local layer spec for this rank's part of `profile`; weights are left uninitialised.

    Megatron-core must be started for `layout`. `config.unpadded_vocab_size` holds the real vocabulary: over
    tensor-parallel ranks it is padded to whole leaves (contract section 6).

    Args:
        vp_stage: which chunk of a virtual pipeline.

    Raises:
        InputError: stock, and rotary constants that Megatron-core cannot express; or a router it cannot express.
        LayoutError: a model that cannot be cut so.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    layout = layout or Layout()
    check_model(profile, layout, stock=stock)
    config = transformer_config(profile, layout)
    rope = profile.rope
    numbers = dict(rope.parameters)
    if stock:
        _check_stock_rope(rope)
    padded = layout.tp > 1 and not stock
    model = GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage),
        vocab_size=contract.current().padded_vocab(profile.vocab) if padded else profile.vocab,
        max_sequence_length=rope.max_position,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=profile.tied,
        position_embedding_type="yarn" if rope.scaling == "yarn" else "rope",
        rotary_percent=rope.rotary_dim / profile.head_dim,
        rotary_base=rope.theta,
        rope_scaling=rope.scaling == "llama3",
        rope_scaling_factor=numbers.get("factor", 1.0),
        seq_len_interpolation_factor=numbers["factor"] if rope.scaling == "linear" else None,
        vp_stage=vp_stage,
    )
    if not stock:
        # the checkpoint's own constants, also where Megatron-core has no field; and positions for a row's padding
        rows = -(-rope.max_position // layout.row_multiple) * layout.row_multiple
        model.rotary_pos_emb.rope_config = replace(rope, max_position=rows)
    return model.to(profile.torch_dtype)


def transformer_config(profile: Profile, layout: Layout) -> Any:
    """Megatron-core's TransformerConfig of a model in a layout.

    Raises:
        InputError: a router that Megatron-core cannot express.
        ParityError: a setting that the installed version does not have.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = profile.torch_dtype
    fields = dict(
        num_layers=profile.layers,
        hidden_size=profile.hidden,
        num_attention_heads=profile.heads,
        num_query_groups=profile.kv_heads,
        kv_channels=profile.head_dim,
        ffn_hidden_size=profile.ffn,
        layernorm_epsilon=profile.eps,
        normalization="RMSNorm",
        qk_layernorm=profile.qk_norm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=profile.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        window_size=(profile.window - 1, 0) if profile.window else None,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=bool(layout.sp),
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        cp_comm_type={"p2p": "p2p", "allgather": "all_gather", "a2a": "a2a"}[layout.cp_type],
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        moe_token_dispatcher_type=layout.dispatcher,
        overlap_p2p_comm=layout.vpp > 1,  # the batched form mixes up two stages' messages in an interleaved pipeline
        batch_p2p_comm=layout.vpp == 1,
        calculate_per_token_loss=True,  # schedule and data-parallel sum then leave loss and gradients as they are
        **({} if profile.moe is None else _moe_fields(profile, profile.moe)),
    )
    unknown = {name: value for name, value in fields.items() if name not in TransformerConfig.__dataclass_fields__}
    if needed := [f"{name}={value}" for name, value in unknown.items() if value]:
        raise ParityError(
            f"megatron-core {installed('megatron-core')} has no {', '.join(needed)}, which {profile.family} needs; install 0.16"
        )
    config: Any = TransformerConfig(**{name: value for name, value in fields.items() if name not in unknown})
    config.unpadded_vocab_size = profile.vocab
    if profile.rope.scaling == "yarn":
        if found := mismatch("megatron-core>=0.16"):
            raise ParityError(f"yarn rotary scaling {found}: earlier constructors take no mscale of None; install 0.16")
        numbers = dict(profile.rope.parameters)
        config.yarn_rotary_scaling_factor = numbers["factor"]
        config.yarn_original_max_position_embeddings = numbers["original_max_position_embeddings"]
        config.yarn_beta_fast = numbers.get("beta_fast", 32.0)
        config.yarn_beta_slow = numbers.get("beta_slow", 1.0)
        config.yarn_mscale = numbers.get("mscale")
        config.yarn_mscale_all_dim = numbers.get("mscale_all_dim")
        config.yarn_correction_range_round_to_int = bool(numbers.get("truncate", 1.0))
    return config


def _moe_fields(profile: Profile, moe: Moe) -> dict[str, Any]:
    """TransformerConfig fields of the experts."""
    sigmoid = moe.score == "sigmoid"
    if (moe.topk == 1 and moe.renormalize) or (sigmoid and not moe.renormalize):
        raise InputError(
            f"{profile.family} with {moe.topk} experts per token and norm_topk_prob={moe.renormalize} cannot be trained: "
            "Megatron-core renormalises only over more than one expert, and then always with a sigmoid router"
        )
    return {
        "num_moe_experts": moe.experts,
        "moe_router_topk": moe.topk,
        "moe_ffn_hidden_size": moe.ffn,
        "moe_layer_freq": [int(layer not in moe.dense_layers) for layer in range(profile.layers)],
        "moe_router_score_function": moe.score,
        "moe_router_pre_softmax": not sigmoid and not moe.renormalize,
        "moe_router_num_groups": moe.groups if moe.groups > 1 else None,
        "moe_router_group_topk": moe.topk_groups if moe.groups > 1 else None,
        "moe_router_topk_scaling_factor": moe.scaling if moe.scaling != 1 else None,
        "moe_router_enable_expert_bias": moe.bias,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_shared_expert_intermediate_size": moe.shared_ffn or None,
        "moe_shared_expert_gate": moe.shared_gate,
    }


def _check_stock_rope(rope: ops.RopeConfig) -> None:
    """Refuse rotary constants that stock Megatron-core would silently replace by its own."""
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192.0}
    numbers = dict(rope.parameters)
    wrong = [k for k, v in fixed.items() if numbers[k] != v] if rope.scaling == "llama3" else []
    if rope.scaling == "yarn" and "attention_factor" in numbers:
        wrong = ["attention_factor"]
    if wrong:
        raise InputError(
            f"stock Megatron-core cannot express {rope.scaling} rotary scaling with {', '.join(f'{k}={numbers[k]}' for k in wrong)}; "
            "run without stock"
        )
