"""What a parity run found, as a plain table, a picture and one self-contained HTML file."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from mindspeed_tpi import __version__
from mindspeed_tpi.page import document, flat, html_pairs, html_table, image, number, png, require_matplotlib
from mindspeed_tpi.parity.result import Matrix, NoRun, Result, Run

_TITLE = "Training–inference parity"
_COLOURS = {"stock": "#d1495b", "parity": "#1f5fa8"}


def runs(result: Result) -> dict[str, Run]:
    """The runs by name, stock first."""
    return ({"stock": result.stock} if result.stock else {}) | {"parity": result.parity}


def verdict(result: Result) -> str:
    """One sentence."""
    c = result.parity.comparison
    if c.exact:
        return f"logdiff is exactly 0 on all {c.tokens} tokens"
    faults = [f"{c.nonzero} of {c.tokens} tokens differ"]
    faults += [f"{c.nan} are NaN"] if c.nan else []
    faults += [f"{c.missing} values are missing or were not asked for"] if c.missing else []
    return "not exact: " + ", ".join(faults)


def rows(result: Result) -> list[list[str]]:
    """Cells of the side-by-side table, header first."""
    found = runs(result)
    cells: dict[str, list[str]] = {
        "tokens": [str(r.comparison.tokens) for r in found.values()],
        "tokens that differ": [str(r.comparison.nonzero) for r in found.values()],
        "mean |logdiff|": [number(r.comparison.mean_abs) for r in found.values()],
        "max |logdiff|": [number(r.comparison.max_abs) for r in found.values()],
        "rollout": [_seconds(r.rollout.meta.get("seconds"), "generate") for r in found.values()],
        "recompute": [_seconds(r.train_meta.get("seconds"), "recompute") for r in found.values()],
        "both, with loading": [f"{sum(r.wall_seconds.values()):.1f} s" for r in found.values()],
    }
    return [["", *found], *([name, *values] for name, values in cells.items())]


def counters_table(result: Result) -> list[list[str]]:
    """Engine counters side by side, header first."""
    found = runs(result)
    names = sorted({name for r in found.values() for name in r.rollout.meta.get("counters", {})})
    return [
        ["engine counter", *found],
        *([n, *(str(r.rollout.meta["counters"].get(n, "")) for r in found.values())] for n in names),
    ]


def grid(matrix: Matrix) -> list[list[str]]:
    """Cells of the matrix, header first: tokens that differ, `0` where parity is exact; `refused` or `failed` with the number
    of its reason among `reasons`."""
    why = reasons(matrix)
    cells = [[_cell(cell, why) for cell in row] for row in matrix.cells]
    return [["train \\ rollout", *matrix.rollouts], *([t, *row] for t, row in zip(matrix.trains, cells, strict=True))]


def reasons(matrix: Matrix) -> list[str]:
    """Why cells were refused or failed, each once: `refused: why`."""
    return list(dict.fromkeys(f"{cell.state}: {cell.why}" for cell in matrix.missing))


def _cell(cell: Run | NoRun, why: list[str]) -> str:
    if isinstance(cell, NoRun):
        return f"{cell.state} [{1 + why.index(f'{cell.state}: {cell.why}')}]"
    c = cell.comparison
    return f"{c.nonzero}" + (f" + {c.missing} missing" if c.missing else "" if c.tokens else "no token")


def matrix_verdict(matrix: Matrix) -> str:
    """One sentence."""
    total = len(matrix.runs) + len(matrix.missing)
    if matrix.status == 0:
        tokens = sum(run.comparison.tokens for run in matrix.runs)
        return f"logdiff is exactly 0 on all {tokens} tokens of {total} combinations"
    faults = {
        "differ": sum(not run.comparison.exact for run in matrix.runs),
        "were refused": sum(cell.state == "refused" for cell in matrix.missing),
        "failed": sum(cell.state == "failed" for cell in matrix.missing),
    }
    return f"not exact: of {total} combinations " + ", ".join(f"{n} {what}" for what, n in faults.items() if n)


def picture(result: Result) -> bytes:
    """PNG of the logdiff of every sampled token (left) and its histogram (right)."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), dpi=150, layout="constrained")
    tokens, histogram = figure.subplots(1, 2, width_ratios=(2, 1))
    largest = 0.0
    for name, run in runs(result).items():
        values = run.comparison.logdiff.double()
        finite = values.isfinite()
        c = run.comparison
        label = f"{name}: {c.nonzero} of {c.tokens} tokens differ, mean {number(c.mean_abs)}, max {number(c.max_abs)}"
        places = finite.nonzero().flatten()
        tokens.scatter(
            places,
            values[finite],
            s=9,
            color=_COLOURS[name],
            alpha=0.55 if name == "stock" else 1,
            linewidths=0,
            label=label,
        )
        largest = max([largest, *values[finite].abs().tolist()])
    reach = 1.08 * largest or 1e-6
    bins = [reach * (2 * i - 61) / 61 for i in range(62)]  # an odd number: zero lies in the middle of one bin
    for name, run in runs(result).items():
        values = run.comparison.logdiff.double()
        histogram.hist(
            values[values.isfinite()].tolist(),
            bins=bins,
            color=_COLOURS[name],
            alpha=0.6 if name == "stock" else 1,
            label=name,
        )
    tokens.set(xlabel="sampled token", ylabel="training − rollout logprob", ylim=(-reach, reach))
    histogram.set(xlabel="training − rollout logprob", ylabel="tokens", yscale="log", xlim=(-reach, reach))
    for axes in (tokens, histogram):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e6e6e6", linewidth=0.6)
        axes.set_axisbelow(True)
    figure.legend(*tokens.get_legend_handles_labels(), loc="outside upper left", frameon=False, markerscale=2)
    return png(figure)


