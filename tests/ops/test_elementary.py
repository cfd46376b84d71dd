"""exp, log, and the reference's own float32 arithmetic against exact rational numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_tpi import contract
from mindspeed_tpi.ops.backends import cpu, reference
from tests.ops import cases
from tests.ops.bits import assert_same_bits, same_bits
from tests.ops.equality import check_drawn

TINY = Fraction(1, 2**126)
ARITHMETIC = [(isa, subnormals) for isa in ("x86-64", "aarch64") for subnormals in ("flush", "keep")]


@pytest.mark.parametrize("operator", ("exp", "log"))
@given(st.data())
def test_cpu_equals_reference(operator: str, data: st.DataObject) -> None:
    check_drawn(operator, data)


@pytest.mark.parametrize("operator", ("exp", "log"))
@pytest.mark.parametrize("isa", cpu.isas())
def test_every_binade(operator: str, isa: str) -> None:
    bits = torch.arange(-(2**31), 2**31, 65521, dtype=torch.int64).to(torch.int32)
    cases.check(cases.Case(operator, (bits.view(torch.float32),)), isa)


def test_edges_of_exp_and_log() -> None:
    first_zero = np.nextafter(np.float32(float.fromhex("-0x1.5d4p+6")), np.float32(-np.inf))
    first_inf = np.nextafter(np.float32(float.fromhex("0x1.62e42ep+6")), np.float32(np.inf))
    x = torch.tensor([0.0, -0.0, first_zero, first_inf, -math.inf, math.inf, cases.NAN, 1e-40])
    expected = torch.tensor([1.0, 1.0, 0.0, math.inf, 0.0, math.inf, cases.NAN, 1.0])
    for backend in (cpu, reference):
        assert_same_bits(backend.exp(x), expected)
    x = torch.tensor([1.0, 0.0, -0.0, 1e-40, -1e-40, -1.0, -math.inf, math.inf, -cases.NAN])
    expected = torch.tensor([0.0, *[-math.inf] * 4, cases.NAN, cases.NAN, math.inf, cases.NAN])
    for backend in (cpu, reference):
        assert_same_bits(backend.log(x), expected)


def _round(exact: Fraction, isa: str, subnormals: str) -> float:
    """Round to nearest even in binary32, from the definition."""
    if exact == 0:
        return 0.0
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent

    def nearest(unit: Fraction) -> Fraction:
        return round(size / unit) * unit  # Python rounds halves to even

    rounded = nearest(Fraction(2) ** (exponent - 23))
    if subnormals == "keep":
        if size < TINY:
            rounded = nearest(TINY / 2**23)
    elif (rounded if isa == "x86-64" else size) < TINY:
        rounded = Fraction(0)
    value = math.inf if rounded >= 2**128 else float(rounded)
    return math.copysign(value, exact)


@pytest.fixture(params=ARITHMETIC, ids="/".join)
def arithmetic(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    isa, subnormals = request.param
    contract.set_current(contract.default().overridden({"isa": isa, "subnormals": subnormals}))
    with np.errstate(all="ignore"):
        yield request.param


def _same_number(actual: float, expected: float) -> bool:
    return actual == expected and math.copysign(1, actual) == math.copysign(1, expected)


def _hard_numbers(rng: np.random.Generator, n: int) -> np.ndarray:
    """Normal float32 numbers whose products and sums often lie halfway, cancel, underflow or overflow."""
    mantissa = np.choose(
        rng.integers(0, 5, n),
        [
            rng.integers(0, 2**23, n),
            np.zeros(n, int),
            np.full(n, 2**23 - 1),
            rng.integers(0, 8, n),
            2**23 - rng.integers(1, 5, n),
        ],
    )
    exponent = np.choose(
        rng.integers(0, 4, n),
        [rng.integers(-126, 128, n), rng.integers(-9, 9, n), rng.integers(-64, -61, n), rng.integers(60, 66, n)],
    )
    return rng.choice((-1.0, 1.0), n) * (1 + mantissa * 2.0**-23) * 2.0**exponent


def test_fma_is_rounded_once(arithmetic: tuple[str, str]) -> None:
    rng = np.random.default_rng(1)
    a, b, c = (_hard_numbers(rng, 3000) for _ in range(3))
    product = a * b
    near = [-reference.round32(product), reference.round32(product * 2.0**24), reference.round32(product * 2.0**-25), c]
    c = np.choose(rng.integers(0, 4, len(c)), near)
    c = np.where(np.isfinite(c), c, 1.0)
    for x, y, z, r in zip(a, b, c, reference.fma(a, b, c), strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        expected = _round(exact, *arithmetic) if exact else x * y + z
        assert _same_number(r, expected), f"fma({x.hex()}, {y.hex()}, {z.hex()}) = {r.hex()}, not {expected.hex()}"


def test_one_float64_operation_and_a_rounding_is_float32_arithmetic(arithmetic: tuple[str, str]) -> None:
    rng = np.random.default_rng(2)
    a, b = _hard_numbers(rng, 2000), _hard_numbers(rng, 2000)
    operations = {
        "add": lambda x, y: x + y,
        "sub": lambda x, y: x - y,
        "mul": lambda x, y: x * y,
        "div": lambda x, y: x / y,
    }
    for name, exact in operations.items():
        for x, y, r in zip(a, b, getattr(reference, name)(a, b), strict=True):
            expected = _round(exact(Fraction(float(x)), Fraction(float(y))), *arithmetic)
            assert _same_number(r, expected), f"{name}({x.hex()}, {y.hex()}) = {r.hex()}, not {expected.hex()}"
    for x, r in zip(np.abs(a), reference.sqrt(np.abs(a)), strict=True):
        ulp = Fraction(float(np.spacing(np.float32(r))))
        exact_square = Fraction(float(x))
        assert (Fraction(float(r)) - ulp / 2) ** 2 <= exact_square <= (Fraction(float(r)) + ulp / 2) ** 2


def test_special_operands(arithmetic: tuple[str, str]) -> None:
    special = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 2.0**127, 2.0**-126])
    a, b, c = (x.ravel() for x in np.meshgrid(special, special, special))
    expected = a * b + c  # exact in float64 but for underflow and overflow of float32
    got = reference.fma(a, b, c)
    inside = (np.abs(expected) < 2.0**128) & ((np.abs(expected) >= 2.0**-126) | (expected == 0)) | ~np.isfinite(
        expected
    )
    assert np.array_equal(got[inside], expected.astype(np.float32)[inside], equal_nan=True)
    assert np.array_equal(np.signbit(got[inside & (got == 0)]), np.signbit(expected[inside & (got == 0)]))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@given(st.data())
def test_rounding_to_storage(dtype: torch.dtype, data: st.DataObject) -> None:
    x = cases.values(cases.Drawn(data), (100,), torch.float32)
    x = torch.where(x.abs() < torch.finfo(torch.float32).tiny, 0.0, x)
    expected = torch.where(x.isnan(), cases.NAN, x.to(dtype))
    with np.errstate(over="ignore"):
        assert_same_bits(reference.narrow(reference.widen(x), dtype), expected.to(dtype))


@pytest.mark.parametrize("subnormals", ("flush", "keep"))
def test_the_float_environment_of_the_thread_does_not_matter(subnormals: str) -> None:
    contract.set_current(contract.default().overridden({"subnormals": subnormals}))
    g = torch.Generator().manual_seed(0)
    x = torch.randn(4, 32, generator=g) * torch.exp2(torch.randint(-75, -60, (4, 32), generator=g))
    x[0, :4] = torch.tensor([1e-40, -1e-40, 2.0**-149, 2.0**-126])
    with np.errstate(all="ignore"):
        before = [reference.linear(x, x, None, 8, 4, None), reference.narrow(reference.widen(x), torch.float32)]
        torch.set_flush_denormal(True)
        try:
            after = [reference.linear(x, x, None, 8, 4, None), reference.narrow(reference.widen(x), torch.float32)]
        finally:
            torch.set_flush_denormal(False)
    for a, b in zip(after, before, strict=True):
        assert_same_bits(a, b)
    if subnormals == "keep":
        assert same_bits(before[1], x)
