"""Data-parallel ranks in processes of their own, without an engine."""

import os

import pytest

from mindspeed_tpi.errors import InputError, ParityError
from mindspeed_tpi.parity.replicas import Replicas


class Engine:
    """What an engine is to `Replicas`."""

    def __init__(self, rank):
        self.rank = rank

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def scaled(self, x):
        return self.rank * x

    def fail(self, kind):
        raise kind("on purpose")

    def die(self):
        os._exit(7)


@pytest.fixture
def replicas():
    started = Replicas(3, Engine)
    started.receive()
    yield started
    started.close()


def test_each_rank_answers_for_itself(replicas):
    replicas.send("scaled", [(10,), (100,)])
    assert replicas.receive() == [10, 200]
    replicas.send("scaled", [(1,), (1,)])
    assert replicas.receive() == [1, 2]


@pytest.mark.parametrize(
    ("method", "arguments", "error", "message"),
    [
        ("fail", (InputError,), InputError, "on purpose"),
        ("fail", (KeyError,), ParityError, "data-parallel rank 1: KeyError"),
        ("die", (), ParityError, "data-parallel rank 1 ended with status 7"),
    ],
)
def test_failures_are_raised(replicas, method, arguments, error, message):
    replicas.send(method, [arguments, arguments])
    with pytest.raises(error, match=message):
        replicas.receive()
