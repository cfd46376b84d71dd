"""What a check of an operator works with: sizes, operands, calls, and the comparisons it reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi import contract
from mindspeed_tpi.contract import Leaves, Role
from mindspeed_tpi.ops.backends import reference
from mindspeed_tpi.ops.checks import checked
from mindspeed_tpi.ops.table import OPERATORS, Operand
from mindspeed_tpi.profiles import Profile

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
TP = (2, 4, 8)
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Sizes:
    """A decoder's sizes, and how many tokens a check takes.

    Attributes:
        rotary: half the rotary dimension. tokens: of most operators. context: keys of attention. logit_tokens: rows of logits.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rotary: int
    experts: int
    topk: int
    expert_ffn: int
    dtype: torch.dtype
    tokens: int = 48
    context: int = 2200
    logit_tokens: int = 12

    @classmethod
    def of(cls, profile: Profile) -> Sizes:
        """Those of a model; a dense one lends the experts of the default."""
        moe = profile.moe
        return replace(
            DEFAULT,
            hidden=profile.hidden,
            heads=profile.heads,
            kv_heads=profile.kv_heads,
            head_dim=profile.head_dim,
            ffn=profile.ffn,
            vocab=profile.vocab,
            rotary=profile.rope.rotary_dim // 2,
            dtype=profile.torch_dtype,
            **({"experts": moe.experts, "topk": moe.topk, "expert_ffn": moe.ffn} if moe else {}),
        )


DEFAULT = Sizes(4096, 32, 8, 128, 12288, 151936, 64, 128, 8, 768, torch.bfloat16)
"""Qwen3-8B, with the experts of Qwen3-30B-A3B."""
SMALL = Sizes(192, 4, 2, 16, 160, 600, 8, 8, 2, 96, torch.bfloat16, tokens=10, context=150, logit_tokens=5)
"""Small enough to compute every call with the reference backend too."""


@dataclass(frozen=True)
class Finding:
    """One comparison: `worst` is an error in units of its bound (accuracy), else the number of elements that differ."""

    operator: str
    check: str
    held: bool
    worst: float
    what: str


def same_bits(a: Tensor, b: Tensor) -> int:
    """How many elements differ in any bit (all, where shapes or dtypes do)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return max(a.numel(), b.numel(), 1)
    as_integers = _INTEGERS[a.element_size()]
    return int((a.contiguous().view(as_integers) != b.contiguous().view(as_integers)).sum())


@dataclass
class Bench:
    """Calls one backend at one set of sizes.

    Attributes:
        oracle: every call is made on the reference backend too, and compared bit for bit.
    """

    module: ModuleType
    sizes: Sizes
    oracle: bool = False
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    against_reference: list[Finding] = field(default_factory=list)

    @property
    def device(self) -> str:
        served: str = self.module.DEVICE
        return served

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers, in the model's dtype unless told."""
        x = torch.randn(*shape, generator=self.generator) * scale
        return x.to(dtype or self.sizes.dtype).to(self.device)

    def integers(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Integers in [0, high)."""
        return torch.randint(high, shape, generator=self.generator, dtype=dtype).to(self.device)

    def order(self, count: int) -> Tensor:
        """A permutation."""
        return torch.randperm(count, generator=self.generator).to(self.device)

    def run(self, operator: str, *args: Any) -> list[Tensor]:
        """Results, then the written operands, of one call; operands are not changed."""
        written = [i for i, p in enumerate(OPERATORS[operator].parameters) if isinstance(p, Operand) and p.mutated]
        if not hasattr(self.module, operator):  # a helper of another operator's check
            return [r.to(self.device) for r in _call(reference, operator, _on_host(args), written)]
        found = _call(self.module, operator, args, written)
        if self.oracle and self.module is not reference:
            expected = _call(reference, operator, _on_host(args), written)
            self.against_reference.append(equal(operator, "reference", found, expected, "at small sizes"))
        return found


def _on_host(args: Sequence[Any]) -> list[Any]:
    return [a.cpu() if isinstance(a, Tensor) else a for a in args]


def _call(module: ModuleType, operator: str, args: Sequence[Any], written: Sequence[int]) -> list[Tensor]:
    own = [a.clone() if i in written else a for i, a in enumerate(args)]
    function = getattr(module, operator)
    result = (function if getattr(module, "CHECKS_OPERANDS", False) else checked(operator, function))(*own)
    results = [] if result is None else [result] if isinstance(result, Tensor) else list(result)
    return results + [own[i] for i in written]


def equal(operator: str, check: str, found: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> Finding:
    """Every bit of every tensor."""
    pairs = list(zip(found, expected, strict=True))
    differing = sum(same_bits(a.cpu(), b.cpu()) for a, b in pairs)
    return Finding(operator, check, differing == 0, float(differing), what)


def near(
    operator: str, found: Tensor, exact: Tensor, terms: Tensor | float, roundings: float, what: str = ""
) -> Finding:
    """Within `roundings` float32 roundings of `terms` (the sum of the absolute terms), and one rounding to the result's dtype."""
    unit = UNIT[found.dtype]
    bound = 1.01 * roundings * UNIT[torch.float32] * torch.as_tensor(terms, dtype=torch.float64)
    bound = bound + 1.01 * unit * (exact.abs() + bound) + torch.finfo(found.dtype).tiny
    error = (found.cpu().double() - exact).abs() / bound
    worst = float(error.nan_to_num(math.inf).max()) if error.numel() else 0.0
    return Finding(operator, "accuracy", worst <= 1, worst, what)


def leaves(length: int, role: Role) -> Leaves:
    """The contract's cut."""
    return contract.current().leaves(length, role)


def by_rows(
    operator: str, call: Callable[..., list[Tensor]], *operands: Tensor | None, order: Tensor, what: str = ""
) -> Iterator[Finding]:
    """A call over rows gives the same bits twice, for any part of the rows, and in any order of them.

    Args:
        operands: share their first dimension, as do the results.
        order: a permutation of the rows.
    """
    whole = call(*operands)
    count = len(order)
    yield equal(operator, "run to run", call(*operands), whole, what)
    for first, last in sorted({(0, 1), (count - 1, count), (0, count // 2), (count // 3, count), (1, min(4, count))}):
        part = call(*(None if x is None else x[first:last] for x in operands))
        yield equal(
            operator, "batch", part, [r[first:last] for r in whole], f"{what} rows {first}:{last} of {count}".strip()
        )
    shuffled = call(*(None if x is None else x[order] for x in operands))
    yield equal(operator, "batch", shuffled, [r[order] for r in whole], f"{what} shuffled rows".strip())
