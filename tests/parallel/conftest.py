from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parallel.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()
