"""Say what is installed, what the operators run on, and the state of every patch.

Each installed upstream is imported with the patches applied, so that a patch is `applied`, `not needed` or `refused`;
it is `pending` only when its upstream is not installed. Exit status: 0 all well, 1 a patch is refused or no backend serves.

With --audit, show instead what ran in the processes of mode `audit` that left their records in a directory; exit status 0.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import mindspeed_tpi
from mindspeed_tpi import audit, contract, envs, patches, versions
from mindspeed_tpi.errors import BackendError
from mindspeed_tpi.ops import backends
from mindspeed_tpi.page import text_table
from mindspeed_tpi.patching import Registry, Status
from mindspeed_tpi.platform import cpu


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--audit",
        type=Path,
        nargs="?",
        const=Path(envs.AUDIT.get()),
        metavar="DIR",
        help="show the records of MINDSPEED_TPI=audit (default %(const)s)",
    )


def run(options: argparse.Namespace) -> int:
    if options.audit is not None:
        calls = audit.merged(options.audit)
        print(json.dumps(calls, indent=2) if options.json else _calls_text(calls))
        return 0
    found = examine()
    print(json.dumps(found, indent=2) if options.json else _text(found))
    return 0 if found["healthy"] else 1


def examine() -> dict[str, Any]:
    """The whole diagnosis as a JSON-able document."""
    name = envs.BACKEND.get()
    try:
        backend = backends.load("cpu" if name == "auto" else name).describe()
    except BackendError as error:
        backend = {"name": None, "refused": str(error)}
    states = patch_states()
    return {
        "healthy": backend["name"] is not None and not any(s["state"] == "refused" for s in states),
        "mindspeed_tpi": mindspeed_tpi.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": {name: versions.installed(name) for name in versions.UPSTREAMS},
        "flags": {flag.name: flag.get() for flag in envs.FLAGS},
        "backend": backend,
        "contract": {"fingerprint": contract.current().fingerprint, **json.loads(contract.current().to_json())},
        "patches": states,
    }


def patch_states() -> list[dict[str, str]]:
    """Apply every declared patch while importing what it patches, say what came of it, and put the originals back."""
    mindspeed_tpi.disable()
    declared = {name: patches.declared((name,)) for name in patches.UPSTREAMS} | {"platform": cpu.PATCHES}
    registries = {name: Registry(group) for name, group in declared.items()}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    failures: dict[str, str] = {}
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():  # upstreams print at import
        warnings.simplefilter("ignore")
        for registry in registries.values():
            registry.apply()
        for module in sorted({patch.module for group in declared.values() for patch in group}):
            failure = _import(module)
            if failure:
                failures[module] = failure
    states = [
        {"group": name, "target": s.patch.target, "state": s.state, "why": s.why or s.patch.reason}
        for name, registry in registries.items()
        for s in (_explained(status, failures) for status in registry.status())
    ]
    for registry in reversed(registries.values()):
        registry.revert()
    return states


def _import(module: str) -> str | None:
    """Why a module of an installed upstream cannot be imported; None when it can, or its upstream is not installed."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return None
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"importing {module} failed: {type(error).__name__}: {error}"
    return None


def _explained(status: Status, failures: dict[str, str]) -> Status:
    if status.state != "pending":
        return status
    if status.patch.module in failures:
        return Status(status.patch, "refused", failures[status.patch.module])
    return Status(status.patch, "pending", f"{status.patch.module.partition('.')[0]} is not installed")


def _text(found: dict[str, Any]) -> str:
    states = found["patches"]
    lines = [
        f"mindspeed-tpi {found['mindspeed_tpi']}, Python {found['python']}, {found['machine']}",
        "versions   " + ", ".join(f"{name} {version}" for name, version in found["versions"].items() if version),
        "flags      " + ", ".join(f"{name}={value}" for name, value in found["flags"].items() if value),
        "backend    " + ", ".join(f"{name} {_words(value)}" for name, value in found["backend"].items()),
        f"contract   {found['contract']['fingerprint']}",
        "",
        text_table([["patch", "state"], *([s["target"], s["state"]] for s in states)]),
        "",
        ", ".join(f"{n} {state}" for state, n in Counter(s["state"] for s in states).items()),
        *(f"{s['state']}: {s['target']}: {s['why']}" for s in states if s["state"] in ("refused", "pending")),
    ]
    return "\n".join(lines)


def _calls_text(calls: list[dict[str, Any]]) -> str:
    """The calls grouped by kind, what lies outside the contract first."""
    lines = []
    for kind, meaning in audit.KINDS.items():
        rows = [[f"  {c['operator']}  {c['caller']}", str(c["count"])] for c in calls if c["kind"] == kind]
        total = sum(c["count"] for c in calls if c["kind"] == kind)
        lines += [f"{meaning}: {total} calls", *([text_table(rows)] if rows else [])]
    return "\n".join(lines)


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
