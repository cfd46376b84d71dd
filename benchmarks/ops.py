"""Time of each operator as a ratio to what the user would otherwise run (torch's default), interleaved, medians.

    python benchmarks/ops.py [--threads 1 2] [--quick] [--only linear] [--out DIR]

Prints a table; with --out also writes ops.md and ops.png. Weights are used as the model stores them (row-major): whatever
packing either side does per call is in its time.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_tpi import contract, ops
from mindspeed_tpi.ops import schemas

BF16, F32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Row:
    """One measured case: medians in seconds, and the goal of notes/performance.md for their ratio (None: no goal)."""

    op: str
    case: str
    threads: int
    ours: float
    theirs: float
    goal: float | None

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


Pair = tuple[str, str, Callable[[], object], Callable[[], object], float | None]


def interleaved(ours: Callable[[], object], theirs: Callable[[], object], budget: float) -> tuple[float, float]:
    """Median seconds of each, called in turn for about `budget` seconds."""
    samples: tuple[list[float], list[float]] = ([], [])
    for _ in range(2):
        ours(), theirs()
    end = time.perf_counter() + budget
    while time.perf_counter() < end or len(samples[0]) < 5:
        for times, run in zip(samples, (ours, theirs), strict=True):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    return statistics.median(samples[0]), statistics.median(samples[1])


def name(dtype: torch.dtype) -> str:
    return {BF16: "bf16", F32: "f32"}[dtype]


def linear_cases(quick: bool) -> Iterator[Pair]:
    goals = {(BF16, 1): 0.6, (BF16, 4): 0.6, (BF16, 16): 0.7, (F32, 1): 1.0, (F32, 16): 0.9, (F32, 64): 0.9}
    for dtype in (BF16, F32):
        for n, k in ((2048, 2048),) if quick else ((2048, 2048), (6144, 2048), (2048, 768), (1536, 576)):
            w = torch.randn(n, k).to(dtype)
            for m in (1, 16, 512) if quick else (1, 4, 16, 64, 512, 2048):
                x = torch.randn(m, k).to(dtype)
                goal = goals.get((dtype, m), 0.65 if dtype is BF16 else 1.1)
                yield "linear", f"{name(dtype)} {m}x{k}x{n}", lambda: ops.linear(x, w), lambda: F.linear(x, w), goal


def linear_gradient_cases(quick: bool) -> Iterator[Pair]:
    n, k, m = 2048, 2048, 512
    for dtype, goal in ((BF16, 0.7), (F32, 1.2)):
        w, x, dy = (torch.randn(*s).to(dtype) for s in ((n, k), (m, k), (m, n)))
        grad = torch.zeros(n, k)
        yield "linear dX", f"{name(dtype)} {m}x{n}x{k}", lambda: ops.linear_dx(dy, w), lambda: dy @ w, goal
        yield "linear dW", f"{name(dtype)} {m}x{n}x{k}", lambda: ops.linear_dw(dy, x, grad), lambda: dy.t() @ x, goal


def attention_cases(quick: bool) -> Iterator[Pair]:
    heads, kv, d = 32, 4, 128
    for s in (512,) if quick else (512, 2048):
        q, k, v = (torch.randn(s, h, d).to(BF16) for h in (heads, kv, kv))
        tq, tk, tv = (t.transpose(0, 1).unsqueeze(0).contiguous() for t in (q, k, v))
        seqs, scale = ops.causal_seqs([s]), d**-0.5

        def theirs() -> Tensor:
            return F.scaled_dot_product_attention(tq, tk, tv, is_causal=True, enable_gqa=True)

        yield "attention prefill", f"bf16 S={s}", lambda: ops.attention(q, k, v, seqs, scale=scale), theirs, 0.6
        segment = contract.current().segment_blocks
        out, m, l = schemas.attention(q, k, v, seqs, 1, scale, 0, segment)  # noqa: E741
        dout = torch.randn_like(q)

        def ours_backward() -> object:
            return schemas.attention_backward(dout, q, k, v, out, m, l, seqs, 1, scale, 0, segment, False)

        gq, gk, gv = (t.clone().requires_grad_() for t in (tq, tk, tv))
        y = F.scaled_dot_product_attention(gq, gk, gv, is_causal=True, enable_gqa=True)
        dy = dout.transpose(0, 1).unsqueeze(0)

        def their_backward() -> object:
            return torch.autograd.grad(y, (gq, gk, gv), dy, retain_graph=True)

        yield "attention backward", f"bf16 S={s}", ours_backward, their_backward, 0.5
    batch, s, page = 8, 2048, 128
    pages = s // page
    cache = torch.randn(batch * pages, kv, page, 2 * d).to(BF16)
    table = torch.randperm(batch * pages).reshape(batch, pages).int()
    q = torch.randn(batch, heads, d).to(BF16)
    starts, lengths = torch.arange(batch + 1).int(), torch.full((batch,), s).int()
    dk, dv = (torch.randn(batch, kv, s, d).to(BF16) for _ in range(2))
    dq = q.unsqueeze(2)
    yield (
        "attention decode",
        f"bf16 B={batch} S={s}",
        lambda: ops.paged_attention(q, cache, table, starts, lengths, scale=d**-0.5),
        lambda: F.scaled_dot_product_attention(dq, dk, dv, enable_gqa=True),
        0.8,
    )


def elementwise_cases(quick: bool) -> Iterator[Pair]:
    for dtype in (BF16, F32):
        for t in (1, 512):
            x, w = torch.randn(t, 2048).to(dtype), torch.randn(2048).to(dtype)
            yield (
                "rms_norm",
                f"{name(dtype)} {t}x2048",
                lambda: ops.rms_norm(x, w, 1e-6),
                lambda: F.rms_norm(x, (2048,), w, 1e-6),
                0.6,
            )
        x = torch.randn(512, 2 * 768).to(dtype)
        yield "swiglu", f"{name(dtype)} 512x768", lambda: ops.swiglu(x), lambda: F.silu(x[:, :768]) * x[:, 768:], None
    cos, sin = ops.rope_tables(ops.RopeConfig(128, 1e6, 4096))
    x, positions = torch.randn(512, 32, 128).to(BF16), torch.arange(512)
    c, s = torch.cat((cos, cos), 1)[:512, None].to(BF16), torch.cat((sin, sin), 1)[:512, None].to(BF16)

    def rotate() -> Tensor:
        return x * c + torch.cat((-x[..., 64:], x[..., :64]), -1) * s

    yield "rope", "bf16 512x32x128", lambda: ops.rope(x, cos, sin, positions), rotate, None


def logprob_cases(quick: bool) -> Iterator[Pair]:
    for t in (1, 32):
        z, tokens = torch.randn(t, 151_936), torch.randint(0, 151_936, (t,))

        def theirs() -> Tensor:
            return z.log_softmax(-1).gather(1, tokens[:, None])

        yield "token_logprob", f"f32 {t}x151936", lambda: ops.token_logprob(z, tokens), theirs, 1.0


def moe_cases(quick: bool) -> Iterator[Pair]:
    """Qwen3-30B-A3B's experts in bf16, against a plain loop over the experts that have tokens."""
    hidden, experts, topk, ffn = 2048, 128, 8, 768
    fc1, fc2 = (torch.randn(experts, *s, dtype=BF16) for s in ((2 * ffn, hidden), (hidden, ffn)))
    for t in (1, 16) if quick else (1, 16, 256):
        logits = torch.randn(t, experts)

        def their_route() -> object:
            weights, ids = logits.softmax(-1).topk(topk)
            return weights / weights.sum(-1, keepdim=True), ids

        yield "moe_route", f"f32 {t}x{experts}", lambda: ops.moe_route(logits, topk), their_route, None
        weights, ids = ops.moe_route(logits, topk)
        offsets = torch.cat((torch.zeros(1), ids.flatten().bincount(minlength=experts).cumsum(0))).long()
        used = [(e, int(a), int(b)) for e, (a, b) in enumerate(zip(offsets, offsets[1:], strict=False)) if a < b]
        x, a, y = (torch.randn(t * topk, n, dtype=BF16) for n in (hidden, ffn, 2 * ffn))

        def loop(x: Tensor, weight: Tensor) -> Tensor:
            return torch.cat([x[i:j] @ weight[e] for e, i, j in used])

        for rows, weight in ((x, fc1), (a, fc2)):
            case = f"bf16 {t} tokens, {rows.shape[1]}x{weight.shape[1]}"
            yield (
                "grouped_linear",
                case,
                lambda: ops.grouped_linear(rows, weight, offsets),
                lambda: loop(rows, weight.mT),
                1.0,
            )
        yield (
            "grouped_linear dX",
            f"bf16 {t} tokens, {2 * ffn}x{hidden}",
            lambda: ops.grouped_linear_dx(y, fc1, offsets, paired=True),
            lambda: loop(y, fc1),
            1.0,
        )
        slots = ids.flatten().long().argsort(stable=True).argsort().view(t, topk)
        yield (
            "moe_combine",
            f"bf16 {t}x{topk}x{hidden}",
            lambda: ops.moe_combine(x, slots, weights),
            lambda: (x.view(t, topk, hidden).float() * weights[..., None]).sum(1).bfloat16(),
            None,
        )
        g = torch.randn(t * topk, ffn)
        w = weights.flatten()
        yield (
            "expert_weight_backward",
            f"bf16 {t * topk}x{ffn}",
            lambda: ops.expert_weight_backward(g, a, w),
            lambda: ((g * a).sum(-1), (w[:, None] * g).bfloat16()),
            None,
        )
        z = torch.randn(t, 1)
        yield (
            "sigmoid_gate",
            f"bf16 {t}x{hidden}",
            lambda: ops.sigmoid_gate(x[:t], z),
            lambda: x[:t] * z.sigmoid().bfloat16(),
            None,
        )


