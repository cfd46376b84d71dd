"""What parallelism costs: reductions over ranks against gloo's all_reduce, a MoE layer of Megatron-core and one of vLLM against
stock, and how cost grows with tokens, experts and ranks.

    python benchmarks/parallel.py [--quick] [--out DIR]

Reductions: two and four gloo ranks on this host, interleaved, medians; bytes are what one rank sends. MoE layer: forward, and
forward+backward, of one Megatron-core layer, forward of one vLLM layer, each in a process of its own per side (stock with
MINDSPEED_TPI=0), sides take turns. Over ranks: the experts are spread over them, every rank has its own tokens.
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
RANKS = (1, 2, 4)
TOKENS_PER_RANK = 8  # of the layer whose experts are spread over ranks
BUDGET = 20.0  # seconds of turns after which no further one starts


def medians(calls: list[Callable[[], object]], repeats: int) -> list[float]:
    """Median seconds of each, called in turn after one turn that is not counted; fewer turns when one takes seconds.

    All ranks start a call together, so that none is charged for what another still does of the one before.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    samples: list[list[float]] = [[] for _ in calls]
    begin = time.perf_counter()
    for turn in range(repeats + 1):
        for times, call in zip(samples, calls, strict=True):
            if ranks > 1:
                dist.barrier()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        spent = torch.tensor(time.perf_counter() - begin)
        if ranks > 1:
            dist.broadcast(spent, 0)  # one rank's clock decides for all
        if turn and spent > BUDGET:
            break
    return [statistics.median(times[1:]) for times in samples]


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
    from mindspeed_tpi.parallel.layout import Layout
    from mindspeed_tpi.parity.megatron import start_megatron, world_size

    ranks = world_size()
    start_megatron(Layout(dp=ranks, ep=ranks))
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
        expert_model_parallel_size=ranks,
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

    times = [seconds * 1e3 for seconds in medians([forward, both], repeats)]
    if dist.get_rank() == 0:
        print(json.dumps(times))


# MoE layer of vLLM


def vllm_child(tokens: int, experts: int, repeats: int) -> None:
    """Print median milliseconds of a forward pass of one Qwen3MoeSparseMoeBlock, as vLLM builds and loads it."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM
    from vllm.forward_context import set_forward_context

    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "intermediate_size": FFN,
        "moe_intermediate_size": FFN,
        "num_experts": experts,
        "num_experts_per_tok": TOPK,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 512,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "dtype": "bfloat16",
    }
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(config))
        llm = LLM(
            model=directory,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            max_num_seqs=4,
            max_num_batched_tokens=1024,
        )

    def work(model: torch.nn.Module) -> float:
        layer = model.get_submodule("model.layers.0.mlp")
        x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16)
        with torch.no_grad(), set_forward_context(None, llm.llm_engine.vllm_config, num_tokens=tokens):
            return medians([lambda: layer(x)], repeats)[0]

    print(json.dumps([seconds * 1e3 for seconds in llm.apply_model(work)]))


CHILDREN = {"megatron": moe_child, "vllm": vllm_child}


def sides(kind: str, tokens: int, experts: int, rounds: int, repeats: int, ranks: int = 1) -> list[float]:
    """[stock, ours, ratio] of every figure that a child of this kind prints, in milliseconds."""
    found: dict[bool, list[list[float]]] = {True: [], False: []}
    for _ in range(rounds):
        for stock in (True, False):
            launcher = (
                ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
            )
            command = [sys.executable, *launcher, __file__, "--child", f"{kind},{tokens},{experts},{repeats}"]
            env = {**os.environ, "MINDSPEED_TPI": "0" if stock else "strict", "PYTHONPATH": str(ROOT)}
            if ranks > 1:
                env["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // ranks))
            done = subprocess.run(command, env=env, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"MoE layer of {kind} failed:\n{done.stderr[-3000:]}")
            found[stock].append(json.loads(done.stdout.splitlines()[-1]))
    stock, ours = ([statistics.median(column) for column in zip(*found[side], strict=True)] for side in (True, False))
    return [figure for a, b in zip(stock, ours, strict=True) for figure in (a, b, b / a)]


def moe_layer(tokens: int, experts: int, rounds: int, repeats: int) -> list[Any]:
    """[tokens, experts, stock, ours, ratio of Megatron-core's forward, its forward+backward, vLLM's forward]."""
    figures = [figure for kind in CHILDREN for figure in sides(kind, tokens, experts, rounds, repeats)]
    return [tokens, experts, *figures]


def moe_ranks(ranks: int, experts: int, rounds: int, repeats: int) -> list[Any]:
    """[ranks, experts per rank, stock, ours, ratio of Megatron-core's forward, its forward+backward]."""
    return [ranks, experts // ranks, *sides("megatron", TOKENS_PER_RANK, experts, rounds, repeats, ranks)]


def table(header: list[str], lines: list[list[Any]]) -> list[str]:
    cells = [[f"{v:.2f}" if isinstance(v, float) else str(v) for v in line] for line in lines]
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *cells)]


