"""Gradient norm over optimizers that are stepped together (contract section 9)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from torch import Tensor

from mindspeed_tpi.errors import ParityError
from mindspeed_tpi.parallel import norm_bins
from mindspeed_tpi.patches.megatron_core.support import UNTIL, VERSIONS
from mindspeed_tpi.patches.megatron_core.tensor_parallel.layers import head_gradient
from mindspeed_tpi.patching import Patch


def get_grad_norm(original: Callable[..., float]) -> Callable[..., float]:
    """`ChainedOptimizer.get_grad_norm`: one root over all chained optimizers, whose gradients are spread over groups of their
    own (dense layers and experts).

    Raises:
        ParityError: a tied output projection's gradient that no gradient reduction has taken.
    """

    def grad_norm(self: Any) -> float:
        grads: dict[Any, list[Tensor]] = {}
        for optimizer in self.chained_optimizers:
            if any(head_gradient(parameter) is not None for parameter in _model_parameters(optimizer)):
                raise ParityError(
                    "the optimizer steps without the gradient of a tied output projection: call finish_grad_sync() of every "
                    "DistributedDataParallel, or finalize_model_grads(model), after the last backward pass of a step"
                )
            group = optimizer.get_grad_stats_parallel_group()
            grads.setdefault(group, []).extend(optimizer.get_main_grads_for_grad_norm())
        return norm_bins.root(*(norm_bins.squares(part, group) for group, part in grads.items()))

    return grad_norm


def _model_parameters(optimizer: Any) -> Iterator[Tensor]:
    """The model's own parameters behind an optimizer's masters."""
    for model in getattr(optimizer, "model_chunks", ()):
        yield from model.parameters()
    yield from chain.from_iterable(getattr(optimizer, "float16_groups", ()))
    yield from optimizer.get_parameters()


PATCHES: tuple[Patch, ...] = (
    Patch(
        target="megatron.core.optimizer.optimizer:ChainedOptimizer.get_grad_norm",
        factory=get_grad_norm,
        reason="the root of a sum of squared roots is not the root of the sum",
        versions=VERSIONS,
        parameters=("self",),
        until=UNTIL,
    ),
)
