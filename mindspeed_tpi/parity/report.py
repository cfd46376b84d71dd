"""What a parity run found, as a plain table, a picture and one self-contained HTML file."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_tpi import __version__, versions
from mindspeed_tpi.errors import InputError
from mindspeed_tpi.parity.driver import Matrix, NoRun, Result, Run

_COLOURS = {"stock": "#d1495b", "parity": "#1f5fa8"}
_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: .2rem } h2 { font-size: 1.1rem; margin: 1.8rem 0 .4rem }
table { border-collapse: collapse } th, td { padding: .25rem .9rem .25rem 0; text-align: left; border-bottom: 1px solid #ddd }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
code, pre { font: 13px/1.4 ui-monospace, monospace; overflow-wrap: anywhere } pre { white-space: pre-wrap; background: #f5f5f5; padding: .6rem }
img { width: 100%; height: auto } .exact { color: #18794e } .inexact { color: #b42318 }
"""


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
        "mean |logdiff|": [_number(r.comparison.mean_abs) for r in found.values()],
        "max |logdiff|": [_number(r.comparison.max_abs) for r in found.values()],
        "rollout": [_seconds(r.rollout.meta.get("seconds"), "generate") for r in found.values()],
        "recompute": [_seconds(r.train_meta.get("seconds"), "recompute") for r in found.values()],
        "both, with loading": [f"{sum(r.wall_seconds.values()):.1f} s" for r in found.values()],
    }
    return [["", *found], *([name, *values] for name, values in cells.items())]


def text_table(table: Sequence[Sequence[str]]) -> str:
    """A table for a terminal: the first column left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = (
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in table
    )
    return "\n".join(line.rstrip() for line in lines)


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


def require_matplotlib() -> None:
    """Refuse early, before engines run for nothing.

    Raises:
        InputError: matplotlib is not installed.
    """
    if versions.installed("matplotlib") is None:
        raise InputError("a report needs matplotlib; run: pip install 'mindspeed-tpi[report]'")


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
        label = f"{name}: {c.nonzero} of {c.tokens} tokens differ, mean {_number(c.mean_abs)}, max {_number(c.max_abs)}"
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
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def page(result: Result, command: str) -> str:
    """One HTML document that needs no other file.

    Args:
        command: the command line, as text.
    """
    parity = result.parity
    meta = parity.rollout.meta
    image = base64.b64encode(picture(result)).decode()
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
        "backend": _flat(meta.get("backend")),
    }
    installed = {"mindspeed-tpi": __version__, **meta.get("versions", {}), **parity.train_meta.get("versions", {})}
    sections = [
        ("Side by side", _html_table(rows(result))),
        ("Per token", f'<img alt="logdiff of every token, and its histogram" src="data:image/png;base64,{image}">'),
        ("What the engine did", _html_table(counters_table(result))),
        ("Layouts", _html_table(sides)),
        ("Settings", _html_pairs(setting)),
        (
            "Numerics contract",
            f"<p>fingerprint <code>{contract['fingerprint']}</code></p>" + _html_pairs(contract["constants"]),
        ),
        ("Versions", _html_pairs(installed)),
        ("Command", f"<pre>{html.escape(command)}</pre>"),
    ]
    note = "logdiff = training logprob − rollout logprob, per sampled token, in float32; equality is judged on bits."
    return _document(state, verdict(result), note, sections)


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
        ("Tokens that differ", _html_table(grid(matrix)) + (f"<ol>{why}</ol>" if why else "")),
        ("Settings", _html_pairs(setting)),
        ("Numerics contract", fingerprint + _html_pairs(contract["constants"])),
        ("Command", f"<pre>{html.escape(command)}</pre>"),
    ]
    note = "Rows: layouts of the trainer; columns: layouts of the rollout engine; every cell counts tokens whose logprobs differ."
    return _document("inexact" if matrix.status else "exact", matrix_verdict(matrix), note, sections)


def _document(state: str, said: str, note: str, sections: Sequence[tuple[str, str]]) -> str:
    body = "\n".join(f"<h2>{html.escape(title)}</h2>\n{content}" for title, content in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Training–inference parity</title>'
        f"<style>{_CSS}</style></head><body>\n<h1>Training–inference parity</h1>\n"
        f'<p class="{state}"><strong>{html.escape(said)}</strong></p>\n'
        f"<p>{html.escape(note)}</p>\n"
        f"{body}\n</body></html>\n"
    )


def _number(value: float) -> str:
    return "0" if value == 0 else "NaN" if math.isnan(value) else f"{value:.2e}"


def _seconds(seconds: Any, name: str) -> str:
    value = seconds.get(name) if isinstance(seconds, Mapping) else seconds
    return "" if value is None else f"{value:.1f} s"


def _flat(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_flat(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return " ".join(_flat(v) for v in value)
    return str(value)


def _html_table(table: Sequence[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        classes = ["", *[' class="number"'] * (len(cells) - 1)]
        return (
            "<tr>"
            + "".join(f"<{tag}{c}>{html.escape(cell)}</{tag}>" for cell, c in zip(cells, classes, strict=True))
            + "</tr>"
        )

    return "<table>" + row(table[0], "th") + "".join(row(cells, "td") for cells in table[1:]) + "</table>"


def _html_pairs(pairs: Mapping[str, Any]) -> str:
    return (
        "<table>"
        + "".join(
            f"<tr><td>{html.escape(str(k))}</td><td><code>{html.escape(_flat(v))}</code></td></tr>"
            for k, v in pairs.items()
        )
        + "</table>"
    )
