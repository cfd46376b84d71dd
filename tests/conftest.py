"""The tests' process is a trainer in strict mode: set before anything imports Megatron-core."""

import os

os.environ.setdefault("MINDSPEED_TPI", "strict")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import mindspeed_tpi  # noqa: F401
