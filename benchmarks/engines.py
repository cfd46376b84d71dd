"""Whole engines, parity over stock: vLLM prefill and decode, Megatron-core forward and forward+backward, peak memory.

    python benchmarks/engines.py [--model HF_DIR] [--rounds 3] [--out DIR]

Every measurement runs in a process of its own; stock and parity take turns and medians are reported. Without --model, a
random model of SmolLM2-135M's shape is used (the numbers do not depend on the weights).
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROMPTS, PROMPT_LENGTH, NEW_TOKENS = 8, 256, 32
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


def measure_engine(model: str, stock: bool, rollout: Path) -> dict[str, float]:
    """Prefill: prompts with one new token; decode: what further tokens cost."""
    import torch

    from mindspeed_tpi.parity.engine import Engine
    from mindspeed_tpi.parity.request import EngineOptions, Request

    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 40_000, (PROMPT_LENGTH,), generator=generator).tolist() for _ in range(PROMPTS)]
    options = EngineOptions(max_num_seqs=PROMPTS, max_num_batched_tokens=1024, enable_prefix_caching=False)
    request = Request(model, tuple(map(tuple, prompts)), NEW_TOKENS, 1.0, stock=stock, engine=options)
    with Engine(request) as engine:
        engine.generate(max_new_tokens=2)
        prefill, whole = [], []
        for _ in range(3):
            start = time.perf_counter()
            engine.generate(max_new_tokens=1)
            prefill.append(time.perf_counter() - start)
            start = time.perf_counter()
            record = engine.generate()
            whole.append(time.perf_counter() - start)
        record.save(rollout)
    first = statistics.median(prefill)
    return {
        "prefill": first / (PROMPTS * PROMPT_LENGTH) * 1e6,
        "decode": (statistics.median(whole) - first) / (PROMPTS * (NEW_TOKENS - 1)) * 1e6,
        "engine_memory": peak_mib(),
    }


def measure_trainer(model: str, stock: bool, rollout: Path) -> dict[str, float]:
    from mindspeed_tpi.parity.request import Request
    from mindspeed_tpi.parity.rollout import Rollout
    from mindspeed_tpi.parity.trainer import Trainer

    record = Rollout.load(rollout)
    trainer = Trainer(Request(model, ((1,),), 1, 1.0, stock=stock))
    tokens = record.token_ids.numel()
    trainer.logprobs(record)
    forward, both = [], []
    for _ in range(3):
        start = time.perf_counter()
        trainer.logprobs(record)
        forward.append(time.perf_counter() - start)
        start = time.perf_counter()
        trainer.backward(record, micro_batch=PROMPTS // 2)
        both.append(time.perf_counter() - start)
    return {
        "forward": statistics.median(forward) / tokens * 1e6,
        "forward_backward": statistics.median(both) / tokens * 1e6,
        "trainer_memory": peak_mib(),
    }


def child(side: str, model: str, stock: bool, rollout: Path) -> dict[str, float]:
    """Run one measurement in a fresh process."""
    env = {**os.environ, "MINDSPEED_TPI": "0" if stock else "strict", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, "--child", side, "--model", model, "--rollout", str(rollout)]
    done = subprocess.run([*command, *(["--stock"] if stock else [])], env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{side} ({'stock' if stock else 'parity'}) failed:\n{done.stderr[-3000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def random_model(directory: Path) -> str:
    sys.path.insert(0, str(ROOT))
    from tests.models import write_model

    shape: dict[str, Any] = {
        "layers": 30,
        "hidden": 576,
        "heads": 9,
        "kv_heads": 3,
        "head_dim": 64,
        "ffn": 1536,
        "vocab": 49_152,
    }
    return str(write_model(directory / "model", "llama-tied", std=0.04, **shape))


def report(results: dict[bool, list[dict[str, float]]]) -> list[str]:
    lines = ["| | stock | parity | ratio | goal |", "| --- | --- | --- | --- | --- |"]
    for key, label in ROWS.items():
        stock, parity = (statistics.median(r[key] for r in results[mode]) for mode in (True, False))
        goal = "≤ 1.1" if key.endswith("memory") else "≤ 1.0"
        lines.append(f"| {label} | {stock:.1f} | {parity:.1f} | {parity / stock:.2f} | {goal} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face model directory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="directory for engines.md")
    for hidden in ("--child", "--rollout"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--stock", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run = {"engine": measure_engine, "trainer": measure_trainer}[options.child]
        print(json.dumps(run(options.model, options.stock, Path(options.rollout))))
        return
    with tempfile.TemporaryDirectory(prefix="mindspeed-tpi-bench-") as directory:
        model = options.model or random_model(Path(directory))
        results: dict[bool, list[dict[str, float]]] = {True: [], False: []}
        for turn in range(options.rounds):
            for stock in (True, False):
                print(
                    f"round {turn + 1}/{options.rounds}, {'stock' if stock else 'parity'}", file=sys.stderr, flush=True
                )
                rollout = Path(directory) / f"{stock}.safetensors"
                sides = [child(side, model, stock, rollout) for side in ("engine", "trainer")]
                results[stock].append({k: v for side in sides for k, v in side.items()})
    lines = report(results)
    print("\n".join(lines))
    if options.out:
        from ops import host  # benchmarks/ops.py

        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "engines.md").write_text("\n".join([f"Host: {host()}, 2 cores.", "", *lines, ""]))


if __name__ == "__main__":
    main()
