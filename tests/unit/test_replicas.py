"""Data-parallel ranks in processes of their own, without an engine."""

import os
import subprocess
import sys
import time

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

    def die_or_wait(self, rank):
        time.sleep(0 if self.rank == rank else 60)
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
        ("fail", (KeyError,), ParityError, "data-parallel rank [12]: KeyError"),  # whichever comes first
        ("die", (), ParityError, "data-parallel rank [12] ended with status 7"),
    ],
)
def test_failures_are_raised(replicas, method, arguments, error, message):
    replicas.send(method, [arguments, arguments])
    with pytest.raises(error, match=message):
        replicas.receive()


def test_a_rank_that_ends_is_noticed_while_another_is_at_work():
    started = Replicas(3, Engine)
    started.receive()
    try:
        started.send("die_or_wait", [(2,), (2,)])
        with pytest.raises(ParityError, match="rank 2 ended with status 7"):
            started.receive()
    finally:
        for process in started._processes:
            process.kill()
        started.close()


def test_a_worker_ends_with_its_driver():
    code = "import time; from mindspeed_tpi.patches.vllm.v1.worker.cpu_worker import end_with; end_with({}); print(flush=True); time.sleep(600)"
    driver = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    worker = subprocess.Popen([sys.executable, "-c", code.format(driver.pid)], stdout=subprocess.PIPE)
    try:
        worker.stdout.readline()
        assert worker.poll() is None
        driver.kill()
        driver.wait()
        assert worker.wait(30) == 1
    finally:
        worker.kill()
