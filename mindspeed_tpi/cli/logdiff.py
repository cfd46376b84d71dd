"""Compare two columns of log-probabilities: how far they are apart, and what the shape of the difference says of its cause.

TRAIN and ROLLOUT are safetensors, JSON lines, parquet or torch.save files; the names that RL frameworks give their columns are known.
Both columns may be in one file. Nothing but log-probabilities is needed; token ids, positions, weight versions, masks and
prefix-cache counts are used where the files have them.

Exit status: 0 no difference, 1 the shape names a cause, 2 bad input, 4 a difference without a cause.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_tpi import page
from mindspeed_tpi.diagnose import pair as pairs
from mindspeed_tpi.diagnose import shape
from mindspeed_tpi.diagnose.columns import read
from mindspeed_tpi.diagnose.pair import Pair
from mindspeed_tpi.diagnose.shape import Finding
from mindspeed_tpi.errors import InputError

CAUSE, NO_CAUSE = 1, 4
_NEXT = "dump the outputs of the layers of both engines for a few of the worst tokens: log-probabilities alone cannot say which operator differs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("train", type=Path, metavar="TRAIN", help="the trainer's log-probabilities")
    add("rollout", type=Path, metavar="ROLLOUT", nargs="?", help="the engine's; default: the same file")
    add("--train-column", metavar="NAME", help="the trainer's column (default: a known name)")
    add("--rollout-column", metavar="NAME", help="the engine's column (default: a known name)")
    add("--json", type=Path, metavar="OUT", help="write the result as JSON")
    add("--report", type=Path, metavar="OUT.html", help="write a self-contained HTML report with a picture")


def run(options: argparse.Namespace) -> int:
    for path in filter(None, (options.json, options.report)):
        if not path.absolute().parent.is_dir():
            raise InputError(f"cannot write {path}: its directory does not exist; create it first")
    if options.report:
        page.require_matplotlib()
    train = read(options.train, "train", options.train_column)
    rollout = read(options.rollout or options.train, "rollout", options.rollout_column)
    if options.rollout is None and train.name == rollout.name:
        raise InputError(
            f"{train.name} would be compared with itself; name the columns with --train-column and --rollout-column"
        )
    pair = pairs.align(train, rollout)
    found, numbers = shape.findings(pair), pairs.statistics(pair)
    said = _verdict(pair, found, numbers)
    print(said)
    for finding in found:
        print(f"  {finding.shape}: {finding.evidence}\n    → {finding.cause}")
    tables = _tables(pair, numbers)
    for heading, table in tables.items():
        print(f"\n{heading}\n{page.text_table(table)}")
    if options.json:
        document = {
            "verdict": said,
            "train": train.name,
            "rollout": rollout.name,
            "findings": [vars(f) for f in found],
            "statistics": numbers,
            **_groups(pair),
        }
        options.json.write_text(json.dumps(_finite(document), indent=2), encoding="utf-8")
    if options.report:
        options.report.write_text(_page(pair, found, said, tables), encoding="utf-8")
    return 0 if not numbers["nonzero"] and not numbers["apart"] else CAUSE if found else NO_CAUSE


def _verdict(pair: Pair, found: list[Finding], numbers: dict[str, Any]) -> str:
    n, total = numbers["nonzero"], numbers["tokens"]
    apart = f"; {numbers['apart']} tokens have a number on one side only" if numbers["apart"] else ""
    if not n:
        return f"no difference on {total} tokens{apart}"
    if found:
        return f"cause: {found[0].shape} ({n} of {total} tokens differ): {found[0].cause}{apart}"
    return f"no cause from the shape ({n} of {total} tokens differ): {shape.noise(pair)}{apart}. Next: {_NEXT}"


def _tables(pair: Pair, numbers: dict[str, Any]) -> dict[str, list[list[str]]]:
    """Heading → cells, header first."""
    rows = [["", "value"]]
    for name, value in numbers.items():
        if name == "quantiles":
            rows += [[f"|logdiff| {float(q):.1%} quantile", page.number(v)] for q, v in value.items()]
        elif isinstance(value, float):
            rows.append([name, f"{value:.6g}"])
        else:
            rows.append([name, str(value)])
    if not numbers["nonzero"]:
        return {"Difference": rows}
    return {"Difference": rows} | {
        f"By {heading}": [[heading, "tokens", "differ", "mean", "max"], *map(_line, groups)]
        for heading, groups in _groups(pair).items()
    }


def _groups(pair: Pair) -> dict[str, list[dict[str, Any]]]:
    keys = {"sequence": pair.sequence, "token id": pair.tokens, "weight version": pair.versions}
    found = {name: pairs.by_key(pair, key) for name, key in keys.items() if key is not None and len(np.unique(key)) > 1}
    return {"position": pairs.by_place(pair), **found}


def _line(group: dict[str, Any]) -> list[str]:
    name = str(group["key"]) if "key" in group else f"{group['from']}–{group['to']}"
    return [
        name,
        str(group["tokens"]),
        str(group["nonzero"]),
        page.number(group["mean_abs"]),
        page.number(group["max_abs"]),
    ]


def _page(pair: Pair, found: list[Finding], said: str, tables: dict[str, list[list[str]]]) -> str:
    causes = page.html_table([["shape", "evidence", "cause"], *([f.shape, f.evidence, f.cause] for f in found)])
    sections = [
        *([("What the shape says", causes)] if found else []),
        ("Pictures", page.image(_picture(pair), "logdiff by token, by position, and training against rollout")),
        *((heading, page.html_table(table)) for heading, table in tables.items()),
        ("Command", f"<pre>{shlex.join(['mindspeed-tpi', *sys.argv[1:]])}</pre>"),
    ]
    note = "logdiff = training − rollout log-probability of a token, natural logarithm."
    state = "inexact" if (pair.logdiff != 0).any() else "exact"
    return page.document("Training against rollout log-probabilities", state, said, note, sections)


def _picture(pair: Pair) -> bytes:
    """PNG: logdiff by token, training against rollout, |logdiff| by position, and its distribution."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), dpi=130, layout="constrained")
    (tokens, scatter), (place, spread) = figure.subplots(2, 2)
    d = pair.logdiff
    thin = np.unique(np.linspace(0, len(d) - 1, 20_000).astype(int))  # a picture shows no more
    dots = {"s": 5, "linewidths": 0, "alpha": 0.5, "color": "#d1495b"}
    tokens.scatter(thin, d[thin], **dots)
    tokens.set(xlabel="token", ylabel="training − rollout")
    scatter.scatter(pair.rollout[thin], pair.train[thin], **dots)
    scatter.axline((0, 0), slope=1, color="#888", linewidth=0.8)
    scatter.set(xlabel="rollout logprob", ylabel="training logprob")
    groups = pairs.by_place(pair, 32)
    middle = [(g["from"] + g["to"]) / 2 for g in groups]
    place.plot(middle, [g["mean_abs"] for g in groups], color="#1f5fa8", marker="o", markersize=3, label="mean")
    place.plot(middle, [g["max_abs"] for g in groups], color="#d1495b", marker="o", markersize=3, label="max")
    place.set(xlabel="position", ylabel="|logdiff|")
    place.legend(frameon=False)
    sizes = np.sort(np.abs(d[np.isfinite(d)]))
    spread.plot(sizes, np.arange(1, len(sizes) + 1) / len(sizes), color="#1f5fa8")
    spread.set(xlabel="|logdiff|", ylabel="part of the tokens at or below")
    if sizes[-1] > 0:
        spread.set_xscale("symlog", linthresh=max(float(sizes[sizes > 0][0]), 1e-9))
    for axes in (tokens, scatter, place, spread):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e6e6e6", linewidth=0.6)
        axes.set_axisbelow(True)
    return page.png(figure)


def _finite(value: Any) -> Any:
    """NaN and infinity, which JSON lacks, become null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
