"""vLLM's sampling parameters as a rollout record carries them, and which of them a trainer can reproduce."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_tpi.errors import InputError

# Parameter → values under which a token is drawn from softmax(logits / temperature), the distribution a trainer recomputes.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1, None),
    "top_k": (0, -1, None),
    "min_p": (0, None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "repetition_penalty": (1, None),
    "min_tokens": (0, None),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "structured_outputs": (None,),
    "thinking_token_budget": (None, -1),
    "trace_decode_token_ids": (None,),
}
_MODES = {"raw_logprobs": False, "processed_logprobs": True}  # whether reported values are at the sampling temperature


def document(parameters: Any) -> dict[str, Any]:
    """What decides the distribution and the reported log-probability, and the seed, JSON-able.

    Args:
        parameters: a `vllm.SamplingParams`, or a mapping of its fields (absent ones take vLLM's defaults).

    Raises:
        InputError: no temperature, or one that is no number ≥ 0.
    """
    get = (
        parameters.get if isinstance(parameters, Mapping) else lambda name, default: getattr(parameters, name, default)
    )
    temperature = get("temperature", 1.0)
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not temperature >= 0:
        raise InputError(f"sampling parameter temperature={temperature!r} must be a number, 0 or larger")
    found = {name: _plain(get(name, neutral[0])) for name, neutral in NEUTRAL.items()}
    return {"temperature": float(temperature), "seed": get("seed", None), **found}


def _plain(value: Any) -> Any:
    """JSON has no integer keys (logit_bias), sets or objects (structured_outputs)."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    return repr(value)


def logprob_temperature(sampling: Mapping[str, Any], logprobs_mode: str) -> float:
    """The temperature at which the engine reported the sampled tokens' log-probabilities.

    Raises:
        InputError: a `logprobs_mode` that reports no log-probabilities.
    """
    if logprobs_mode not in _MODES:
        raise InputError(
            f"logprobs_mode={logprobs_mode!r} reports no log-probabilities; build the engine with "
            f"{' or '.join(map(repr, _MODES))}"
        )
    temperature = float(sampling["temperature"])
    return temperature if _MODES[logprobs_mode] and temperature > 0 else 1.0


def irreproducible(sampling: Mapping[str, Any], logprobs_mode: str) -> list[str]:
    """One clause per parameter under which the reported value is not the log-probability of the token that was drawn, as
    softmax(logits / temperature) gives it; each with the way out. Greedy sampling (temperature 0) is reported at temperature 1."""
    clauses = [
        f"{name}={sampling[name]!r} (sample with {neutral[0]!r})"
        for name, neutral in NEUTRAL.items()
        if sampling[name] not in neutral
    ]
    temperature = sampling["temperature"]
    if temperature not in (0, 1) and logprob_temperature(sampling, logprobs_mode) == 1:
        clauses.insert(
            0,
            f"temperature={temperature} with logprobs_mode={logprobs_mode!r}, which ignores it (build the engine with "
            "logprobs_mode='processed_logprobs')",
        )
    return clauses
