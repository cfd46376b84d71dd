"""Writes the pages of docs/ that are tables of what the code declares: `python docs/gen_tables.py [--check]`.

With `--check` nothing is written; exit status 1 names the pages that are out of date.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import ascend_roofline

from mindspeed_tpi import envs, patches
from mindspeed_tpi.ops import backends
from mindspeed_tpi.ops.table import OPERATORS
from mindspeed_tpi.patches.mindspeed.features_manager import features_manager
from mindspeed_tpi.patching import Patch
from mindspeed_tpi.platform import cpu

DOCS = Path(__file__).resolve().parent
NOTE = "<!-- Written by docs/gen_tables.py; do not edit. -->"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def env_flags() -> str:
    rows = [
        [
            f"`{flag.name}`",
            f"`{flag.default}`" if flag.default else "",
            ", ".join(f"`{c}`" for c in flag.choices),
            flag.doc,
        ]
        for flag in envs.FLAGS
    ]
    return "# Environment flags\n\n" + table(["flag", "default", "values", "meaning"], rows)


def patch_table() -> str:
    def rows(group: Iterable[Patch]) -> list[list[str]]:
        return [[f"`{p.target}`", p.kind, f"`{p.versions}`", p.reason, p.until] for p in group]

    header = ["target", "kind", "versions", "why the bits would differ", "goes when"]
    parts = [f"## {name}\n\n{table(header, rows(patches.declared((name,))))}" for name in patches.UPSTREAMS]
    parts.append(
        "## Platform shim\n\nLets Megatron-core run where there is no accelerator; decides no bits.\n\n"
        + table([*header[:3], "why", header[4]], rows(cpu.PATCHES))
    )
    return (
        "# Patches\n\nEach is declared next to its replacement; `mindspeed-tpi doctor` says which are applied.\n\n"
        + "\n\n".join(parts)
    )


def operators() -> str:
    ours = {name: path for name, path in sorted(backends.available().items()) if path.startswith("mindspeed_tpi.")}
    modules = [importlib.import_module(path) for path in ours.values()]
    rows = [[f"`{op}`", *("yes" if hasattr(module, op) else "" for module in modules)] for op in OPERATORS]
    return (
        "# Operators and backends\n\nWhat each computes, in which order: [op-schemas.md](op-schemas.md).\n\n"
        + table(["operator", *ours], rows)
    )


def filled(page: str, make: Callable[[str], str]) -> str:
    """A hand-written page, each table between `<!-- table: NAME -->` and `<!-- end -->` made anew."""

    def fill(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n\n{make(match[1])}\n\n<!-- end -->"

    text = (DOCS / page).read_text(encoding="utf-8")
    return re.sub(r"<!-- table: (.+?) -->.*?<!-- end -->", fill, text, flags=re.DOTALL)


def family(name: str) -> str:
    rows = [[f"`{row.signature}`", row.meaning] for row in OPERATORS.values() if row.family == name]
    return table(["operator", "meaning"], rows)


def mindspeed_features(_: str) -> str:
    rows = [[f"`{name}`", settled.verdict, settled.why] for name, settled in features_manager.SETTLED.items()]
    return table(["feature", "verdict", "what it touches, or what to do"], rows)


def written(make: Callable[[], str]) -> str:
    return f"{NOTE}\n\n{make()}\n"


PAGES: dict[str, Callable[[], str]] = {
    "env-flags.md": lambda: written(env_flags),
    "patches.md": lambda: written(patch_table),
    "operators.md": lambda: written(operators),
    "op-schemas.md": lambda: filled("op-schemas.md", family),
    "mindspeed.md": lambda: filled("mindspeed.md", mindspeed_features),
    "ascend.md": lambda: filled("ascend.md", lambda name: ascend_roofline.TABLES[name]()),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is out of date")
    check = parser.parse_args().check
    stale = []
    for name, make in PAGES.items():
        path, text = DOCS / name, make()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not check:
                path.write_text(text, encoding="utf-8")
    if check and stale:
        print(f"out of date: {', '.join(stale)}; run python docs/gen_tables.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
