"""What a call costs before any arithmetic, per operator, against torch's: `python benchmarks/overhead.py`.

Operands are tiny; ours and torch's alternate in one process, so that both see the same host; the table holds medians in
microseconds, under `torch.inference_mode()` and while autograd records.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from mindspeed_tpi import ops
from mindspeed_tpi.ops import schemas

Call = Callable[[], object]


def pairs(grad: bool) -> dict[str, tuple[Call, Call]]:
    """Operator to (our call, torch's call of the same meaning); only what records, with `grad`."""
    x, weight = torch.randn(2, 8, requires_grad=grad), torch.randn(8, 8, requires_grad=grad)
    y, gamma = torch.randn(2, 8, requires_grad=grad), torch.ones(8, requires_grad=grad)
    ids, heads = torch.tensor([1, 2]), torch.randn(2, 2, 8, requires_grad=grad)
    cos, sin, where = torch.ones(4, 4), torch.zeros(4, 4), torch.tensor([0, 1])
    seqs = ops.causal_seqs([2])

    def rotate() -> object:
        c, s = cos[where][:, None], sin[where][:, None]
        a, b = heads[..., :4], heads[..., 4:]
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    def attend() -> object:
        q = heads.transpose(0, 1)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    both: dict[str, tuple[Call, Call]] = {
        "linear": (lambda: ops.linear(x, weight), lambda: F.linear(x, weight)),
        "rms_norm": (lambda: ops.rms_norm(x, gamma, 1e-5), lambda: F.rms_norm(x, (8,), gamma, 1e-5)),
        "add_rms_norm": (lambda: ops.add_rms_norm(x, y, gamma, 1e-5), lambda: F.rms_norm(x + y, (8,), gamma, 1e-5)),
        "residual_add": (lambda: ops.residual_add(x, y), lambda: x + y),
        "swiglu": (lambda: ops.swiglu(x), lambda: F.silu(x[:, :4]) * x[:, 4:]),
        "rope": (lambda: ops.rope(heads, cos, sin, where), rotate),
        "embedding": (lambda: ops.embedding(weight, ids), lambda: F.embedding(ids, weight)),
        "attention": (lambda: ops.attention(heads, heads, heads, seqs, scale=1.0), attend),
        "token_logprob": (
            lambda: ops.token_logprob(x, ids),
            lambda: x.log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1),
        ),
        "sigmoid_gate": (lambda: ops.sigmoid_gate(y, x[:, :1]), lambda: y * x[:, :1].sigmoid()),
        "moe_route": (lambda: ops.moe_route(x, 2), lambda: x.softmax(-1).topk(2)),
    }
    if grad:
        return both
    main_grad, offsets, experts = torch.zeros(8, 8), torch.tensor([0, 1, 2]), torch.randn(2, 8, 8)
    slots, weights, parts = torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2), torch.randn(2, 2, 8)
    return both | {
        "linear_dx": (lambda: ops.linear_dx(x, weight), lambda: x @ weight),
        "linear_dw": (lambda: ops.linear_dw(y, x, main_grad), lambda: main_grad.addmm_(y.t(), x)),
        "linear_db": (lambda: ops.linear_db(y, gamma), lambda: gamma.add_(y.sum(0))),
        "swiglu_backward": (
            lambda: schemas.swiglu_backward(x[:, :4], x),
            lambda: torch.ops.aten.silu_backward(x[:, :4], x[:, 4:]),
        ),
        "grouped_linear": (
            lambda: ops.grouped_linear(x, experts, offsets),
            lambda: [F.linear(x[e : e + 1], experts[e]) for e in range(2)],
        ),
        "tree_sum": (lambda: schemas.tree_sum(parts, None, torch.float32), lambda: parts.sum(0)),
        "moe_combine": (lambda: ops.moe_combine(y, slots, weights), lambda: (y[slots] * weights[..., None]).sum(1)),
    }


def medians(ours: Call, theirs: Call, rounds: int, calls: int) -> tuple[float, float]:
    """Microseconds a call of each."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for call, kept in zip((ours, theirs), times, strict=True):
            start = time.perf_counter()
            for _ in range(calls):
                call()
            kept.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--calls", type=int, default=200, help="per round")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| operator | recording | ours, µs | torch, µs | ratio |\n| --- | --- | --- | --- | --- |")
    for grad in (False, True):
        for name, (ours, theirs) in pairs(grad).items():
            with torch.inference_mode(not grad):
                mine, other = medians(ours, theirs, args.rounds, args.calls)
            print(
                f"| `{name}` | {'yes' if grad else 'no'} | {mine:.1f} | {other:.1f} | {mine / other:.2f} |", flush=True
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