def plot(layers: list[list[Any]], spread: list[list[Any]], reduced: list[list[Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14.5, 3.8), dpi=130, layout="constrained")
    tokens, experts, peers, ranks = figure.subplots(1, 4)
    megatron = ((5, "stock", "#d1495b", "o-"), (6, "parity", "#1f5fa8", "o-"))
    vllm = ((8, "stock vLLM, forward", "#d1495b", "s:"), (9, "parity vLLM, forward", "#1f5fa8", "s:"))
    for axes, column, label, rows, curves in (
        (tokens, 0, "tokens (32 experts)", [line for line in layers if line[1] == 32], megatron + vllm),
        (experts, 1, "experts (64 tokens)", [line for line in layers if line[0] == 64], megatron + vllm),
        (peers, 0, f"ranks that share 32 experts ({TOKENS_PER_RANK} tokens each)", spread, megatron),
    ):
        rows = sorted(rows, key=lambda line: line[column])
        for index, name, colour, style in curves:
            axes.plot([r[column] for r in rows], [r[index] for r in rows], style, color=colour, label=name)
        axes.set(xlabel=label, ylabel="MoE layer, forward + backward, ms", xscale="log", yscale="log")
        axes.legend(fontsize="small")
    peers.set(xscale="linear", xticks=RANKS)
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
        kind, *numbers = options.child.split(",")
        CHILDREN[kind](*map(int, numbers))
        return
    if options.out:
        from ops import refuse_other_host  # benchmarks/ops.py

        refuse_other_host(options.out / "parallel.md")
    rounds, repeats = (1, 3) if options.quick else (3, 5)
    reduced = reductions(5 if options.quick else 30)
    layers = []
    for tokens, experts in ((8, 32), (64, 32), (256, 32), (64, 8), (64, 128)):
        print(f"MoE layer, {tokens} tokens, {experts} experts", file=sys.stderr, flush=True)
        layers.append(moe_layer(tokens, experts, rounds, repeats))
    spread = []
    for ranks in RANKS:
        print(f"MoE layer over {ranks} ranks", file=sys.stderr, flush=True)
        spread.append(moe_ranks(ranks, 32, rounds, repeats))
    forward, both = (["stock forward ms", "parity", "ratio"], ["stock forward+backward ms", "parity", "ratio"])
    lines = [
        *table(["ranks", "rows of 2048", "collective", "kB sent per rank", "ms", "over all_reduce"], reduced),
        "",
        *table(["tokens", "experts", *forward, *both, "stock vLLM forward ms", "parity", "ratio"], layers),
        "",
        *table(["ranks", f"experts per rank ({TOKENS_PER_RANK} tokens each)", *forward, *both], spread),
    ]
    print("\n".join(lines))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "parallel.md").write_text(
            "\n".join([f"Host: {host()}, 2 cores, {rounds} round{'s' * (rounds > 1)}.", "", *lines, ""])
        )
        plot(layers, spread, reduced, options.out / "parallel.png")


if __name__ == "__main__":
    main()
