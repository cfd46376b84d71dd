"""Schema, fake kernel, autograd registration and AOT dispatch of every operator, by `torch.library.opcheck`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice

import pytest
import torch

from mindspeed_tpi.ops import schemas
from mindspeed_tpi.ops.backends import cpu
from tests.ops import cases


def _finite_cases(operator: str) -> Iterator[cases.Case]:
    """Seeded cases without NaN or Inf in the results: opcheck compares by value."""
    for seed in count():
        case = cases.BUILDERS[operator](cases.Seeded(operator, seed))
        if all(bool(x.isfinite().all()) for x in case.run(cpu)):
            yield case


@pytest.mark.parametrize("operator", schemas.OPS)
def test_opcheck(operator: str) -> None:
    for case in islice(_finite_cases(operator), 2):
        args = tuple(a.contiguous() if isinstance(a, torch.Tensor) else a for a in case.args)
        torch.library.opcheck(schemas.OPS[operator].overload, args)


def test_every_operator_has_cases() -> None:
    assert set(cases.BUILDERS) == set(schemas.OPS)
