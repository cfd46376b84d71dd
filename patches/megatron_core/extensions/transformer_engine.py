"""TransformerEngine's classes in layer specs: the local modules, under TransformerEngine's parameter names.

`get_gpt_layer_with_transformer_engine_spec` and specs of a user's own get these whether TransformerEngine is installed, stood in for by a
vendor, or absent. State dicts and sharded state dicts have the names that upstream's classes give them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi.errors import ParityError
from mindspeed_tpi.parallel import tree
from mindspeed_tpi.patches.megatron_core.support import UNTIL, VERSIONS, outside, served
from mindspeed_tpi.patches.megatron_core.transformer.torch_norm import RMSNorm, normed
from mindspeed_tpi.patching import Patch

_MODULE = "megatron.core.extensions.transformer_engine"


def _class(name: str, build: Callable[..., Any]) -> Callable[[Any], Any]:
    """The factory of a class that builds `build`'s module for a served configuration, and upstream's for another."""

    def factory(original: Any) -> Any:
        def new(cls: type, *args: Any, **kwargs: Any) -> Any:
            config = kwargs["config"] if "config" in kwargs else args[0]
            if served(config):
                return build(*args, **kwargs)
            if not isinstance(original, type):
                raise ParityError(
                    f"{name} of a model that is outside the numerics contract (an earlier message says why) needs TransformerEngine, "
                    "which is not installed: install it, or build the model from get_gpt_layer_local_spec"
                )
            return original(*args, **kwargs)

        return type(name, (), {"__new__": new, "__module__": _MODULE, "__doc__": build.__doc__})

    return factory


def norm(config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> RMSNorm:
    """The contract's RMSNorm, `weight`."""
    return RMSNorm(config, hidden_size, eps)


def column_parallel_linear(input_size: int, output_size: int, *, config: Any, **options: Any) -> Any:
    """Megatron-core's ColumnParallelLinear: `weight`, `bias`."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    return ColumnParallelLinear(input_size, output_size, config=config, **options)


def row_parallel_linear(input_size: int, output_size: int, *, config: Any, **options: Any) -> Any:
    """Megatron-core's RowParallelLinear, whose input is its rank's: `weight`, `bias`."""
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    return RowParallelLinear(input_size, output_size, config=config, **{"input_is_parallel": True, **options})


def layer_norm_column_parallel_linear(input_size: int, output_size: int, *, config: Any, **options: Any) -> Any:
    """RMSNorm, then ColumnParallelLinear: `layer_norm_weight`, `weight`, `bias`."""
    return _layer_norm_linear()(input_size, output_size, config=config, **options)


@cache
def _layer_norm_linear() -> type[Any]:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    class LayerNormColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
        def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
            super().__init__(input_size, output_size, config=config, **options)
            self.layer_norm_weight = norm(config, input_size).weight

        forward = layer_norm_linear_forward

    return LayerNormColumnParallelLinear


def layer_norm_linear_forward(self: Any, input_: Tensor) -> Any:
    """`LayerNormColumnParallelLinear.forward`."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    x = normed(input_, self.layer_norm_weight, self.config.layernorm_epsilon, self.config.sequence_parallel)
    return ColumnParallelLinear.forward(self, x)


