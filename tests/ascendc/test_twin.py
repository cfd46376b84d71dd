"""The CPU twin of Ascend C, and the kernels on it against the reference backend. npu: not yet run."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mindspeed_tpi import contract
from mindspeed_tpi.contract import NumericsContract
from mindspeed_tpi.ops.backends import reference
from tests.ascendc import twin
from tests.ascendc.twin import KERNELS, Run

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def column() -> Iterator[None]:
    """The reference follows the Ascend column."""
    contract.set_current(NumericsContract.ascendc())
    yield
    contract.set_current(None)


def test_twin_follows_the_documented_facts_and_catches_planted_faults() -> None:
    done = subprocess.run([str(twin.build(Path(__file__).with_name("facts.cpp")))], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) >= 66


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Any number of groups, in any order."""
    return Run(draw(st.integers(1, 24)), draw(st.integers(0, 2**32)), 0)


def normal(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 40), st.integers(1, 40) | st.just(128), st.integers(0, 7), runs())
def test_rms_norm(dtype: torch.dtype, rows: int, eighths: int, more: int, run: Run) -> None:
    columns = 8 * eighths + more
    x, weight = normal((rows, columns), dtype, 0), normal((columns,), dtype, 1)
    y, rstd, _ = twin.rms_norm(x, weight, 1e-6, run)
    for ours, oracle in zip((y, rstd), reference.rms_norm(x, weight, 1e-6), strict=True):
        assert torch.equal(ours, oracle)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 20), st.integers(1, 700) | st.just(4100), runs())
def test_swiglu(dtype: torch.dtype, rows: int, columns: int, run: Run) -> None:
    x = normal((rows, 2 * columns), dtype, 2)
    assert torch.equal(twin.swiglu(x, run)[0], reference.swiglu(x))


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(DTYPES), st.integers(1, 40) | st.just(150), st.integers(1, 40) | st.just(300), st.integers(1, 80),
    st.sampled_from([1, 2, 8]), st.integers(0, 3), st.booleans(), st.sampled_from([None, torch.float32]), runs(),
)  # fmt: skip
def test_linear(
    dtype: torch.dtype,
    m: int,
    n: int,
    leaf: int,
    leaves: int,
    short: int,
    biased: bool,
    out: torch.dtype | None,
    run: Run,
) -> None:
    k = leaf * leaves - min(short, leaf - 1)
    x, weight, bias = normal((m, k), dtype, 3), normal((n, k), dtype, 4), normal((n,), dtype, 5) if biased else None
    assert torch.equal(
        twin.linear(x, weight, bias, leaf, leaves, out, run)[0], reference.linear(x, weight, bias, leaf, leaves, out)
    )


def rms_norm_cases(run: Run) -> list[Tensor]:
    """Rows of one and of two panels, more rows than a tile."""
    shapes = ((300, 300), (300, 1100))
    pairs = [
        twin.rms_norm(normal(s, torch.bfloat16, 0), normal(s[1:], torch.bfloat16, 1), 1e-6, run)[:2] for s in shapes
    ]
    return [tensor for pair in pairs for tensor in pair]


def swiglu_cases(run: Run) -> list[Tensor]:
    return [twin.swiglu(normal((9, 2000), torch.float32, 0), run)[0]]


def linear_cases(run: Run) -> list[Tensor]:
    """A whole and a partial tile of columns, eight leaves or one, with a bias; float32 out, or rounding hides an order."""
    x, weight, bias = (
        normal((9, 640), torch.bfloat16, 0),
        normal((300, 640), torch.bfloat16, 1),
        normal((300,), torch.bfloat16, 2),
    )
    return [twin.linear(x, weight, bias, 640 // leaves, leaves, torch.float32, run)[0] for leaves in (8, 1)]


CASES = {"rms_norm": rms_norm_cases, "swiglu": swiglu_cases, "linear": linear_cases}


@pytest.mark.parametrize("name", CASES)
def test_each_barrier_of_a_kernel_is_needed(name: str) -> None:
    lines = (KERNELS / name / "op_kernel" / f"{name}.h").read_text().splitlines()
    barriers = [number for number, line in enumerate(lines, 1) if "PipeBarrier<" in line]
    assert barriers
    CASES[name](Run(1, 0, 0))
    for number in barriers:
        with pytest.raises(twin.TwinFault, match="without PipeBarrier"):
            CASES[name](Run(1, 0, number))


def test_a_reordered_kernel_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {name: case(Run(2, 0, 0)) for name, case in CASES.items()}
    changed = tmp_path / "ascendc"
    shutil.copytree(KERNELS, changed)
    for name, before, after in (
        ("rms_norm", r"Add\(acc_, acc_, square_\[c \* 64\], ChunkLanes\(Width\(p\), c\)",  # the last chunk first
         "Add(acc_, acc_, square_[((Width(p) + 63) / 64 - 1 - c) * 64], ChunkLanes(Width(p), (Width(p) + 63) / 64 - 1 - c)"),
        ("swiglu", r"Div\(gate, gate, e, count\);\s*PipeBarrier<PIPE_V>\(\);\s*Mul\(gate, gate, up, count\);",  # (g * u) / e
         "Mul(gate, gate, up, count); PipeBarrier<PIPE_V>(); Div(gate, gate, e, count);"),
        ("linear", r"apart = 1; apart < t_\.leaves; apart \*= 2\) \{\s*for \(uint32_t leaf = 0; leaf < t_\.leaves; leaf \+= 2 \* apart",
         "apart = t_.leaves / 2; apart > 0; apart /= 2) { for (uint32_t leaf = 0; leaf < apart; ++leaf"),  # leaf i + leaf i + 4
    ):  # fmt: skip
        path = changed / name / "op_kernel" / f"{name}.h"
        text, count = re.subn(before, lambda _, new=after: new, path.read_text())
        assert count == 1, name
        path.write_text(text)
    loaded = twin.load(changed)
    monkeypatch.setattr(twin, "library", lambda: loaded)
    for name, case in CASES.items():
        assert not all(torch.equal(a, b) for a, b in zip(case(Run(2, 0, 0)), expected[name], strict=True)), name


def test_counts_say_what_bounds_a_kernel() -> None:
    """A decode-sized product reads its weight once; cube cycles are fractals."""
    x, weight = normal((16, 256), torch.bfloat16, 0), normal((512, 256), torch.bfloat16, 1)
    _, counts = twin.linear(x, weight, None, 256, 1, None, Run(2, 0, 0))
    assert counts["M"] == 1 * 32 * 16
    assert counts["gm_to_l1"] == (512 * 256 + 2 * 16 * 256) * 2
    assert counts["l0c_to_gm"] == 16 * 512 * 2
