"""Copies between ranks inside autograd; no number is added (the upstream namesake: megatron.core.tensor_parallel.mappings)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi.parallel import tree


def gather_columns(x: Tensor, group: Any) -> Tensor:
    """[…, columns of every rank] from each rank's columns, which may differ in number; the gradient is this rank's slice."""
    if tree.size(group) == 1:
        return x
    y: Tensor = _GatherColumns.apply(x, group)
    return y


def split_columns(x: Tensor, group: Any) -> Tensor:
    """This rank's equal slice of the last dimension; the gradient gathers all slices."""
    if tree.size(group) == 1:
        return x
    y: Tensor = _SplitColumns.apply(x, group)
    return y


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        widths = tree.gather(torch.tensor([x.shape[-1]], device=x.device), group).flatten().tolist()
        ctx.place = (sum(widths[: tree.rank(group)]), x.shape[-1])
        padded = torch.nn.functional.pad(x, (0, max(widths) - x.shape[-1]))
        parts = tree.gather(padded, group)
        return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        start, width = ctx.place
        return grads[0].narrow(-1, start, width).contiguous(), None


class _SplitColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.chunk(tree.size(group), dim=-1)[tree.rank(group)].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return torch.cat(list(tree.gather(grads[0], ctx.group)), dim=-1), None
