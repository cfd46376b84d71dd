"""What parallelism costs: reductions over ranks against gloo's all_reduce, a Megatron-core MoE layer against stock, and how
cost grows with tokens, experts and ranks.

    python benchmarks/parallel.py [--quick] [--out DIR]

Reductions: two and four gloo ranks on this host, interleaved, medians; bytes are what one rank sends. MoE layer: forward, and
forward+backward, of one layer in a process of its own per side (stock with MINDSPEED_TPI=0), sides take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ops import host  # benchmarks/ops.py

ROOT = Path(__file__).resolve().parent.parent
HIDDEN, FFN, TOPK = 2048, 768, 8
ROWS = (8, 64, 512)


def medians(calls: list[Callable[[], object]], repeats: int) -> list[float]:
    """Median seconds of each, called in turn."""
    samples: list[list[float]] = [[] for _ in calls]
    for turn in range(repeats + 2):
        for times, call in zip(samples, calls, strict=True):
            start = time.perf_counter()
            call()
            if turn > 1:
                times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in samples]


# reductions


def _all_reduce(x: torch.Tensor, group: Any) -> None:
    dist.all_reduce(x.clone(), group=group)


def _reductions(rank: int, world: int, store: str, repeats: int, out: str) -> None:
    from mindspeed_tpi.parallel import tree

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    group = dist.group.WORLD
    lines = []
    for rows in ROWS:
        partial_sums = torch.randn(rows, HIDDEN)
        reduce = partial(tree.tree_reduce, partial_sums, group, out_dtype=torch.bfloat16)
        calls = [partial(_all_reduce, partial_sums.bfloat16(), group), reduce, partial(reduce, scatter=True)]
        elements, share = rows * HIDDEN, (world - 1) / world
        gathered = rows <= tree.GATHER_ROWS
        sent = {
            "all_reduce bf16": 2 * share * elements * 2,
            "tree_reduce": (world - 1) * elements * 4 if gathered else share * elements * (4 + 2),
            "tree_reduce, scattered": share * elements * 4,
        }
        times = medians(calls, repeats)
        for (name, size), seconds in zip(sent.items(), times, strict=True):
            lines.append([world, rows, name, size / 1e3, seconds * 1e3, seconds / times[0]])
    if rank == 0:
        Path(out).write_text(json.dumps(lines))
    dist.destroy_process_group()


def reductions(repeats: int) -> list[list[Any]]:
    lines: list[list[Any]] = []
    for world in (2, 4):
        with tempfile.TemporaryDirectory() as directory:
            out = os.path.join(directory, "out")
            mp.spawn(_reductions, args=(world, os.path.join(directory, "store"), repeats, out), nprocs=world)  # type: ignore[no-untyped-call]
            lines += json.loads(Path(out).read_text())
    return lines


# MoE layer of Megatron-core


def moe_child(tokens: int, experts: int, repeats: int) -> None:
    """Print median milliseconds of a forward and of a forward+backward pass of one MoELayer."""
    from mindspeed_tpi.parity.megatron import start_megatron

    start_megatron()
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=32,
        ffn_hidden_size=FFN,
        num_moe_experts=experts,
        moe_router_topk=TOPK,
        moe_ffn_hidden_size=FFN,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_router_dtype="fp32",
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.bfloat16,
        bf16=True,
        use_cpu_initialization=True,
    )
    from megatron.core.process_groups_config import ProcessGroupCollection

    spec = get_moe_module_spec(use_te=False, num_experts=experts, moe_grouped_gemm=False)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer = build_module(spec, config=config, layer_number=1, pg_collection=groups).bfloat16()
    x = torch.randn(tokens, 1, HIDDEN, dtype=torch.bfloat16)

    def forward() -> None:
        with torch.no_grad():
            layer(x)

    def both() -> None:
        layer(x.requires_grad_())[0].sum().backward()

    print(json.dumps([seconds * 1e3 for seconds in medians([forward, both], repeats)]))


def moe_layer(tokens: int, experts: int, rounds: int, repeats: int) -> list[Any]:
    """[tokens, experts, stock forward, ours, ratio, stock forward+backward, ours, ratio] in milliseconds."""
    found: dict[bool, list[list[float]]] = {True: [], False: []}
    for _ in range(rounds):
        for stock in (True, False):
            command = [sys.executable, __file__, "--child", f"{tokens},{experts},{repeats}"]
            env = {**os.environ, "MINDSPEED_TPI": "0" if stock else "strict", "PYTHONPATH": str(ROOT)}
            done = subprocess.run(command, env=env, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"MoE layer failed:\n{done.stderr[-3000:]}")
            found[stock].append(json.loads(done.stdout.splitlines()[-1]))
    stock, ours = ([statistics.median(column) for column in zip(*found[side], strict=True)] for side in (True, False))
    return [tokens, experts, stock[0], ours[0], ours[0] / stock[0], stock[1], ours[1], ours[1] / stock[1]]


def table(header: list[str], lines: list[list[Any]]) -> list[str]:
    cells = [[f"{v:.2f}" if isinstance(v, float) else str(v) for v in line] for line in lines]
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *cells)]


def plot(layers: list[list[Any]], reduced: list[list[Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), dpi=130, layout="constrained")
    tokens, experts, ranks = figure.subplots(1, 3)
    for axes, column, label, rows in (
        (tokens, 0, "tokens", [line for line in layers if line[1] == 32]),
        (experts, 1, "experts", [line for line in layers if line[0] == 64]),
    ):
        rows = sorted(rows, key=lambda line: line[column])
        for index, name, colour in ((5, "stock", "#d1495b"), (6, "parity", "#1f5fa8")):
            axes.plot([r[column] for r in rows], [r[index] for r in rows], "o-", color=colour, label=name)
        axes.set(xlabel=label, ylabel="MoE layer, forward + backward, ms", xscale="log", yscale="log")
        axes.legend()
    for name, colour in (
        ("all_reduce bf16", "#d1495b"),
        ("tree_reduce", "#1f5fa8"),
        ("tree_reduce, scattered", "#6a994e"),
    ):
        picked = [line for line in reduced if line[2] == name and line[1] == ROWS[-1]]
        ranks.plot([line[0] for line in picked], [line[4] for line in picked], "o-", color=colour, label=name)
    ranks.set(xlabel="ranks", ylabel=f"reduction of {ROWS[-1]} x {HIDDEN}, ms", xticks=[2, 4])
    ranks.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--out", type=Path, help="directory for parallel.md and parallel.png")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        moe_child(*map(int, options.child.split(",")))
        return
    rounds, repeats = (1, 3) if options.quick else (3, 5)
    reduced = reductions(5 if options.quick else 30)
    layers = []
    for tokens, experts in ((8, 32), (64, 32), (256, 32), (64, 8), (64, 128)):
        print(f"MoE layer, {tokens} tokens, {experts} experts", file=sys.stderr, flush=True)
        layers.append(moe_layer(tokens, experts, rounds, repeats))
    lines = [
        *table(["ranks", "rows of 2048", "collective", "kB sent per rank", "ms", "over all_reduce"], reduced),
        "",
        *table(
            [
                "tokens",
                "experts",
                "stock forward ms",
                "parity",
                "ratio",
                "stock forward+backward ms",
                "parity",
                "ratio",
            ],
            layers,
        ),
    ]
    print("\n".join(lines))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "parallel.md").write_text("\n".join([f"Host: {host()}, 2 cores.", "", *lines, ""]))
        plot(layers, reduced, options.out / "parallel.png")


if __name__ == "__main__":
    main()
