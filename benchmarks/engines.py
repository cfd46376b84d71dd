"""Whole engines, parity over stock: vLLM prefill and decode, Megatron-core forward and forward+backward, peak memory.

    python benchmarks/engines.py [--rounds 3] [--dtypes float32 bfloat16] [--out DIR]

Every measurement runs in a process of its own; stock and parity take turns and medians are reported. The model is random,
of SmolLM2-135M's shape (the numbers do not depend on the weights). Stock bfloat16 is slow on a CPU without bfloat16
instructions, so that its row says little there: it gets fewer layers and tokens, and float32 is the row to read.

Below each table: how many operators of this package one decode step and one training pass call, and the share of their time
that the calls cost outside the kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Size:
    """What one run computes: layers of the model, prompts, tokens per prompt, tokens sampled after each."""

    layers: int
    prompts: int
    length: int
    new: int


SIZES = {"float32": Size(30, 8, 256, 32), "bfloat16": Size(6, 4, 128, 16)}
ROWS = {
    "prefill": "vLLM prefill, µs per token",
    "decode": "vLLM decode, µs per token",
    "forward": "Megatron-core forward, µs per token",
    "forward_backward": "Megatron-core forward+backward, µs per token",
    "engine_memory": "vLLM peak memory, MiB",
    "trainer_memory": "Megatron-core peak memory, MiB",
}


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def call_cost(recording: bool) -> float:
    """µs of a call of `linear` whose kernel has next to nothing to do; with the gradient recorded, or in inference mode."""
    import torch

    from mindspeed_tpi import ops

    x, weight, times = torch.randn(1, 64), torch.randn(64, 64, requires_grad=recording), []
    with torch.inference_mode(not recording):
        for _ in range(200):
            start = time.perf_counter()
            for _ in range(20):
                ops.linear(x, weight)
            times.append((time.perf_counter() - start) / 20)
    return statistics.median(times) * 1e6


def measure_engine(model: str, dtype: str, stock: bool, rollout: Path) -> dict[str, float]:
    """Prefill: prompts with one new token; decode: what further tokens cost."""
    import torch

    from mindspeed_tpi.parity.engine import Engine
    from mindspeed_tpi.parity.request import EngineOptions, Request

    size = SIZES[dtype]
    prompts = torch.randint(3, 40_000, (size.prompts, size.length), generator=torch.Generator().manual_seed(0)).tolist()
    options = EngineOptions(max_num_seqs=size.prompts, max_num_batched_tokens=1024, enable_prefix_caching=False)
    request = Request(model, tuple(map(tuple, prompts)), size.new, 1.0, dtype=dtype, stock=stock, engine=options)
    with Engine(request) as engine:
        engine.generate(max_new_tokens=2)
        prefill, whole = [], []
        for _ in range(3):
            start = time.perf_counter()
            prompt_only = engine.generate(max_new_tokens=1)
            prefill.append(time.perf_counter() - start)
            start = time.perf_counter()
            record = engine.generate()
            whole.append(time.perf_counter() - start)
        record.save(rollout)
    first, steps = statistics.median(prefill), size.new - 1
    decode = (statistics.median(whole) - first) / steps * 1e6
    result = {
        "prefill": first / (size.prompts * size.length) * 1e6,
        "decode": decode / size.prompts,
        "engine_memory": peak_mib(),
    }
    if not stock:
        calls, of_prompts = (sum(r.meta["op_calls"].values()) for r in (record, prompt_only))
        result["decode_calls"] = (calls - of_prompts) / steps
        result["decode_call"] = call_cost(recording=False)
        result["decode_share"] = result["decode_calls"] * result["decode_call"] / decode
    return result


def measure_trainer(model: str, dtype: str, stock: bool, rollout: Path) -> dict[str, float]:
    from mindspeed_tpi import ops
    from mindspeed_tpi.parity.request import Request
    from mindspeed_tpi.parity.rollout import Rollout
    from mindspeed_tpi.parity.trainer import Trainer

    record = Rollout.load(rollout)
    trainer = Trainer(Request(model, ((1,),), 1, 1.0, dtype=dtype, stock=stock))
    tokens = record.token_ids.numel()
    trainer.logprobs(record)
    forward, both = [], []
    for _ in range(3):
        start = time.perf_counter()
        trainer.logprobs(record)
        forward.append(time.perf_counter() - start)
        ops.backends.reset_counts()
        start = time.perf_counter()
        trainer.backward(record, micro_batch=SIZES[dtype].prompts // 2)
        both.append(time.perf_counter() - start)
    passes = statistics.median(both) * 1e6
    result = {
        "forward": statistics.median(forward) / tokens * 1e6,
        "forward_backward": passes / tokens,
        "trainer_memory": peak_mib(),
    }
    if not stock:
        result["pass_calls"] = sum(ops.backends.call_counts().values())
        result["pass_call"] = call_cost(recording=True)
        result["pass_share"] = result["pass_calls"] * result["pass_call"] / passes
    return result


def child(side: str, model: str, dtype: str, stock: bool, rollout: Path) -> dict[str, float]:
    """Run one measurement in a fresh process."""
    env = {**os.environ, "MINDSPEED_TPI": "0" if stock else "strict", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, "--child", side, model, dtype, "stock" if stock else "parity", str(rollout)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{side} ({command[-2]}) failed:\n{done.stderr[-3000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def random_model(directory: Path, layers: int) -> str:
    sys.path.insert(0, str(ROOT))
    from tests.models import write_model

    shape = {"hidden": 576, "heads": 9, "kv_heads": 3, "head_dim": 64, "ffn": 1536, "vocab": 49_152}
    return str(write_model(directory, "llama-tied", std=0.04, layers=layers, **shape))


def measure(dtype: str, rounds: int, directory: Path) -> dict[bool, dict[str, float]]:
    """Medians over `rounds` of every row, by stock."""
    model = random_model(directory / dtype, SIZES[dtype].layers)
    results: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for turn in range(rounds):
        for stock in (True, False):
            rollout, result = directory / f"{dtype}-{stock}.safetensors", {}
            for side in ("engine", "trainer"):
                name = "stock" if stock else "parity"
                print(f"{dtype}, round {turn + 1}/{rounds}: {name} {side}", file=sys.stderr, flush=True)
                result.update(child(side, model, dtype, stock, rollout))
            results[stock].append(result)
    return {stock: {key: statistics.median(r[key] for r in runs) for key in runs[0]} for stock, runs in results.items()}


def table(dtype: str, medians: dict[bool, dict[str, float]]) -> list[str]:
    size = SIZES[dtype]
    lines = [
        f"{dtype}: {size.layers} layers, {size.prompts} prompts of {size.length} tokens, {size.new} new tokens each.",
        "",
        "| | stock | parity | ratio | goal |",
        "| --- | --- | --- | --- | --- |",
    ]
    for key, label in ROWS.items():
        stock, parity = medians[True][key], medians[False][key]
        goal = "≤ 1.1" if key.endswith("memory") else "≤ 1.0"
        lines.append(f"| {label} | {stock:.1f} | {parity:.1f} | {parity / stock:.2f} | {goal} |")
    lines.append("")
    for work, key in (("A decode step", "decode"), ("A forward and backward pass", "pass")):
        calls, cost, share = (medians[False][f"{key}_{figure}"] for figure in ("calls", "call", "share"))
        lines.append(
            f"{work} calls {calls:.0f} operators; at {cost:.1f} µs each, calling takes {share:.1%} of its time."
        )
    return [*lines, ""]


def plot(medians: dict[str, dict[bool, dict[str, float]]], path: Path) -> None:
    """Ratios of parity to stock, a bar per row and dtype."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    height = 0.8 / len(medians)
    for index, (dtype, result) in enumerate(medians.items()):
        ratios = [result[False][key] / result[True][key] for key in ROWS]
        bars = axes.barh([row + index * height for row in range(len(ROWS))], ratios, height, label=dtype)
        axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(
        [row + 0.4 - height / 2 for row in range(len(ROWS))], [label.split(",")[0] for label in ROWS.values()]
    )
    axes.invert_yaxis()
    axes.set_xlabel("parity / stock (below 1: parity is faster or smaller)")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        side, model, dtype, mode, rollout = sys.argv[2:]
        run = {"engine": measure_engine, "trainer": measure_trainer}[side]
        print(json.dumps(run(model, dtype, mode == "stock", Path(rollout))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--out", type=Path, help="directory for engines.md and engines.png")
    options = parser.parse_args()
    if options.out:
        from ops import refuse_other_host

        refuse_other_host(options.out / "engines.md")
    with tempfile.TemporaryDirectory(prefix="mindspeed-tpi-bench-") as directory:
        medians = {dtype: measure(dtype, options.rounds, Path(directory)) for dtype in options.dtypes}
    lines = [line for dtype, result in medians.items() for line in table(dtype, result)]
    print("\n".join(lines))
    if options.out:
        from ops import host  # benchmarks/ops.py

        options.out.mkdir(parents=True, exist_ok=True)
        rounds = f"medians of {options.rounds} rounds"
        (options.out / "engines.md").write_text("\n".join([f"Host: {host()}, 2 cores, {rounds}.", "", *lines]))
        plot(medians, options.out / "engines.png")


if __name__ == "__main__":
    main()
