"""logdiff is exactly 0 between a real vLLM and a real Megatron-core GPTModel, whatever the batch, chunks, pages and caches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mindspeed_tpi import ops
from mindspeed_tpi.ops import schemas
from mindspeed_tpi.parity.compare import compare
from mindspeed_tpi.parity.trainer import Trainer
from tests.models import FAMILIES
from tests.parity.conftest import FAMILY_SCENARIOS, Case, assert_exact

Rollouts = Callable[[str, str, tuple[str, ...]], dict[str, Case]]

GRID = [(family, "bfloat16", FAMILY_SCENARIOS) for family in FAMILIES] + [
    ("llama", "float16", ("crowded",)),
    ("qwen3", "float32", ("crowded",)),
    ("qwen3", "bfloat16", ("single", "long", "spawned", "compiled")),
]


@pytest.mark.parametrize(("family", "dtype", "scenarios"), GRID, ids=lambda v: v if isinstance(v, str) else "-".join(v))
def test_logdiff_is_zero(rollouts: Rollouts, family: str, dtype: str, scenarios: tuple[str, ...]) -> None:
    cases = rollouts(family, dtype, scenarios)
    trainer = Trainer(next(iter(cases.values())).request)
    for name, case in cases.items():
        trainer.request = case.request
        assert_exact(case, trainer.logprobs(case.rollout))
        if name == "crowded":
            counters = case.rollout.meta["counters"]
            assert counters["prompts_chunked"] and counters["prefix_cache_hits"] and counters["preemptions"], counters
        if name == "plain":
            assert int((~case.rollout.logprobs.isnan()).sum()) > case.expected_tokens
            one_by_one = trainer.logprobs(case.rollout, micro_batch=1)
            assert_exact(case, one_by_one)


def test_one_changed_weight_shows(rollouts: Rollouts) -> None:
    case = rollouts("llama", "bfloat16", FAMILY_SCENARIOS)["plain"]
    trainer = Trainer(case.request)
    with torch.no_grad():
        weight = trainer.model.decoder.layers[0].mlp.linear_fc2.weight
        weight[0, 0] += 0.5
    result = compare(case.rollout, trainer.logprobs(case.rollout), case.expected_tokens)
    assert not result.exact and result.nonzero > result.tokens // 2


def _reversed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: object) -> Tensor:
    return _original("linear")(x.flip(-1), weight.flip(-1), bias, *rest)


def _stock_linear(x: Tensor, weight: Tensor, bias: Tensor | None, leaf: int, leaves: int, out: object) -> Tensor:
    y = torch.nn.functional.linear(x, weight, bias)
    return y if out is None else y.to(out)


def _stock_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.float()
    rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return ((wide * rstd) * weight.float()).to(x.dtype), rstd.squeeze(-1)


def _stock_swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def _short_segments(q: Tensor, k: Tensor, v: Tensor, seqs: Tensor, *options: object) -> tuple[Tensor, ...]:
    return _original("attention")(q, k, v, seqs, *options[:-1], 1)


def _rounded_tables(x: Tensor, cos: Tensor, sin: Tensor, *rest: object) -> Tensor:
    return _original("rope")(x, cos.to(x.dtype).float(), sin.to(x.dtype).float(), *rest)


def _stock_logprob(logits: Tensor, tokens: Tensor, *rest: object) -> tuple[Tensor, ...]:
    _, entropy, largest, total = _original("token_logprob")(logits, tokens, *rest)
    return logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0], entropy, largest, total


def _original(name: str) -> Callable[..., object]:
    return getattr(ops.backends.active().module, name)


PLANTED = {
    "linear": [_reversed_linear, _stock_linear],
    "rms_norm": [_stock_norm],
    "swiglu": [_stock_swiglu],
    "attention": [_short_segments],
    "rope": [_rounded_tables],
    "token_logprob": [_stock_logprob],
}


@pytest.mark.parametrize(
    ("op", "replacement"), [(op, f) for op, fs in PLANTED.items() for f in fs], ids=lambda v: getattr(v, "__name__", v)
)
def test_any_operator_out_of_contract_shows(
    rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch, op: str, replacement: Callable[..., object]
) -> None:
    """The grid above can fail: with any one operator in another order, it does."""
    assert op in schemas.OPS
    case = rollouts("llama", "bfloat16", FAMILY_SCENARIOS)["plain"]
    trainer = Trainer(case.request)
    monkeypatch.setitem(ops.backends._kernels, (op, "cpu"), replacement)
    result = compare(case.rollout, trainer.logprobs(case.rollout), case.expected_tokens)
    assert result.nonzero > 0 and not result.exact
