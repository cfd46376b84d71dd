"""Mixture of experts over ranks: tokens travel to the experts' ranks and back, and nothing is summed on the way (contract
sections 5 and 9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_tpi import contract, ops
from mindspeed_tpi.contract import Leaves
from mindspeed_tpi.errors import InputError
from mindspeed_tpi.ops import schemas
from mindspeed_tpi.ops._autograd import needs_grad, parameter_gradient
from mindspeed_tpi.parallel import tree

Dispatcher = Literal["alltoall", "allgather", "replicated"]


@dataclass(frozen=True)
class Rows:
    """The rows (gradient chains) whose tokens meet in an expert in one micro-batch; key // length is a token's row.

    Attributes:
        length: keys per row.
        batch: rows of each data-parallel rank.
        count: rows are numbered 0 … count − 1, on every rank that meets another.
        peers: data-parallel ranks that gradient groups tell apart: row modulo peers.
    """

    length: int
    batch: int
    count: int
    peers: int = 1


class Dispatch:
    """Where every (token, expert) pair of one call is computed; the trainer's and the rollout engine's alike.

    A rank owns the experts of its place in `ep_group` and, of each, the columns of its place in `etp_group`. Here the pairs
    of all ranks that meet in an expert are ordered by expert, then by `keys`, so that neither ranks nor dispatcher decide the
    order in which the expert's weight gradient is summed.

    The host reads numbers once, when pairs travel or some stay away: how many go where, of which rows. Nothing is read back
    otherwise, in the backward pass neither.

    Args:
        ids: int32 [T, k], experts of this rank's tokens, ascending per token.
        keys: int64 [T], a number per token, unique over the group's tokens and ascending in gradient order; None: no gradients.
        experts: number of experts.
        ep_group, etp_group: process groups; None: this process alone.
        rows: how keys number the rows; with keys.
        dispatcher: how tokens travel: each to the ranks that need it; all to all ranks; or not at all, because every rank of
            both groups has the same ones.
        expert_map, local_experts: with `replicated` only: int [experts], the local index of each of this rank's experts and a
            negative number for others'; and how many are this rank's. None: equal contiguous runs in rank order.

    Attributes:
        offsets: int64 [local experts + 1]; the rows of local expert e are offsets[e] … offsets[e + 1].
        slots: int64 [T, k], the row of `send_back`'s result that belongs to each pair.
        chains: of each local expert, the rows that have tokens in it and the edges of their runs (int64, on the host); only where
            keys were given.

    Raises:
        InputError: an expert id outside 0 … experts − 1.
    """

    chains: list[tuple[list[int], Tensor]]

    def __init__(
        self,
        ids: Tensor,
        keys: Tensor | None,
        experts: int,
        ep_group: Any,
        etp_group: Any,
        dispatcher: Dispatcher,
        expert_map: Tensor | None = None,
        local_experts: int | None = None,
        rows: Rows | None = None,
    ) -> None:
        self._ep_group, self._etp_group, self._dispatcher = ep_group, etp_group, dispatcher
        self._tokens, self.topk = ids.shape
        self._ids = ids
        self._experts = experts
        self.local_experts = local_experts or experts // tree.size(ep_group)
        if dispatcher == "replicated":
            self._stay(ids.flatten(), expert_map)
        else:
            self._travel(ids.flatten(), keys, rows)

    def _stay(self, pairs: Tensor, expert_map: Tensor | None) -> None:
        """Rows are the pairs of this rank's experts, by expert, then token."""
        count, away = self.local_experts, tree.size(self._ep_group) > 1
        first = tree.rank(self._ep_group) * count
        local = pairs - first if expert_map is None else expert_map[pairs.long()]
        if away:
            local = torch.where((local < 0) | (local >= count), count, local)
        order = local.argsort(stable=True)
        self.offsets = _edges(local[order], count)
        self._order = order[: int(self.offsets[-1])] if away else order
        every = torch.arange(pairs.numel(), device=pairs.device)
        self.slots = (every if away else torch.empty_like(order).scatter_(0, order, every)).view(-1, self.topk)

    def _travel(self, pairs: Tensor, keys: Tensor | None, rows: Rows | None) -> None:
        """Rows are the pairs of all ranks that meet in this rank's experts."""
        ep, local = tree.size(self._ep_group), self.local_experts
        numbered, bins = 1, pairs
        if keys is not None:
            assert rows is not None
            numbered = rows.count
            bins = pairs * numbered + (keys // rows.length).repeat_interleave(self.topk)
        self._leaving = bins.argsort(stable=True)
        sent = _edges(bins[self._leaving], self._experts * numbered).diff().view(ep, local, numbered)
        received = sent if ep == 1 else tree.all_to_all(sent, self._ep_group)
        everyones = tree.gather(received, self._etp_group)  # [etp, ep, local experts, rows]
        counts = torch.cat((sent.sum((1, 2)), everyones.flatten())).tolist()
        self._sent, arriving = counts[:ep], np.array(counts[ep:], dtype=np.int64).reshape(everyones.shape)
        if sum(self._sent) != pairs.numel():
            raise InputError(f"expert ids {int(pairs.min())} … {int(pairs.max())} of {self._experts} experts")
        self._sources: list[list[int]] = arriving.sum((2, 3)).tolist()
        self._received = self._sources[tree.rank(self._etp_group)]
        self._counts = [sum(part) for part in self._sources]
        of_rows = arriving.sum((0, 1))
        self._host_edges = [0, *of_rows.sum(1).cumsum().tolist()]
        self.offsets = torch.tensor(self._host_edges, device=pairs.device)
        total = self._host_edges[-1]
        expert = torch.arange(local, device=pairs.device).repeat(everyones.shape[0] * ep)
        expert = expert.repeat_interleave(everyones.sum(3).flatten(), output_size=total)
        if keys is None:
            self._order = expert.argsort(stable=True)
        else:
            arrived = self._arrive(keys.repeat_interleave(self.topk))
            by_key = arrived.argsort(stable=True)
            self._order = by_key[expert[by_key].argsort(stable=True)]
            self.chains = [_chains(counts) for counts in of_rows]
        every = torch.arange(pairs.numel(), device=pairs.device)
        self.slots = torch.empty_like(every).scatter_(0, self._leaving, every).view(-1, self.topk)

    @cached_property
    def _inverse(self) -> Tensor:
        return self._order.argsort()

    @cached_property
    def parts(self) -> list[slice]:
        """The rows of each local expert, for products of one expert at a time; read by the host."""
        edges = self._host_edges if hasattr(self, "_host_edges") else self.offsets.tolist()
        return [slice(first, last) for first, last in pairwise(edges)]

    def send_tokens(self, x: Tensor) -> Tensor:
        """Rows of this rank's experts [P, …], in their order, from every rank's tokens x [T, …]."""
        if self._dispatcher == "replicated":
            return x[self._order // self.topk]
        if self._dispatcher == "allgather" and (tree.size(self._ep_group) > 1 or tree.size(self._etp_group) > 1):
            return self._gathered(x)[self._order]
        return self.send_pairs(x.repeat_interleave(self.topk, dim=0))

    def send_pairs(self, x: Tensor) -> Tensor:
        """Like `send_tokens`, from one row per pair, x [T·k, …]."""
        return x[self._order] if self._dispatcher == "replicated" else self._arrive(x)[self._order]

    def send_back(self, y: Tensor) -> Tensor:
        """[T·k, …] at the tokens' home, in the order of `slots`, from the experts' rows y [P, …] (the same on all ranks of
        `etp_group`)."""
        if self._dispatcher == "replicated":
            if tree.size(self._ep_group) == 1:
                return y
            whole = y.new_zeros(self._tokens * self.topk, *y.shape[1:])
            whole[self._order] = y
            return tree.owned_sum(whole, self._ep_group)
        arrived = y[self._inverse]
        start = sum(self._counts[: tree.rank(self._etp_group)])
        mine = arrived[start : start + sum(self._received)]
        return self._all_to_all(mine, self._received, self._sent)

    def _arrive(self, pairs: Tensor) -> Tensor:
        """Rows as they come in: by source rank of `etp_group`, then of `ep_group`, then in the source's order."""
        here = self._all_to_all(pairs[self._leaving], self._sent, self._received)
        if tree.size(self._etp_group) == 1:
            return here
        padded = here.new_zeros(max(self._counts), *here.shape[1:])
        padded[: here.shape[0]] = here
        parts = tree.gather(padded, self._etp_group)
        return torch.cat([part[:count] for part, count in zip(parts, self._counts, strict=True)])

    def _gathered(self, x: Tensor) -> Tensor:
        """The rows of `_arrive` for one row per token, picked from all ranks' tokens."""
        longest, source, token = self._everyones
        padded = x.new_zeros(longest, *x.shape[1:])
        padded[: x.shape[0]] = x
        whole = tree.gather(tree.gather(padded, self._ep_group), self._etp_group)  # [etp, ep, longest, …]
        return whole.flatten(0, 1)[source, token]

    @cached_property
    def _everyones(self) -> tuple[int, Tensor, Tensor]:
        """(most tokens of a rank; source rank and token of each row of `_arrive`)."""
        device = self._ids.device
        tokens = tree.gather(torch.tensor([self._tokens], device=device), self._ep_group).flatten()
        longest = int(tree.gather(tokens.max(), self._etp_group).max())
        per_source = torch.tensor(self._sources, device=device).flatten()
        source = torch.arange(per_source.numel(), device=device)
        token = torch.arange(self._tokens, device=device).repeat_interleave(self.topk)
        return longest, source.repeat_interleave(per_source, output_size=sum(self._counts)), self._arrive(token)

    def _all_to_all(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        if tree.size(self._ep_group) == 1:
            return x
        y = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(y, x.contiguous(), received, sent, group=self._ep_group)
        return y


def _edges(ascending: Tensor, count: int) -> Tensor:
    """int64 [count + 1]: where each of the numbers 0 … count begins in an ascending tensor."""
    return torch.searchsorted(ascending, torch.arange(count + 1, dtype=ascending.dtype, device=ascending.device))


def experts(
    x: Tensor,
    weights: Tensor,
    dispatch: Dispatch,
    fc1: Sequence[Tensor],
    fc2: Sequence[Tensor],
    *,
    etp_group: Any,
    rows: Rows,
    grouped: bool = False,
) -> Tensor:
    """The weighted sum of each token's experts, SwiGLU MLPs whose outputs are rounded, in expert-id order; differentiable.

    Args:
        x: [T, H], this rank's tokens. weights: f32 [T, k], in ascending expert id.
        fc1: per local expert [2F / etp, H] = [gate shard; up shard]. fc2: per local expert [H, F / etp].
        rows: how the keys of `dispatch` number the rows.
        grouped: fc1 and fc2 hold one tensor each, of all local experts (see `grouped_fc1`, `grouped_fc2`).

    Returns:
        [T, H].
    """
    if needs_grad(x, weights, *fc1, *fc2):
        y: Tensor = _Experts.apply(x, weights, dispatch, etp_group, rows, grouped, len(fc1), *fc1, *fc2)
        return y
    matrices = _matrices(fc1, fc2, grouped, dispatch.local_experts, x.shape[1])
    return ops.moe_combine(outputs(x, dispatch, *matrices, etp_group)[0], dispatch.slots, weights)


def grouped_fc1(weight: Tensor, experts: int, hidden: int) -> Tensor:
    """[experts, 2F, H], a view of a tensor that holds [experts, H, 2F] in memory: Megatron-core's GroupedMLP.weight1."""
    return weight.view(experts, hidden, -1).transpose(1, 2)


def grouped_fc2(weight: Tensor, experts: int, hidden: int) -> Tensor:
    """[experts, H, F], a view of a tensor that holds [experts, F, H] in memory: Megatron-core's GroupedMLP.weight2."""
    return weight.view(experts, -1, hidden).transpose(1, 2)


def _matrices(
    fc1: Sequence[Tensor], fc2: Sequence[Tensor], grouped: bool, experts: int, hidden: int
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """[2F / etp, H] and [H, F / etp] of every local expert."""
    if not grouped:
        return fc1, fc2
    return list(grouped_fc1(fc1[0], experts, hidden)), list(grouped_fc2(fc2[0], experts, hidden))


def outputs(
    x: Tensor, dispatch: Dispatch, fc1: Sequence[Tensor] | Tensor, fc2: Sequence[Tensor] | Tensor, etp_group: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The unweighted outputs of all pairs, not differentiable.

    Args:
        x: [T, H], this rank's tokens.
        fc1, fc2: per local expert, as for `experts`, or one tensor each: [local experts, 2F / etp, H] and
            [local experts, H, F / etp].

    Returns:
        ([T·k, H], rounded, in the order of `dispatch.slots`; the experts' rows [P, H]; their fc1 outputs [P, 2F / etp]).
    """
    etp = tree.size(etp_group)
    rows = dispatch.send_tokens(x)
    gate_up = _products(rows, dispatch, fc1)
    active = ops.swiglu(gate_up)
    leaves = contract.current().leaves(active.shape[1] * etp, "expert").shard(etp)
    y = _products(active, dispatch, fc2, leaves, torch.float32 if etp > 1 else None)
    if etp > 1:
        y = tree.tree_reduce(y, etp_group, out_dtype=x.dtype)
    return dispatch.send_back(y), rows, gate_up


def _products(
    x: Tensor,
    dispatch: Dispatch,
    weights: Sequence[Tensor] | Tensor,
    leaves: Leaves | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Rows x [P, K] times the weight [N, K] of the expert that they belong to, [P, N]."""
    if isinstance(weights, Tensor):
        return ops.grouped_linear(x, weights, dispatch.offsets, leaves=leaves, out_dtype=out_dtype)
    y = x.new_empty(x.shape[0], weights[0].shape[0], dtype=out_dtype or x.dtype)
    _per_expert(y, dispatch, weights, lambda rows, w: ops.linear(x[rows], w, leaves=leaves, out_dtype=out_dtype))
    return y


def _per_expert(
    out: Tensor, dispatch: Dispatch, weights: Sequence[Tensor], product: Callable[[slice, Tensor], Tensor]
) -> None:
    """Fill `out` with product(rows, weight) of every local expert that has rows."""
    for part, weight in zip(dispatch.parts, weights, strict=True):
        if part.stop > part.start:
            out[part] = product(part, weight)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        dispatch: Dispatch,
        etp_group: Any,
        numbering: Rows,
        grouped: bool,
        count: int,
        *parameters: Tensor,
    ) -> Tensor:
        matrices = _matrices(parameters[:count], parameters[count:], grouped, dispatch.local_experts, x.shape[1])
        y, rows, gate_up = outputs(x, dispatch, *matrices, etp_group)
        out = ops.moe_combine(y, dispatch.slots, weights)
        ctx.save_for_backward(weights, rows, gate_up, *parameters)
        ctx.options = (dispatch, etp_group, numbering, grouped, count)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The expert's output is not stored: dw = (W2ᵀ dOut) · a, with the unweighted dOut."""
        weights, rows, gate_up, *parameters = ctx.saved_tensors
        dispatch, etp_group, numbering, grouped, count = ctx.options
        held = (dispatch.local_experts, rows.shape[1])
        fc1, fc2 = _matrices(parameters[:count], parameters[count:], grouped, *held)
        etp, dtype = tree.size(etp_group), rows.dtype
        active = ops.swiglu(gate_up)
        cut = contract.current().leaves(active.shape[1] * etp, "expert").shard(etp)
        dout = dispatch.send_tokens(grads[0].contiguous())
        pair_weights = dispatch.send_pairs(weights.flatten())

        g = torch.empty_like(active, dtype=torch.float32)
        _per_expert(g, dispatch, fc2, lambda part, weight: ops.linear_dx(dout[part], weight, out_dtype=torch.float32))
        dweights, dactive = ops.expert_weight_backward(g, active, pair_weights, leaves=cut)
        dweights = tree.tree_reduce(dweights.unsqueeze(1), etp_group).squeeze(1)
        dgate_up = schemas.swiglu_backward(dactive, gate_up)
        dx = None
        if ctx.needs_input_grad[0]:
            dx_rows = torch.empty_like(rows, dtype=torch.float32 if etp > 1 else dtype)
            out_dtype = dx_rows.dtype
            _per_expert(
                dx_rows,
                dispatch,
                fc1,
                lambda part, weight: ops.linear_dx(
                    dgate_up[part], weight, leaves=cut, paired=True, out_dtype=out_dtype
                ),
            )
            if etp > 1:
                dx_rows = tree.tree_reduce(dx_rows, etp_group, out_dtype=dtype)
            dx = ops.moe_combine(dispatch.send_back(dx_rows), dispatch.slots, torch.ones_like(weights))
        dpairs = dispatch.send_back(dweights)[dispatch.slots]

        scaled = (pair_weights.unsqueeze(1) * dout.float()).to(dtype)
        chains = dispatch.chains
        gradients: list[Tensor | None] = []
        for index, parameter in enumerate(parameters):
            if not ctx.needs_input_grad[7 + index]:
                gradients.append(None)
                continue
            dy, a, of_experts = (dgate_up, rows, grouped_fc1) if index < count else (scaled, active, grouped_fc2)
            local = range(len(chains)) if grouped else [index % count]
            adders = [_adder(dy[dispatch.parts[e]], a[dispatch.parts[e]], *chains[e]) for e in local]
            add = _to_each(adders, partial(of_experts, experts=held[0], hidden=held[1])) if grouped else adders[0]
            gradients.append(parameter_gradient(parameter, add, numbering.batch, numbering.peers))
        return dx, dpairs, None, None, None, None, None, *gradients


def _to_each(adders: Sequence[Callable[..., None]], of_experts: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    """Adds the weight gradients of all experts to f32 tensors that hold them."""

    def add(*grads: Tensor) -> None:
        for adder, *matrices in zip(adders, *map(of_experts, grads), strict=True):
            adder(*matrices)

    return add


def _chains(counts: Any) -> tuple[list[int], Tensor]:
    """Rows that have tokens in one expert, and the edges of their runs, from the tokens of every row."""
    present = counts.nonzero()[0]
    return present.tolist(), torch.from_numpy(np.concatenate(([0], counts[present].cumsum())))


def _adder(dy: Tensor, x: Tensor, numbers: list[int], edges: Tensor) -> Callable[..., None]:
    """Adds the weight gradient of one expert to f32 tensors: a chain per row, rows in order; row r to tensor r modulo their
    number."""

    def add(*grads: Tensor) -> None:
        if len(grads) == 1 and numbers:
            ops.linear_dw(dy, x, grads[0], row_offsets=edges)
        elif len(grads) > 1:
            for number, (first, last) in zip(numbers, pairwise(edges.tolist()), strict=True):
                ops.linear_dw(dy[first:last], x[first:last], grads[number % len(grads)])

    return add


def fork(x: Tensor, branches: int) -> tuple[Tensor, ...]:
    """`branches` readers of x; their gradients are added in f32 in the order of the tuple and rounded once, whatever the
    order in which autograd visits them. A branch may go unused."""
    if not needs_grad(x):
        return (x,) * branches
    copies: tuple[Tensor, ...] = _Fork.apply(x, branches)
    return copies


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, branches: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype = x.dtype
        return tuple(x.view_as(x) for _ in range(branches))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        present = [g.float() for g in grads if g is not None]
        total = present[0]
        for g in present[1:]:
            total = total + g
        return total.to(ctx.dtype), None
