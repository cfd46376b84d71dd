"""Test a backend on this machine: do its operators keep the contract, whatever the batch, the pieces and the ranks?

Each operator is called at small sizes (there also bit for bit against the reference backend) and at those of a real model. A whole run
leaves a record that strict mode asks for where a backend is not proven by the project's own tests; --kit packs that record and
everything else that is worth sending back from a new device into one file.

Exit status: 0 every check held, 1 one did not, 2 bad input, 3 the backend could not be loaded.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from mindspeed_tpi import envs
from mindspeed_tpi.cli import doctor
from mindspeed_tpi.errors import InputError
from mindspeed_tpi.ops import backends
from mindspeed_tpi.page import text_table
from mindspeed_tpi.profiles import Profile
from mindspeed_tpi.verify import kit
from mindspeed_tpi.verify.operators import PROBES
from mindspeed_tpi.verify.probe import DEFAULT, Sizes
from mindspeed_tpi.verify.run import save, verify

FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--backend", metavar="NAME", help="which (default: the one that MINDSPEED_TPI_BACKEND chooses)")
    add("--op", action="append", metavar="NAME", help="only this operator; may be given again; leaves no record")
    add(
        "--model",
        type=Path,
        metavar="HF_DIR",
        help="check at this model's sizes (default: Qwen3-8B's, experts of Qwen3-30B-A3B)",
    )
    add("--json", action="store_true", help="print the record as JSON")
    add(
        "--kit",
        type=Path,
        metavar="FILE.tar.gz",
        help="pack the record, the diagnosis and raw answers into one file to send back",
    )


def run(options: argparse.Namespace) -> int:
    if options.kit and (options.op or not options.kit.absolute().parent.is_dir()):
        why = "--kit packs a whole run: drop --op" if options.op else f"cannot write {options.kit}: no such directory"
        raise InputError(why)
    name = options.backend or envs.BACKEND.get()
    if name == "auto":
        name = "cpu"
    if name not in backends.available():
        raise InputError(f"no backend {name!r}; registered: {', '.join(sorted(backends.available()))}")
    backend = backends.load(name)
    sizes = Sizes.of(Profile.load(options.model)) if options.model else DEFAULT
    operators = options.op or list(PROBES)

    def said(operator: str, entry: dict[str, Any]) -> None:
        done = len(rows)
        rows.append(_row(operator, entry))
        print(f"{done}/{len(operators)} {'  '.join(filter(None, rows[-1]))}", file=sys.stderr, flush=True)

    rows = [["operator", "state", "cases", "mismatches", "worst error / bound", "s"]]
    document = verify(backend, sizes, operators, said)
    if options.json:
        print(json.dumps(document, indent=1))
    else:
        print(text_table(rows))
    for operator, entry in document["operators"].items():
        if entry["state"] == "failed":
            for failure in entry["failures"]:
                print(f"{operator}: {failure}", file=sys.stderr)
    entries = document["operators"].values()
    failed = sum(e["state"] == "failed" for e in entries)
    print(
        f"{name}: {len(entries) - failed} of {len(entries)} operators held or are not there, {failed} failed, "
        f"{sum(c['cases'] for e in entries for c in e['checks'].values())} cases in {document['seconds']} s",
        file=sys.stderr,
    )
    if not options.op:
        print(f"record: {save(document)}", file=sys.stderr)
    if options.kit:
        kit.write(options.kit, document, doctor.examine(), backend)
        print(f"to send back: {options.kit}", file=sys.stderr)
    return FAILED if failed else 0


def _row(operator: str, entry: dict[str, Any]) -> list[str]:
    checks = entry["checks"].values()
    accuracy = entry["checks"].get("accuracy")
    cases, mismatches = (str(sum(c[k] for c in checks)) for k in ("cases", "mismatches"))
    return [
        operator,
        entry["state"],
        cases,
        mismatches,
        f"{accuracy['worst']:.2g}" if accuracy else "",
        f"{entry['seconds']}",
    ]
