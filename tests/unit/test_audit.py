"""What mode `audit` records, and what it leaves out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_tpi import audit, ops
from mindspeed_tpi.errors import ParityError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MINDSPEED_TPI_AUDIT", str(tmp_path / "audit"))
    audit.start()
    yield tmp_path / "audit"
    audit.stop()


def recorded(folder: Path) -> dict[str, tuple[str, int]]:
    audit.stop()
    return {call["operator"]: (call["kind"], call["count"]) for call in audit.merged(folder)}


def test_accumulating_operators_and_ours(folder: Path) -> None:
    audit.start()  # a no-op
    x, w = torch.ones(4, 8), torch.ones(3, 8, requires_grad=True)
    (torch.nn.functional.linear(x, w) @ torch.ones(3)).softmax(0).sum().backward()
    torch.zeros(4).index_put_((torch.tensor([1, 1]),), torch.ones(2), accumulate=True)
    ops.linear(x, torch.ones(3, 8))
    found = recorded(folder)
    assert found.pop("mindspeed_tpi.linear.default") == ("contract", 1)
    assert {kind for kind, _ in found.values()} == {"outside"}
    assert {
        "aten.mm.default",
        "aten._softmax.default",
        "aten._softmax_backward_data.default",
        "aten.sum.default",
    } <= set(found)
    assert "aten.index_put_.default" in found


def test_what_adds_nothing_up_or_is_exact_is_left_out(folder: Path) -> None:
    x = torch.ones(4)
    _ = x + x, x.max(), torch.arange(4).sum(), torch.cat((x, x)), x.normal_()
    torch.zeros(4).index_put_((torch.tensor([1]),), torch.ones(1))
    assert recorded(folder) == {}


def test_inference_mode_and_the_caller(folder: Path) -> None:
    with torch.inference_mode():
        torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3))
    audit.stop()
    (call,) = audit.merged(folder)
    file, _, function = call["caller"].partition(" ")
    assert file.rpartition(":")[0].endswith("test_audit.py") and function == "test_inference_mode_and_the_caller"


def test_records_of_several_processes_are_added(folder: Path) -> None:
    torch.ones(2).sum()
    audit.stop()
    (file,) = folder.glob("*.json")
    (folder / "other.json").write_text(json.dumps(json.loads(file.read_text())))
    assert [call["count"] for call in audit.merged(folder)] == [2]


def test_another_mode_on_top_is_refused(folder: Path) -> None:
    with TorchDispatchMode():
        with pytest.raises(ParityError, match="entered after it is still active"):
            audit.stop()