FAMILIES = (linear_cases, linear_gradient_cases, attention_cases, elementwise_cases, logprob_cases, moe_cases)


def measure(threads: list[int], quick: bool, only: str | None) -> list[Row]:
    rows = []
    for count in threads:
        torch.set_num_threads(count)
        for family in FAMILIES:
            for op, case, ours, theirs, goal in family(quick):
                if only and only not in op:
                    continue
                row = Row(op, case, count, *interleaved(ours, theirs, 0.1 if quick else 0.6), goal)
                rows.append(row)
                print(line(row), flush=True)
    return rows


HEADER = "| op | case | threads | ours ms | torch ms | ratio | goal |\n| --- | --- | --- | --- | --- | --- | --- |"


def line(row: Row) -> str:
    goal = "" if row.goal is None else f"≤ {row.goal:g}"
    return f"| {row.op} | {row.case} | {row.threads} | {row.ours * 1e3:.3f} | {row.theirs * 1e3:.3f} | {row.ratio:.2f} | {goal} |"


def host() -> str:
    model = next(
        (text.split(":")[1].strip() for text in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in text),
        platform.machine(),
    )
    capability = torch.backends.cpu.get_cpu_capability()
    isa = ops.backends.active().describe().get("isa")
    return f"{model} ({', '.join(flags())}), torch {torch.__version__} ({capability}), backend {isa}"


FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16")


def flags() -> list[str]:
    """The instruction sets of this CPU that decide a ratio."""
    words = set(Path("/proc/cpuinfo").read_text().split())
    return [flag for flag in FLAGS if flag in words]


def refuse_other_host(table: Path) -> None:
    """Exit when `table` was measured on another kind of host: its rows and new ones would be compared."""
    if not table.is_file():
        return
    first = table.read_text().splitlines()[0]
    if not first.startswith(f"Host: {host()}"):
        raise SystemExit(
            f"{table}: measured on another host or library ({first!r}); this one is {host()!r}. Choose another --out directory"
        )


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = [f"{r.op} {r.case} ({r.threads}t)" for r in rows]
    figure, axes = plt.subplots(figsize=(9, 0.22 * len(rows) + 1.2))
    colours = ["#3a7d44" if r.goal is None or r.ratio <= r.goal else "#c0504d" for r in rows]
    axes.barh(labels, [r.ratio for r in rows], color=colours)
    axes.scatter(
        [r.goal for r in rows if r.goal], [i for i, r in enumerate(rows) if r.goal], marker="|", color="black", s=60
    )
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.set_xlabel("time, mindspeed_tpi / torch (bar: goal)")
    axes.invert_yaxis()
    axes.tick_params(labelsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", help="operators whose name contains this")
    parser.add_argument("--out", type=Path, help="directory for ops.md and ops.png")
    options = parser.parse_args()
    if options.out:
        refuse_other_host(options.out / "ops.md")
    print(host(), HEADER, sep="\n")
    with torch.inference_mode(False):
        rows = measure(options.threads, options.quick, options.only)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "ops.md").write_text("\n".join([f"Host: {host()}.", "", HEADER, *map(line, rows), ""]))
        plot(rows, options.out / "ops.png")


if __name__ == "__main__":
    main()
