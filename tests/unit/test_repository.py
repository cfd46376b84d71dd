"""Style, types, layers and generated pages: what a reviewer should not have to look for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


@pytest.mark.parametrize(
    "command",
    [
        ("ruff", "check", "."),
        ("ruff", "format", "--check", "."),
        ("mypy",),
        ("lint-imports",),
        ("python", "docs/gen_tables.py", "--check"),
    ],
    ids=" ".join,
)
def test_clean(command: tuple[str, ...]) -> None:
    done = subprocess.run([str(BIN / command[0]), *command[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


def test_the_table_of_proofs_names_tests_that_exist() -> None:
    found, file = [], ""
    for name in re.findall(r"`((?:[\w/]+\.py)?::\w+)`", (ROOT / "tests" / "README.md").read_text(encoding="utf-8")):
        path, _, test = name.partition("::")
        file = path or file
        found.append(f"def {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"))
    assert len(found) > 40 and all(found)
