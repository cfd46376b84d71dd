"""The self-test of a backend: it holds for ours, sees planted faults, and leaves the record that strict mode asks for."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load

from mindspeed_tpi import cli
from mindspeed_tpi.errors import BackendError
from mindspeed_tpi.ops import backends
from mindspeed_tpi.ops.backends import Backend, cpu
from mindspeed_tpi.ops.table import OPERATORS
from mindspeed_tpi.verify import kit
from mindspeed_tpi.verify import run as runner
from mindspeed_tpi.verify.operators import PROBES
from mindspeed_tpi.verify.probe import SMALL, Bench


def foreign(name: str, **changed: Callable[..., Any]) -> Backend:
    """The cpu backend under another name, with some operators replaced."""
    module = ModuleType(name)
    module.__dict__.update({op: getattr(cpu, op) for op in OPERATORS} | changed)
    module.__dict__.update(DEVICE="cpu", CHECKS_OPERANDS=True, SLOW=True, __file__=__file__)
    module.__dict__.update(check=lambda contract: None, describe=lambda: {"library": str(cpu.LIBRARY_PATH)})
    return Backend(name, module)


def entries(backend: Backend, *operators: str) -> dict[str, Any]:
    found: dict[str, Any] = runner.verify(backend, SMALL, operators, lambda *_: None)["operators"]
    return found


def test_every_operator_is_checked() -> None:
    assert list(PROBES) == list(OPERATORS)


@pytest.mark.parametrize(
    "operator", [o for o in OPERATORS if not o.startswith(("linear", "grouped", "attention", "paged"))]
)
def test_cpu_holds(operator: str) -> None:
    """At small sizes, in one dtype, also against the reference."""
    bench = Bench(cpu, replace(SMALL, tokens=8, hidden=80), oracle=True)
    found = [*PROBES[operator](bench), *bench.against_reference]
    assert [f for f in found if not f.held] == [] and any(f.check == "reference" for f in found)


def test_cpu_holds_in_products_and_attention() -> None:
    """Without the reference, which takes long: tests/ops compares with it."""
    for operator in (
        "linear",
        "linear_dx",
        "linear_dw",
        "grouped_linear",
        "grouped_linear_dx",
        "attention",
        "attention_backward",
        "paged_attention",
    ):
        assert [f for f in PROBES[operator](Bench(cpu, SMALL)) if not f.held] == []


def test_a_backend_that_breaks_the_contract_is_seen() -> None:
    def split_by_rows(x: Any, weight: Any, bias: Any, leaf: int, leaves: int, out: Any) -> Any:
        half = leaf // 2 if len(x) < 4 and leaf % 2 == 0 else leaf  # as a library that cuts K when there are few rows
        return cpu.linear(x, weight, bias, half, leaves * leaf // half, out)

    def flat_sums(logits: Any, maximum: Any, temperature: Any, leaf: int, leaves: int, entropy: bool) -> Any:
        return cpu.vocab_sums(logits, maximum, temperature, logits.shape[1], 1, entropy)

    def by_segment(
        q: Any, cache: Any, table: Any, starts: Any, lengths: Any, scale: float, window: int, segment: int
    ) -> Any:
        return cpu.paged_attention(q, cache, table, starts, lengths, scale, window, segment if len(q) > 20 else 2)

    def sloppy(x: Any, weight: Any, eps: float) -> Any:
        y, rstd = cpu.rms_norm(x.bfloat16(), weight.bfloat16(), eps)
        return y.to(x.dtype), rstd

    def one_run_in_two(x: Any) -> Any:
        calls.append(1)
        return cpu.swiglu(x) if len(calls) % 2 else cpu.swiglu(x).nextafter(torch.zeros((), dtype=x.dtype))

    calls: list[int] = []
    bad = foreign(
        "bad",
        linear=split_by_rows,
        vocab_sums=flat_sums,
        paged_attention=by_segment,
        rms_norm=sloppy,
        swiglu=one_run_in_two,
    )
    found = entries(bad, "vocab_sums", "rms_norm", "swiglu", "residual_add")
    assert {o: e["state"] for o, e in found.items()} == {
        "vocab_sums": "failed", "rms_norm": "failed", "swiglu": "failed", "residual_add": "held",
    }  # fmt: skip
    for operator, check in (
        ("vocab_sums", "tensor parallel"),
        ("rms_norm", "accuracy"),
        ("swiglu", "run to run"),
    ):
        assert found[operator]["checks"][check]["mismatches"], (operator, check)
    products = [f for f in PROBES["linear"](Bench(bad.module, SMALL)) if not f.held]
    assert {f.check for f in products} >= {"batch"}
    pages = [
        f
        for f in PROBES["paged_attention"](Bench(bad.module, replace(SMALL, context=300, dtype=torch.float32)))
        if not f.held
    ]
    assert {f.check for f in pages} >= {"decode"}


def test_an_operator_that_is_refused_or_missing() -> None:
    def refuse(*_: Any) -> Any:
        raise BackendError("exp of float32 is not served")

    backend = foreign("partial", exp=refuse)
    del backend.module.log
    found = entries(backend, "exp", "log")
    assert found["exp"]["state"] == "failed" and "exp of float32 is not served" in found["exp"]["failures"][0]
    assert found["log"]["state"] == "missing"


def test_strict_mode_asks_for_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = foreign("theirs")
    for op in OPERATORS:
        if op not in ("exp", "log"):
            delattr(backend.module, op)
    monkeypatch.setattr(backends, "load", lambda name: backend)
    monkeypatch.setattr(backends, "_active", {})
    monkeypatch.setenv("MINDSPEED_TPI_VERIFIED", str(tmp_path / "records"))
    monkeypatch.setenv("MINDSPEED_TPI", "1")
    backends.use("theirs")  # no record needed
    monkeypatch.setenv("MINDSPEED_TPI", "strict")

    def refusal() -> str:
        with pytest.raises(BackendError, match="mindspeed-tpi verify --backend theirs") as error:
            backends.use("theirs")
        return str(error.value)

    assert "does not exist" in refusal()
    document = runner.verify(backend, SMALL, ["exp", "log"], lambda *_: None)
    path = runner.save(document)
    assert path == tmp_path / "records" / "theirs.json"
    assert backends.use("theirs") is backend
    for change, word in (
        ({"build": "other"}, "another build"),
        ({"format": 0}, "format 0"),
        ({"contract": {**document["contract"], "lanes": 32}}, "lanes=32, now 64"),
        ({"operators": {"exp": document["operators"]["exp"]}}, "does not cover log"),
        ({"operators": {**document["operators"], "log": {"state": "failed"}}}, "failed: log"),
    ):
        path.write_text(json.dumps({**document, **change}))
        assert word in refusal()
    path.write_text("[")
    assert "unreadable" in refusal()


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MINDSPEED_TPI_VERIFIED", str(tmp_path))
    assert cli.main(["verify", "--op", "exp", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["operators"]["exp"]["state"] == "held" and shown["operators"]["exp"]["checks"]["reference"]["cases"]
    assert not list(tmp_path.iterdir())  # a part of a run leaves no record
    for arguments, word in (
        (["--op", "expp"], "no operator expp"),
        (["--backend", "none"], "registered: ascendc-twin, cpu"),
        (["--op", "exp", "--kit", "x.tar.gz"], "drop --op"),
        (["--model", str(tmp_path)], "no config.json"),
    ):
        assert cli.main(["verify", *arguments]) == 2
        assert word in capsys.readouterr().err
    monkeypatch.setattr(backends, "load", lambda name: foreign("bad", exp=lambda x: x.exp()))
    assert cli.main(["verify", "--op", "exp"]) == 1
    assert "elements differ" in capsys.readouterr().err


def test_kit(tmp_path: Path) -> None:
    only = foreign("cpu")
    for op in set(OPERATORS) - {"exp", "linear"}:
        delattr(only.module, op)
    kit.write(tmp_path / "kit.tar.gz", {"operators": {}}, {"healthy": True}, only)
    with tarfile.open(tmp_path / "kit.tar.gz") as archive:
        files = {m.name.rpartition("/")[2]: archive.extractfile(m).read() for m in archive}  # type: ignore[union-attr]
    assert set(files) == {
        "record.json",
        "doctor.json",
        "packages.json",
        "environment.json",
        "commands.txt",
        "cann.txt",
        "answers.safetensors",
    }
    answers = load(files["answers.safetensors"])
    assert torch.equal(answers["exp.result0"], cpu.exp(answers["exp.operand0"])) and "log.result0" not in answers
    name = "linear bfloat16 depth 64 spread 12 rows 16"
    x, weight = answers[f"{name}.operand0"], answers[f"{name}.operand1"]
    assert torch.equal(answers[f"{name}.result0"], cpu.linear(x, weight, None, 64, 1, torch.float32))
