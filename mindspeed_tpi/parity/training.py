"""What trains a model: Megatron-core's DistributedDataParallel and its distributed optimizer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mindspeed_tpi.parallel import tree

CLIP = 1.0  # largest gradient norm, Megatron-core's default


class Training:
    """A model's chunks in DistributedDataParallel with f32 gradients, and, from the first step on, AdamW on f32 masters, of
    which every data-parallel rank holds a shard.

    Args:
        chunks: this rank's GPTModels. Their configuration gets the `finalize_model_grads_func` of the schedules.

    Attributes:
        chunks: the wrapped models.
        grad_norm: the norm of the last step's gradient, before it was clipped to `CLIP`; NaN before the first step.
    """

    def __init__(self, chunks: list[Any]) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )

        options = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False
        )
        self.chunks = [
            DistributedDataParallel(chunk.config, options, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(chunks)
        ]
        for chunk in chunks:
            chunk.config.finalize_model_grads_func = finalize_model_grads
        self.grad_norm = float("nan")
        self._optimizer: Any = None

    @property
    def has_stepped(self) -> bool:
        """Whether the weights are no longer a checkpoint's."""
        return self._optimizer is not None

    def zero_gradients(self) -> None:
        """Forget the last step's gradients."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def step(self, lr: float) -> None:
        """One AdamW step with the gradients that the schedule has left."""
        if self._optimizer is None:
            self._optimizer = self._make_optimizer(lr)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        good, self.grad_norm, _ = self._optimizer.step()
        if not good:
            raise RuntimeError("the gradient is not finite; no step was made")

    def _make_optimizer(self, lr: float) -> Any:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        dtype = self.chunks[0].config.params_dtype
        config = OptimizerConfig(
            optimizer="adam",
            lr=lr,
            weight_decay=0.0,
            clip_grad=CLIP,
            params_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            fp16=dtype is torch.float16,
            loss_scale=1.0 if dtype is torch.float16 else None,
            use_distributed_optimizer=True,
        )
        return get_megatron_optimizer(config, self.chunks)

    def gather_gradients(self) -> None:
        """Put all of the summed gradient into every rank's `main_grad`, of which each has its shard after a backward pass."""
        for chunk in self.chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                group = buffer.data_parallel_group
                if tree.size(group) == 1:
                    continue
                for bucket in buffer.buckets:
                    shard = bucket.grad_data.chunk(tree.size(group))[tree.rank(group)]
                    dist.all_gather_into_tensor(bucket.grad_data, shard.clone(), group=group)