def attention(
    config: Any,
    layer_number: int,
    attn_mask_type: Any,
    attention_type: str,
    attention_dropout: float | None = None,
    softmax_scale: float | None = None,
    k_channels: int | None = None,
    v_channels: int | None = None,
    num_splits: int | None = None,
    **groups: Any,
) -> Any:
    """Megatron-core's DotProductAttention; no parameters."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    for name, value in (("k_channels", k_channels), ("v_channels", v_channels)):
        if value not in (None, config.kv_channels):
            outside(
                f"TEDotProductAttention with {name}={value} (served: the configuration's kv_channels={config.kv_channels})"
            )
    return DotProductAttention(
        config, layer_number, attn_mask_type, attention_type, attention_dropout, softmax_scale, **groups
    )


class GroupedLinear(torch.nn.Module):
    """The weights of this rank's experts, `weight0`, `weight1`, …, each [N, K] as in one expert's linear layer."""

    def __init__(self, experts: list[Any], dim: int, groups: Any) -> None:
        super().__init__()
        self.num_gemms, self._dim, self._groups = len(experts), dim, groups
        for number, expert in enumerate(experts):
            self.register_parameter(f"weight{number}", expert.weight)

    def weights(self) -> list[Tensor]:
        return [getattr(self, f"weight{number}") for number in range(self.num_gemms)]

    def forward(self, x: Tensor, m_splits: list[int]) -> Any:
        raise ParityError("a grouped linear layer runs inside MoELayer.forward only; put TEGroupedMLP into a MoELayer")

    def get_extra_state(self) -> None:
        """Checkpoints of TransformerEngine and of Megatron-core's linear layers have an empty one for every expert."""

    def set_extra_state(self, state: Any) -> None:
        """Nothing is kept."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for number in range(1, self.num_gemms):
            state_dict.pop(f"{prefix}_extra_state{number}", None)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Keys of all experts' weights as one tensor with an axis of experts, as of SequentialMLP (or one key an expert, with
        `singleton_local_shards`)."""
        from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
        from megatron.core.transformer.utils import (
            ensure_metadata_has_dp_cp_group,
            make_sharded_tensors_for_checkpoint,
        )

        metadata = ensure_metadata_has_dp_cp_group(metadata)
        separate = metadata.get("singleton_local_shards", False)
        ep, first = self._groups.ep, tree.rank(self._groups.ep) * self.num_gemms
        found = {}
        for number, weight in enumerate(self.weights()):
            of_expert = (len(sharded_offsets), first + number, tree.size(ep) * self.num_gemms)
            sharded = make_sharded_tensors_for_checkpoint(
                {"weight": weight, "_extra_state": None},
                "",
                {"weight": self._dim},
                sharded_offsets if separate else (*sharded_offsets, of_expert),
                tp_group=self._groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(sharded, "", f"{first + number}.{prefix}" if separate else prefix)
            for part in sharded.values():
                whole = not getattr(part, "is_data_parallel_fully_shard", False)
                part.replica_id = (*part.replica_id[:2], tree.rank(self._groups.expt_dp) if whole else 0)
            found[f"{prefix}weight{number}"] = sharded["weight"]
            found[f"{prefix}_extra_state{number or ''}"] = sharded["_extra_state"]
        return found


def _grouped(linear: Callable[..., Any], dim: int) -> Callable[..., Any]:
    def build(
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        pg_collection: Any = None,
        **_: Any,
    ) -> GroupedLinear:
        """The weights of a rank's experts, one parameter each: `weight0`, `weight1`, …"""
        from megatron.core.process_groups_config import ProcessGroupCollection

        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        options = {"config": config, "init_method": init_method, "bias": False, "skip_bias_add": False}
        options |= {"is_expert": True, "tp_group": groups.expt_tp}
        return GroupedLinear([linear(input_size, output_size, **options) for _ in range(num_gemms)], dim, groups)

    return build


def provided_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """`TESpecProvider.layer_norm` where no version of TransformerEngine can be asked for."""

    def layer_norm(self: Any, rms_norm: bool = False, for_qk: bool = False) -> Any:
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm

    return layer_norm


def provided_experts(original: Callable[..., Any]) -> Callable[..., Any]:
    """`TESpecProvider.grouped_mlp_modules` where no version of TransformerEngine can be asked for."""

    def grouped_mlp_modules(self: Any, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool) -> Any:
        from megatron.core.extensions import transformer_engine
        from megatron.core.transformer.mlp import MLPSubmodules
        from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP, TEGroupedMLP

        if not moe_use_grouped_gemm:
            return SequentialMLP, MLPSubmodules(
                linear_fc1=transformer_engine.TEColumnParallelLinear, linear_fc2=transformer_engine.TERowParallelLinear
            )
        if moe_use_legacy_grouped_gemm:
            return GroupedMLP, None
        return TEGroupedMLP, MLPSubmodules(
            linear_fc1=transformer_engine.TEColumnParallelGroupedLinear,
            linear_fc2=transformer_engine.TERowParallelGroupedLinear,
        )

    return grouped_mlp_modules


def installed() -> str | None:
    """Why upstream's own code finds TransformerEngine; None: it does not."""
    from megatron.core.utils import get_te_version

    version = get_te_version()
    return version and f"TransformerEngine {version} is installed"


def _replaced(name: str, build: Callable[..., Any]) -> Patch:
    return Patch(
        target=f"{_MODULE}:{name}",
        factory=_class(name, build),
        reason="TransformerEngine's and vendors' modules sum in orders of their own",
        versions=VERSIONS,
        parameters=None,  # a class
        until=UNTIL,
    )


def _provided(name: str, factory: Callable[..., Any], parameters: tuple[str, ...]) -> Patch:
    return Patch(
        target=f"{_MODULE}_spec_provider:TESpecProvider.{name}",
        factory=factory,
        reason="no bits: specs ask for TransformerEngine's version, and fail where it is not installed",
        versions=VERSIONS,
        parameters=parameters,
        until="Megatron-core's specs do without TransformerEngine",
        applies=installed,
    )


PATCHES: tuple[Patch, ...] = (
    _replaced("TENorm", norm),
    _replaced("TEColumnParallelLinear", column_parallel_linear),
    _replaced("TERowParallelLinear", row_parallel_linear),
    _replaced("TELayerNormColumnParallelLinear", layer_norm_column_parallel_linear),
    _replaced("TEDotProductAttention", attention),
    _replaced("TEColumnParallelGroupedLinear", _grouped(column_parallel_linear, 0)),
    _replaced("TERowParallelGroupedLinear", _grouped(row_parallel_linear, 1)),
    _provided("layer_norm", provided_norm, ("self", "rms_norm", "for_qk")),
    _provided("grouped_mlp_modules", provided_experts, ("self", "moe_use_grouped_gemm", "moe_use_legacy_grouped_gemm")),
)
