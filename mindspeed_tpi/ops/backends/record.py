"""The record that `mindspeed-tpi verify` leaves, and that strict mode asks for where a backend's bits are not proven by our tests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from mindspeed_tpi import envs
from mindspeed_tpi.contract import NumericsContract
from mindspeed_tpi.errors import BackendError
from mindspeed_tpi.ops.table import OPERATORS

FORMAT = 1
PROVEN = ("cpu", "reference", "ascendc-twin")
"""Backends that the project's own tests hold to the reference, bit for bit, on the machines that they run on."""


def path_of(backend: str) -> Path:
    """Where the record of a backend lies."""
    return Path(envs.VERIFIED.get()).expanduser() / f"{backend}.json"


def build_of(module: ModuleType) -> str:
    """SHA-256 of what a backend runs: its module and its native library, if it has one."""
    digest = hashlib.sha256(Path(str(module.__file__)).read_bytes())
    library = module.describe().get("library")
    if library:
        digest.update(Path(library).read_bytes())
    return digest.hexdigest()


def without_model(contract: Mapping[str, Any]) -> dict[str, Any]:
    """A contract's constants without the rotary table of one model: kernels take the table as an operand."""
    return {**contract, "rope_table": ""}


def require(name: str, module: ModuleType, contract: NumericsContract) -> None:
    """Refuse a backend of which no test says that it keeps the contract here.

    Raises:
        BackendError: no record, or one of another build or contract, or one that names failures or does not cover an operator of the backend.
    """
    if name in PROVEN:
        return
    path, remedy = path_of(name), f"run `mindspeed-tpi verify --backend {name}` on this machine"
    problem = _problem(path, build_of(module), contract, [o for o in OPERATORS if hasattr(module, o)])
    if problem:
        raise BackendError(
            f"strict mode takes the {name} backend only with a record of its self-test: {path} {problem}; {remedy}"
        )


def _problem(path: Path, build: str, contract: NumericsContract, operators: list[str]) -> str | None:
    if not path.is_file():
        return "does not exist"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        found, verified = record["contract"], record["operators"]
        states = {name: entry["state"] for name, entry in verified.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"is unreadable ({type(error).__name__}: {error})"
    if record.get("format") != FORMAT:
        return f"has format {record.get('format')!r}, this package reads {FORMAT}"
    if record.get("build") != build:
        return "is of another build of the backend"
    ours = without_model(json.loads(contract.to_json()))
    if differing := [k for k in ours if found.get(k) != ours[k]]:
        return f"is of another contract ({', '.join(f'{k}={found.get(k)!r}, now {ours[k]!r}' for k in differing)})"
    if missing := [name for name in operators if name not in states]:
        return f"does not cover {', '.join(missing)}"
    if failed := [name for name in operators if states[name] != "held"]:
        return f"says that these failed: {', '.join(failed)}"
    return None
