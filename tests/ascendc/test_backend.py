"""The backend `ascendc-twin`: its operators have the reference's bits, whatever the cores and their order. npu: not yet run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindspeed_tpi import contract
from mindspeed_tpi.contract import NumericsContract
from mindspeed_tpi.errors import BackendError
from mindspeed_tpi.ops.backends import ascendc_twin, reference
from mindspeed_tpi.ops.backends.ascendc_twin import Run
from mindspeed_tpi.ops.table import OPERATORS
from tests.ops.bits import same_bits
from tests.ops.cases import BUILDERS, Drawn

SERVED = [name for name in OPERATORS if hasattr(ascendc_twin, name)]


@pytest.fixture(autouse=True)
def column(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    contract.set_current(NumericsContract.ascendc())
    yield
    contract.set_current(None)


@pytest.mark.parametrize("operator", SERVED)
def test_equals_the_reference(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any sizes and values, on 1 to 24 cores in any order."""

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data(), st.integers(1, 24), st.integers(0, 2**32))
    def check(data: st.DataObject, blocks: int, seed: int) -> None:
        case = BUILDERS[operator](Drawn(data))
        expected = case.run(reference)
        monkeypatch.setattr(ascendc_twin, "run", Run(blocks, seed, 0))
        try:
            found = case.run(ascendc_twin)
        except BackendError as error:
            # What hardware makes of a narrowing overflow depends on a register: the twin refuses it, and nothing else.
            assert "CTRL[48]" in str(error), f"{case!r}: {error}"
            return
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert same_bits(a, b), f"{case!r} result {i}: {a} instead of {b}"

    check()


def test_the_contract_is_asked_for() -> None:
    ascendc_twin.check(NumericsContract.ascendc())
    with pytest.raises(BackendError, match=r"family='ascendc', the contract says 'cpu'"):
        ascendc_twin.check(contract.default())
