"""Data-parallel sum of gradients by the tree over ranks (contract section 9)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed_tpi.ops import gradient_groups
from mindspeed_tpi.parallel import tree
from mindspeed_tpi.patches.megatron_core.support import UNTIL, VERSIONS, by_version, outside
from mindspeed_tpi.patches.megatron_core.tensor_parallel.layers import add_head_gradient, head_gradient
from mindspeed_tpi.patching import Patch


class _Done:
    """Handle of a reduction that is complete when it returns."""

    def wait(self) -> None: ...


def start_grad_sync(original: Callable[..., None]) -> Callable[..., None]:
    """`_ParamAndGradBucketGroup.start_grad_sync`: every bucket's f32 sum over the data-parallel ranks, or this rank's shard.

    A tied output projection's gradient, which no bucket holds, is summed likewise and then joins its embedding's: here every
    gradient is complete, and no later call needs to be made for it.
    """

    def start(self: Any, force_all_reduce: bool | None = False) -> None:
        config = self.ddp_config
        instances = getattr(config, "num_distributed_optimizer_instances", 1)
        dtypes = {bucket.grad_data.dtype for bucket in self.buckets}
        parameters = [parameter for bucket in self.buckets for parameter in bucket.params_list]
        if instances > 1 or dtypes != {torch.float32}:
            outside(
                f"gradient reduction with {instances} distributed-optimizer instances of {', '.join(map(str, dtypes))} "
                "(served: 1 instance, grad_reduce_in_fp32=True)"
            )
            for parameter in parameters:
                add_head_gradient(parameter)
            original(self, force_all_reduce)
            return
        if getattr(self, "is_first_batch", False) and self.grad_reduce_handle is not None:
            return
        if config.check_for_nan_in_grad or config.check_for_large_grads:
            self.check_grads(
                check_for_nan_or_inf=config.check_for_nan_in_grad, check_for_large=config.check_for_large_grads
            )
        sharded = config.use_distributed_optimizer and not force_all_reduce
        group = (
            self.intra_distributed_optimizer_instance_group
            if config.use_distributed_optimizer
            else self.data_parallel_group
        )
        for parameter in parameters:
            gradient_groups.check_complete(parameter.main_grad)
        for bucket in self.buckets:
            factor = bucket.gradient_scaling_factor / (tree.size(group) if config.average_in_collective else 1)
            heads = [head for parameter in bucket.params_list if (head := head_gradient(parameter)) is not None]
            for head in heads:
                gradient_groups.check_complete(head)
            for data, scatter in ((bucket.grad_data, sharded), *((head.view(-1), False) for head in heads)):
                if factor != 1.0:
                    data *= factor
                tree.sum_in_place(data, group, scatter=scatter)
        for parameter in parameters:
            add_head_gradient(parameter)
        self.grad_reduce_handle = _Done() if config.overlap_grad_reduce else None

    return start


PATCHES: tuple[Patch, ...] = (
    Patch(
        target="megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_grad_sync",
        factory=start_grad_sync,
        reason="a library's sum over more than two ranks depends on its algorithm; and head and embedding gradients of a tied "
        "weight are added once",
        versions=VERSIONS,
        parameters=by_version(("0.16", ("self", "force_all_reduce")), ("0.13", ("self",))),
        until=UNTIL,
    ),
)
