"""Tables for a terminal, and self-contained HTML pages."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_tpi import versions
from mindspeed_tpi.errors import InputError

_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: .2rem } h2 { font-size: 1.1rem; margin: 1.8rem 0 .4rem }
table { border-collapse: collapse } th, td { padding: .25rem .9rem .25rem 0; text-align: left; border-bottom: 1px solid #ddd }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
code, pre { font: 13px/1.4 ui-monospace, monospace; overflow-wrap: anywhere } pre { white-space: pre-wrap; background: #f5f5f5; padding: .6rem }
img { width: 100%; height: auto } .exact { color: #18794e } .inexact { color: #b42318 }
"""


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


def number(value: float) -> str:
    """Two decimals in scientific form; exact zero is `0`."""
    return "0" if value == 0 else "NaN" if math.isnan(value) else f"{value:.2e}"


def require_matplotlib() -> None:
    """Refuse early, before engines run for nothing.

    Raises:
        InputError: matplotlib is not installed.
    """
    if versions.installed("matplotlib") is None:
        raise InputError("a report needs matplotlib; run: pip install 'mindspeed-tpi[report]'")


def png(figure: Any) -> bytes:
    """A matplotlib figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def document(title: str, state: str, said: str, note: str, sections: Sequence[tuple[str, str]]) -> str:
    """One HTML document that needs no other file.

    Args:
        state: `exact` or `inexact`, the colour of `said`.
        said: the verdict.
        sections: (heading, HTML).
    """
    body = "\n".join(f"<h2>{html.escape(heading)}</h2>\n{content}" for heading, content in sections)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_CSS}</style></head><body>\n<h1>{html.escape(title)}</h1>\n"
        f'<p class="{state}"><strong>{html.escape(said)}</strong></p>\n'
        f"<p>{html.escape(note)}</p>\n"
        f"{body}\n</body></html>\n"
    )


def image(data: bytes, alt: str) -> str:
    """A PNG inside the document."""
    return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'


def flat(value: Any) -> str:
    """Nested mappings and lists in one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {flat(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return " ".join(flat(v) for v in value)
    return str(value)


def html_table(table: Sequence[Sequence[str]]) -> str:
    """A table whose first row is its header and whose columns after the first hold numbers."""

    def row(cells: Sequence[str], tag: str) -> str:
        classes = ["", *[' class="number"'] * (len(cells) - 1)]
        return (
            "<tr>"
            + "".join(f"<{tag}{c}>{html.escape(cell)}</{tag}>" for cell, c in zip(cells, classes, strict=True))
            + "</tr>"
        )

    return "<table>" + row(table[0], "th") + "".join(row(cells, "td") for cells in table[1:]) + "</table>"


def html_pairs(pairs: Mapping[str, Any]) -> str:
    """A table of names and values."""
    return (
        "<table>"
        + "".join(
            f"<tr><td>{html.escape(str(k))}</td><td><code>{html.escape(flat(v))}</code></td></tr>"
            for k, v in pairs.items()
        )
        + "</table>"
    )
