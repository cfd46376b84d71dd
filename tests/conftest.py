"""The tests' process is a trainer in strict mode: set before anything imports Megatron-core."""

import os

os.environ.setdefault("MINDSPEED_TPI", "strict")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # two workers share two cores: threads that wait by spinning take twice the time

import mindspeed_tpi  # noqa: F401
