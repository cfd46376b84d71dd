"""Experts spread over ranks against the same experts on one rank: outputs and gradients, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from mindspeed_tpi import ops
from mindspeed_tpi.parallel import moe
from tests.parallel.ranks import Mesh, Ranks
from tests.parallel.test_dense import leaf, main_grad, randn

S, B, H, F, E, K = 16, 3, 128, 64, 8, 3
EMPTY = 5  # an expert that no token chooses


def routing(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Router logits f32 [S·B, E] with ties, and one expert that is never chosen."""
    logits = randn(S * B, E, dtype=dtype).float()
    logits[:, 2] = logits[:, 6]
    logits[:, EMPTY] = -50
    return logits, randn(S, B, H, dtype=dtype)


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """Names of the methods by which the host has read a tensor's values."""
    reads: list[str] = []

    def counted(name: str) -> Any:
        original = getattr(Tensor, name)

        def read(self: Tensor) -> Any:
            reads.append(name)
            return original(self)

        return mock.patch.object(Tensor, name, read)

    with ExitStack() as stack:
        for name in ("tolist", "item", "__int__", "__bool__", "nonzero", "numpy"):
            stack.enter_context(counted(name))
        yield reads


def _layer(mesh: Mesh, ep: int, etp: int, dispatcher: Any, dtype: torch.dtype) -> dict[str, Any]:
    n, r = mesh.size, mesh.rank
    logits, x = routing(dtype)
    w1, w2 = randn(E, 2, F, H, dtype=dtype), randn(E, H, F, dtype=dtype)
    dout = randn(S, B, H, dtype=dtype, seed=4)
    pairs, every = mesh.group(2) if n == 4 else None, mesh.group() if n > 1 else None
    etp_group = None if etp == 1 else (every if etp == n else pairs)
    ep_group = None if ep == 1 else (every if ep == n else mesh.across())
    ep_rank, etp_rank = r // etp, r % etp
    count = E // ep
    mine = slice(ep_rank * count, (ep_rank + 1) * count)
    fc1 = [leaf(w.chunk(etp, 1)[etp_rank].flatten(0, 1)) for w in w1[mine]]
    fc2 = [leaf(w.chunk(etp, 1)[etp_rank]) for w in w2[mine]]
    rows = x.chunk(n)[r].flatten(0, 1).clone().requires_grad_()
    z = logits.view(S, B, E).chunk(n)[r].flatten(0, 1).clone().requires_grad_()
    weights, ids = ops.moe_route(z, K)
    position = torch.arange(r * S // n, (r + 1) * S // n)
    keys = (torch.arange(B) * S + position.unsqueeze(1)).flatten()
    numbering = moe.Rows(S, B, B)
    with host_reads() as reads:
        dispatch = moe.Dispatch(ids, keys, E, ep_group, etp_group, dispatcher, rows=numbering)
        out = moe.experts(rows, weights, dispatch, fc1, fc2, etp_group=etp_group, rows=numbering)
        out.backward(dout.chunk(n)[r].flatten(0, 1))
    assert rows.grad is not None and z.grad is not None
    return {
        "out": out.detach(),
        "dx": rows.grad,
        "dlogits": z.grad,
        "place": (ep_rank, etp_rank),
        "reads": len(reads),
        "w1": torch.stack([main_grad(p).unflatten(0, (2, -1)) for p in fc1]),
        "w2": torch.stack([main_grad(p) for p in fc2]),
    }


def whole(got: list[dict[str, Any]], name: str, ep: int, etp: int, dim: int) -> Tensor:
    """The unsharded gradient of all experts."""
    parts = {g["place"]: g[name] for g in got}
    return torch.cat([torch.cat([parts[e, t] for t in range(etp)], dim) for e in range(ep)])


@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (4, 1), (1, 2), (1, 4), (2, 2)])
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts(ranks: Ranks, ep: int, etp: int, dispatcher: str, dtype: torch.dtype) -> None:
    (wanted,) = ranks(1, _layer, 1, 1, dispatcher, dtype)
    got = ranks(ep * etp, _layer, ep, etp, dispatcher, dtype)
    for name in ("out", "dx", "dlogits"):
        assert torch.equal(torch.cat([g[name] for g in got]), wanted[name]), name
    # split sizes and rows; gathering tokens also asks for the longest rank
    assert {g["reads"] for g in got} == {1 + (dispatcher == "allgather")} and wanted["reads"] == 1
    assert torch.equal(whole(got, "w1", ep, etp, 2), wanted["w1"])
    assert torch.equal(whole(got, "w2", ep, etp, 2), wanted["w2"])
    assert bool((wanted["w1"][EMPTY] == 0).all()) and bool((wanted["w1"] != 0).any())