def page(result: Result, command: str) -> str:
    """One HTML document that needs no other file.

    Args:
        command: the command line, as text.
    """
    parity = result.parity
    meta = parity.rollout.meta
    state = "exact" if result.exact else "inexact"
    contract = parity.contract or {"fingerprint": "none", "constants": {}}
    sides = [
        ["", "rollout", "training"],
        ["engine", "vLLM", "Megatron-core"],
        ["layout", parity.request.rollout or "tp=1", parity.request.train or "tp=1"],
        [
            "operator calls",
            str(sum(meta.get("op_calls", {}).values())),
            str(sum(parity.train_meta.get("op_calls", {}).values())),
        ],
    ]
    setting = {
        "model": parity.request.model,
        "dtype": parity.request.dtype,
        "prompts": len(parity.request.prompts),
        "prompt tokens": sum(map(len, parity.request.prompts)),
        "new tokens per prompt": parity.request.max_new_tokens,
        "temperature": parity.request.temperature,
        "backend": flat(meta.get("backend")),
    }
    installed = {"mindspeed-tpi": __version__, **meta.get("versions", {}), **parity.train_meta.get("versions", {})}
    sections = [
        ("Side by side", html_table(rows(result))),
        ("Per token", image(picture(result), "logdiff of every token, and its histogram")),
        ("What the engine did", html_table(counters_table(result))),
        ("Layouts", html_table(sides)),
        ("Settings", html_pairs(setting)),
        (
            "Numerics contract",
            f"<p>fingerprint <code>{contract['fingerprint']}</code></p>" + html_pairs(contract["constants"]),
        ),
        ("Versions", html_pairs(installed)),
        ("Command", f"<pre>{html.escape(command)}</pre>"),
    ]
    note = "logdiff = training logprob − rollout logprob, per sampled token, in float32; equality is judged on bits."
    return document(_TITLE, state, verdict(result), note, sections)


def matrix_page(matrix: Matrix, command: str) -> str:
    """One HTML document of a matrix that needs no other file.

    Args:
        command: the command line, as text.
    """
    request = matrix.cells[0][0].request
    contract = next((run.contract for run in matrix.runs), None) or {"fingerprint": "none", "constants": {}}
    setting = {
        "model": request.model,
        "dtype": request.dtype,
        "prompts": len(request.prompts),
        "new tokens per prompt": request.max_new_tokens,
        "temperature": request.temperature,
    }
    why = "".join(f"<li>{html.escape(reason)}</li>" for reason in reasons(matrix))
    fingerprint = f"<p>fingerprint <code>{contract['fingerprint']}</code></p>"
    sections = [
        ("Tokens that differ", html_table(grid(matrix)) + (f"<ol>{why}</ol>" if why else "")),
        ("Settings", html_pairs(setting)),
        ("Numerics contract", fingerprint + html_pairs(contract["constants"])),
        ("Command", f"<pre>{html.escape(command)}</pre>"),
    ]
    note = "Rows: layouts of the trainer; columns: layouts of the rollout engine; every cell counts tokens whose logprobs differ."
    return document(_TITLE, "inexact" if matrix.status else "exact", matrix_verdict(matrix), note, sections)


def _seconds(seconds: Any, name: str) -> str:
    value = seconds.get(name) if isinstance(seconds, Mapping) else seconds
    return "" if value is None else f"{value:.1f} s"
