"""Schema, fake kernel, autograd registration and AOT dispatch of every operator, by `torch.library.opcheck`."""

from __future__ import annotations

import pytest
import torch

from mindspeed_tpi.ops import _schemas
from tests.ops import cases


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("operator", _schemas.OPS)
def test_opcheck(operator: str, seed: int) -> None:
    case = cases.BUILDERS[operator](cases.Seeded(operator, seed))
    args = tuple(a.contiguous() if isinstance(a, torch.Tensor) else a for a in case.args)
    torch.library.opcheck(_schemas.OPS[operator].overload, args)


def test_every_operator_has_cases() -> None:
    assert set(cases.BUILDERS) == {*_schemas.OPS, "exp", "log"}