def _replicated(mesh: Mesh, ep: int, etp: int, mapped: bool) -> tuple[Tensor, int]:
    """The rollout engine's way: every rank has all tokens and the experts in one tensor, in an order of their own if `mapped`.
    Returns the layer's output and how often the host read a number of the dispatch."""
    n, r = mesh.size, mesh.rank
    logits, x = routing(torch.bfloat16)
    w1, w2 = randn(E, 2, F, H, dtype=torch.bfloat16), randn(E, H, F, dtype=torch.bfloat16)
    pairs, every = mesh.group(2) if n == 4 else None, mesh.group() if n > 1 else None
    etp_group = None if etp == 1 else (every if etp == n else pairs)
    ep_group = None if ep == 1 else (every if ep == n else mesh.across())
    mine, place, local = torch.arange(E), r // etp, E // ep
    mine = mine[place::ep] if mapped else mine[place * local : (place + 1) * local]
    expert_map = torch.full((E,), -1, dtype=torch.int32).scatter_(0, mine, torch.arange(local, dtype=torch.int32))
    fc1 = torch.stack([w.chunk(etp, 1)[r % etp].flatten(0, 1) for w in w1[mine]])
    fc2 = torch.stack([w.chunk(etp, 1)[r % etp] for w in w2[mine]])
    weights, ids = ops.moe_route(logits, K)
    with host_reads() as reads:
        dispatch = moe.Dispatch(
            ids, None, E, ep_group, etp_group, "replicated", expert_map if mapped else None, local if mapped else None
        )
    found = len(reads)
    y, *_ = moe.outputs(x.flatten(0, 1), dispatch, fc1, fc2, etp_group)
    return ops.moe_combine(y, dispatch.slots, weights), found


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
def test_one_dispatch_for_trainer_and_engine(ranks: Ranks, ep: int, etp: int, mapped: bool) -> None:
    (wanted,) = ranks(1, _layer, 1, 1, "alltoall", torch.bfloat16)
    for out, reads in ranks(ep * etp, _replicated, ep, etp, mapped):
        assert torch.equal(out, wanted["out"])
        assert reads == (ep > 1)  # how many pairs are this rank's


def test_gradients_against_autograd(ranks: Ranks) -> None:
    """The same layer written plainly in float64."""
    (got,) = ranks(1, _layer, 1, 1, "alltoall", torch.float32)
    logits, x = routing(torch.float32)
    w1, w2 = (randn(*s).double().requires_grad_() for s in ((E, 2, F, H), (E, H, F)))
    rows, z = x.flatten(0, 1).double().requires_grad_(), logits.double().requires_grad_()
    ids = ops.moe_route(logits, K)[1].long()
    weights = torch.softmax(z.gather(1, ids), 1)
    gate, up = (torch.einsum("th,efh->tef", rows, w1[:, i]) for i in range(2))
    y = torch.einsum("tef,ehf->teh", torch.nn.functional.silu(gate) * up, w2)
    out = (y.gather(1, ids.unsqueeze(-1).expand(-1, -1, H)) * weights.unsqueeze(-1)).sum(1)
    out.backward(randn(S, B, H, seed=4).flatten(0, 1).double())
    pairs = (
        (out, got["out"]),
        (rows.grad, got["dx"]),
        (z.grad, got["dlogits"]),
        (w1.grad, got["w1"]),
        (w2.grad, got["w2"]),
    )
    for exact, found in pairs:
        assert exact is not None
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-3)


def _fork_order(mesh: Mesh) -> list[Tensor]:
    """Gradients that arrive in another order give the same bits."""
    found = []
    for order in ((0, 1, 2), (2, 0, 1)):
        x = randn(40, 16, dtype=torch.bfloat16).requires_grad_()
        branches = moe.fork(x, 4)
        scales = (1.3, -0.7, 1e-3)
        total = torch.zeros(())
        for i in order:
            total = total + (branches[i].float() ** 2 * scales[i]).sum()
        total.backward()
        assert x.grad is not None
        found.append(x.grad)
    return found


def test_fork(ranks: Ranks) -> None:
    (first, second), *_ = ranks(1, _fork_order)
    assert torch.equal(first, second)


def _bad_expert(mesh: Mesh) -> None:
    moe.Dispatch(torch.tensor([[0, 9]], dtype=torch.int32), None, 8, None, None, "alltoall")


def test_an_expert_that_does_not_exist(ranks: Ranks) -> None:
    with pytest.raises(RuntimeError, match="expert ids 0 … 9 of 8 experts"):
        ranks(1, _bad_expert)
