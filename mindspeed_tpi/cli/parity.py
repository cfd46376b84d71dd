"""Roll out with vLLM, recompute with Megatron-core, and compare the log-probabilities bit by bit.

Layouts are key=value,key=value; keys of the trainer: tp, sp, ep, etp, cp, pp, vpp, dp, cp_type=p2p|allgather|a2a,
dispatcher=alltoall|allgather; of the rollout engine: tp, ep, dp. The ranks are started by this command.

Exit status: 0 every token's logdiff is 0, 1 not, 2 bad input, 3 an engine failed. A matrix runs all its cells and ends with
the worst of them: 3, then 1, then 2.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindspeed_tpi.errors import InputError
from mindspeed_tpi.page import require_matplotlib, text_table
from mindspeed_tpi.parallel.layout import Layout
from mindspeed_tpi.parity import driver, prompts, report
from mindspeed_tpi.parity.megatron import check_model
from mindspeed_tpi.parity.request import DTYPES, EngineOptions, Request
from mindspeed_tpi.profiles import Profile

_ENGINE = EngineOptions()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, metavar="HF_DIR", help="Hugging Face model directory of a supported family")
    add(
        "--prompts",
        metavar="FILE.jsonl",
        help='lines {"prompt": text} or {"prompt_token_ids": [...]}; default: random tokens',
    )
    add("--num-prompts", type=_positive, default=16, metavar="N", help="how many random prompts (default %(default)s)")
    add("--prompt-len", type=_range, default=(16, 128), metavar="MIN:MAX", help="their lengths (default 16:128)")
    add("--seed", type=int, default=0, help="seeds random prompts and sampling (default %(default)s)")
    add(
        "--max-new-tokens",
        type=_positive,
        default=32,
        metavar="N",
        help="tokens to sample per prompt (default %(default)s)",
    )
    add("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (default %(default)s)")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of weights and activations (default %(default)s)")
    add("--train", default="tp=1", metavar="LAYOUT", help='layout of the trainer (default "%(default)s")')
    add("--rollout", default="tp=1", metavar="LAYOUT", help='layout of the rollout engine (default "%(default)s")')
    add(
        "--matrix",
        metavar="LAYOUTS",
        help='every training layout against every rollout layout: "tp=1 tp=2,sp=1 x tp=1 tp=2", or a file that holds this',
    )
    add("--stock", action="store_true", help="also run both engines with their own numerics")
    add("--json", type=Path, metavar="OUT", help="write the result as JSON")
    add("--report", type=Path, metavar="OUT.html", help="write a self-contained HTML report")
    engine = parser.add_argument_group("rollout engine (none of these may change a bit)")
    for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
        option = "--" + name.replace("_", "-")
        engine.add_argument(
            option, type=_positive, default=getattr(_ENGINE, name), metavar="N", help="default %(default)s"
        )
    engine.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=_ENGINE.enable_prefix_caching,
        help="default on",
    )


def run(options: argparse.Namespace) -> int:
    request = build_request(options)
    for path in filter(None, (options.json, options.report)):
        if not path.absolute().parent.is_dir():
            raise InputError(f"cannot write {path}: its directory does not exist; create it first")
    if options.report:
        require_matplotlib()
    if options.matrix:
        return _run_matrix(options, request)
    result = driver.run(
        request, stock=request if options.stock else None, announce=lambda line: print(line, file=sys.stderr)
    )
    print(text_table(report.rows(result)))
    print(report.verdict(result))
    _write(options, result.to_json(), lambda command: report.page(result, command))
    return 0 if result.exact else 1


def _run_matrix(options: argparse.Namespace, request: Request) -> int:
    trains, rollouts = _layouts(options)
    matrix = driver.run_matrix(request, trains, rollouts, announce=lambda line: print(line, file=sys.stderr))
    print(text_table(report.grid(matrix)))
    for number, reason in enumerate(report.reasons(matrix), 1):
        print(f"[{number}] {reason}")
    print(report.matrix_verdict(matrix))
    _write(options, matrix.to_json(), lambda command: report.matrix_page(matrix, command))
    return matrix.status


def _write(options: argparse.Namespace, document: dict[str, Any], page: Callable[[str], str]) -> None:
    """The files that were asked for; both name this command."""
    command = shlex.join(["mindspeed-tpi", *sys.argv[1:]])
    if options.json:
        options.json.write_text(json.dumps(document | {"command": command}, indent=2) + "\n", encoding="utf-8")
    if options.report:
        options.report.write_text(page(command), encoding="utf-8")


def _layouts(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Training and rollout layouts of this command, in canonical form, each checked against the model.

    Raises:
        InputError: a matrix that cannot be read.
        LayoutError: a layout that a side or the model cannot have.
    """
    sides = [[options.train], [options.rollout]]
    if options.matrix:
        if options.stock or (options.train, options.rollout) != ("tp=1", "tp=1"):
            raise InputError(
                "--matrix holds the layouts of both sides and runs no stock; leave --train, --rollout, --stock out"
            )
        file = Path(options.matrix)
        words = (file.read_text(encoding="utf-8") if file.is_file() else options.matrix).split()
        if words.count("x") != 1 or "x" in (words[0], words[-1]):
            raise InputError(
                f"--matrix {options.matrix!r} is neither a file nor training layouts, x, rollout layouts; "
                'write for example "tp=1 tp=2,sp=1 x tp=1 tp=2"'
            )
        middle = words.index("x")
        sides = [words[:middle], words[middle + 1 :]]
    trains = [Layout.parse(text, "train") for text in sides[0]]
    rollouts = [Layout.parse(text, "rollout") for text in sides[1]]
    for layout in trains:
        for stock in {False, options.stock} if layout.ranks > 1 else ():
            check_model(Profile.load(options.model), layout, stock=stock)
    return list(dict.fromkeys(map(str, trains))), list(dict.fromkeys(map(str, rollouts)))


def build_request(options: argparse.Namespace) -> Request:
    """Everything that can be refused before an engine starts.

    Raises:
        InputError: a bad option, model directory or prompt.
        LayoutError: a layout that a side cannot have.
    """
    profile = Profile.load(options.model)
    if options.prompts:
        chosen = prompts.read(options.prompts, options.model)
    else:
        chosen = prompts.random_prompts(options.num_prompts, options.prompt_len, profile.vocab, options.seed)
    prompts.check(chosen, profile, options.max_new_tokens)
    if options.max_num_batched_tokens < options.max_num_seqs:
        raise InputError(
            f"--max-num-batched-tokens {options.max_num_batched_tokens} is less than --max-num-seqs {options.max_num_seqs}, "
            "but every running request takes a token a step; raise it"
        )
    trains, rollouts = _layouts(options)
    return Request(
        model=options.model,
        prompts=tuple(chosen),
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        dtype=options.dtype,
        train=trains[0],
        rollout=rollouts[0],
        seed=options.seed,
        engine=EngineOptions(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            block_size=options.block_size,
            enable_prefix_caching=options.enable_prefix_caching,
        ),
    )


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive integer")
    return int(text)


def _range(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    if not colon or _positive(low) > _positive(high):
        raise argparse.ArgumentTypeError(f"{text!r} must be MIN:MAX with MIN <= MAX, for example 16:128")
    return int(low), int(high)
