"""The test that every family runs: cpu == reference on drawn cases, instruction sets and thread counts."""

from __future__ import annotations

from hypothesis import strategies as st

from mindspeed_tpi.ops.backends import cpu
from tests.ops import cases


def check_drawn(operator: str, data: st.DataObject) -> None:
    """Draw one case and compare the backends bit for bit."""
    source = cases.Drawn(data)
    case = cases.BUILDERS[operator](source)
    cases.check(case, source.choice(cpu.isas()), source.choice((1, 1, 2, 4)))
