"""Settings of the operator tests: `--hypothesis-profile=thorough` draws twenty times as many cases."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from mindspeed_tpi import contract
from mindspeed_tpi.ops.backends import cpu
from tests.ops.cases import WIDEST

_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
settings.register_profile("ops", max_examples=60, deadline=None, database=None, suppress_health_check=_CHECKS)
settings.register_profile("thorough", parent=settings.get_profile("ops"), max_examples=1200)
if settings.get_current_profile_name() == "default":
    settings.load_profile("ops")


@pytest.fixture(autouse=True)
def default_state() -> Iterator[None]:
    """One thread and the default contract, before and after each test."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    contract.set_current(contract.default())
    yield
    contract.set_current(None)
    torch.set_num_threads(threads)
    assert cpu.describe()["isa"] == WIDEST, "the test leaves the CPU backend on another instruction set"
