"""Every operator has its kernels, the native library agrees with the contract, and there is one OpenMP pool."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mindspeed_tpi import contract, ops
from mindspeed_tpi.errors import BackendError
from mindspeed_tpi.ops import schemas
from mindspeed_tpi.ops.backends import cpu, reference

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("backend", [cpu, reference])
def test_every_schema_has_an_implementation(backend: object) -> None:
    assert [name for name in schemas.OPS if not callable(getattr(backend, name, None))] == []


def test_the_library_follows_the_contract_and_refuses_others() -> None:
    cpu.check(contract.current())
    for field, value in (("kv_block", 64), ("lanes", 32), ("multiply_add", "mul-add"), ("p_dtype", "input")):
        with pytest.raises(BackendError, match=f"{field}=.*MINDSPEED_TPI_BACKEND=reference"):
            cpu.check(contract.current().overridden({field: value}))


def test_one_openmp_pool() -> None:
    code = (
        "import re, torch; from mindspeed_tpi import ops\n"
        "ops.linear(torch.randn(512, 512), torch.randn(512, 512)); torch.randn(512, 512) @ torch.randn(512, 512)\n"
        "paths = {line.split()[-1] for line in open('/proc/self/maps')}\n"
        "runtimes = [p for p in paths if re.search(r'lib(gomp|omp|iomp5)[^/]*[.]so', p)]\n"
        "assert len(runtimes) == 1, runtimes"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "LIBRARY_PATH", Path("/nonexistent/libmindspeed_tpi.so"))
    with pytest.raises(BackendError, match="is missing; build it with `pip install"):
        cpu._load()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.linear(torch.zeros(2, 3), torch.zeros(4, 5)), r"weight is \[4, 5\], expected \[N, K\] with K=3"),
        (
            lambda: ops.linear(torch.zeros(2, 3), torch.zeros(4, 3).bfloat16()),
            "weight is torch.bfloat16, expected torch.float32",
        ),
        (lambda: ops.linear(torch.zeros(2, 4).double(), torch.zeros(4, 4).double()), "float32, bfloat16 or float16"),
        (lambda: ops.embedding(torch.zeros(4, 8), torch.tensor([4])), "an id, slot, page or position outside"),
        (
            lambda: ops.token_logprob(torch.zeros(1, 8), torch.tensor([8])),
            "token_logprob: an id, slot, page or position outside",
        ),
        (
            lambda: ops.rope(torch.zeros(1, 1, 8), torch.zeros(2, 4), torch.zeros(2, 4), torch.tensor([2])),
            "position outside",
        ),
        (
            lambda: ops.attention(
                torch.zeros(2, 3, 8), torch.zeros(2, 2, 8), torch.zeros(2, 2, 8), ops.causal_seqs([2]), scale=1.0
            ),
            "Hk=2, Hq=3, expected Hk >= 1 and Hq % Hk == 0",
        ),
        (
            lambda: ops.attention(*[torch.zeros(2, 2, 8)] * 3, ops.causal_seqs([3]), scale=1.0),
            "ranges within 2 queries and 2 keys",
        ),
        (lambda: ops.swiglu(torch.zeros(2, 3)), r"x is \[2, 3\], expected \[\*, 2\*F\]"),
        (
            lambda: ops.paged_cache_write(
                torch.zeros(1, 1, 8), torch.zeros(1, 1, 8), torch.zeros(2, 1, 48, 16), torch.tensor([0])
            ),
            "page=48, expected page >= 16",
        ),
        (lambda: ops.moe_route(torch.full((1, 4), float("nan")), 2), "NaN among the router logits"),
    ],
)
def test_refusals_name_value_and_limit(call: object, message: str) -> None:
    ops.backends.use("cpu")
    with pytest.raises(BackendError, match=message):
        call()  # type: ignore[operator]
