"""What an engine runs, as its workers report it: the document that makes token ids and numbers a rollout record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_tpi.errors import InputError, ParityError
from mindspeed_tpi.patches.vllm.platforms.cpu import KEY

STOCK: dict[str, Any] = {
    "mode": "0",
    "model": None,
    "dtype": None,
    "layout": "",
    "logprobs_mode": None,
    "backend": None,
    "contract": None,
    "fingerprint": None,
    "rope": None,
    "coverage": None,
    "versions": {},
}
"""The identity of an engine that runs vLLM's own numerics."""
_OF_ONE_WORKER = ("rank", "pid", "backend_details", "plugin")
REPORT = "tpi_report"
"""The workers' method that reports: `llm.collective_rpc(REPORT)`."""


def of_engine(engine: Any) -> dict[str, Any]:
    """The identity of a running engine.

    Args:
        engine: a `vllm.LLM`, or what `collective_rpc("tpi_report")` of an LLM, AsyncLLM or server returned: one document per
            worker, as Python objects or as parsed JSON.

    Raises:
        InputError: neither of these.
        ParityError: the workers differ.
    """
    if engine is None:
        return dict(STOCK)
    if isinstance(engine, Mapping):
        return of_reports([engine])
    if isinstance(engine, Sequence) and not isinstance(engine, str):
        return of_reports(engine)
    config = getattr(getattr(engine, "llm_engine", None), "vllm_config", None)
    if config is None:
        raise InputError(
            f"a {type(engine).__name__} is no vllm.LLM; of an AsyncLLM or a server, pass what `await "
            f"engine.collective_rpc({REPORT!r})` returns"
        )
    if KEY not in config.additional_config:
        model = config.model_config
        return STOCK | {"model": model.model, "logprobs_mode": model.logprobs_mode, "dtype": _dtype(model.dtype)}
    return of_reports(engine.collective_rpc(REPORT))


def of_reports(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One identity from the reports of all workers; `coverage` is what ran outside the contract in any of them.

    Raises:
        InputError: no reports, or one that lacks a field.
        ParityError: workers that differ; names the field.
    """
    if not reports:
        raise InputError("an engine without workers has no identity; pass what collective_rpc('tpi_report') returned")
    for report in reports:
        if lacking := sorted(STOCK.keys() - report.keys()):
            raise InputError(
                f"an engine's report lacks {', '.join(lacking)}; take it from collective_rpc({REPORT!r}) of an engine "
                "started with MINDSPEED_TPI=strict and this version of mindspeed_tpi"
            )
    first = reports[0]
    for report in reports[1:]:
        differing = [name for name in STOCK if name != "coverage" and report[name] != first[name]]
        if differing:
            name = differing[0]
            raise ParityError(
                f"worker rank {report.get('rank')} reports {name} {report[name]!r}, rank {first.get('rank')} {first[name]!r}; "
                "start all workers with the same environment"
            )
    identity = {name: first[name] for name in STOCK}
    identity["coverage"] = sorted({outside for report in reports for outside in report["coverage"]})
    identity["workers"] = [{name: r[name] for name in _OF_ONE_WORKER if name in r} for r in reports]
    return identity


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
