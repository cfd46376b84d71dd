"""Runs the checks of a backend's operators and makes the record that strict mode reads."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import mindspeed_tpi
from mindspeed_tpi import contract, versions
from mindspeed_tpi.errors import BackendError, InputError
from mindspeed_tpi.ops.backends import Backend, record
from mindspeed_tpi.verify.operators import PROBES
from mindspeed_tpi.verify.probe import SMALL, Bench, Finding, Sizes

SHOWN = 5  # failures of an operator that the record words


def verify(
    backend: Backend, sizes: Sizes, operators: Sequence[str], said: Callable[[str, dict[str, Any]], None]
) -> dict[str, Any]:
    """The record of a run.

    Args:
        sizes: of the model; a slow backend (reference, ascendc-twin) is checked at small sizes only.
        operators: which.
        said: called with each operator's name and entry as it is done.

    Raises:
        InputError: an operator that does not exist.
    """
    if unknown := [name for name in operators if name not in PROBES]:
        raise InputError(f"no operator {', '.join(unknown)}; there are {', '.join(PROBES)}")
    started = time.monotonic()
    small = [(replace(SMALL, dtype=dtype), True) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    slow = getattr(backend.module, "SLOW", False)
    at = small if slow else [*small, (sizes, False)]
    entries = {}
    for name in operators:
        entries[name] = _entry(backend.module, name, at)
        said(name, entries[name])
    return {
        "format": record.FORMAT,
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - started, 1),
        "backend": backend.describe(),
        "build": record.build_of(backend.module),
        "contract": record.without_model(json.loads(contract.current().to_json())),
        "device": _device(backend.device),
        "machine": platform.machine(),
        "versions": {
            "mindspeed_tpi": mindspeed_tpi.__version__,
            **{n: versions.installed(n) for n in versions.UPSTREAMS},
        },
        "sizes": [{**asdict(s), "dtype": str(s.dtype)} for s, _ in at],
        "operators": entries,
    }


def save(document: dict[str, Any]) -> Path:
    """Write a record where strict mode looks for it."""
    path = record.path_of(document["backend"]["name"])
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".new")
    partial.write_text(json.dumps(document, indent=1), encoding="utf-8")
    partial.replace(path)
    return path


def _device(kind: str) -> str:
    if kind == "cpu":
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), platform.machine())
    name: str = getattr(torch, kind).get_device_name(0)
    return name


def _entry(module: ModuleType, name: str, at: Sequence[tuple[Sizes, bool]]) -> dict[str, Any]:
    """State, counts by check and the first failures of one operator."""
    if not hasattr(module, name):
        return {"state": "missing", "seconds": 0, "checks": {}, "failures": ["the backend does not have it"]}
    started = time.monotonic()
    findings: list[Finding] = []
    failures: list[str] = []
    for sizes, oracle in at:
        bench = Bench(module, sizes, oracle)
        where = f"{str(sizes.dtype).removeprefix('torch.')}, hidden {sizes.hidden}"
        try:
            for finding in PROBES[name](bench):
                findings.append(finding)
                failures += _failure(finding, where)
        except (BackendError, RuntimeError) as error:
            failures.append(f"{where}: refused: {' '.join(str(error).split())[:500]}")
        for finding in bench.against_reference:
            if finding.operator == name:
                findings.append(finding)
                # An Ascend core's order inside a product is not documented: there the reference is a declaration, and this a measurement.
                failures += _failure(finding, where) if bench.device == "cpu" else []
    checks: dict[str, dict[str, Any]] = {}
    for finding in findings:
        count = checks.setdefault(finding.check, {"cases": 0, "mismatches": 0, "worst": 0.0})
        count["cases"] += 1
        count["mismatches"] += not finding.held
        count["worst"] = max(count["worst"], finding.worst)
    return {
        "state": "failed" if failures else "held",
        "seconds": round(time.monotonic() - started, 1),
        "checks": checks,
        "failures": failures[:SHOWN],
    }


def _failure(finding: Finding, where: str) -> list[str]:
    if finding.held:
        return []
    how = (
        f"error {finding.worst:.3g} of its bound"
        if finding.check == "accuracy"
        else f"{finding.worst:.0f} elements differ"
    )
    return [f"{finding.check} ({', '.join(filter(None, (finding.what, where)))}): {how}"]
