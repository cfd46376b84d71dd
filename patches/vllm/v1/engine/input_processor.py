"""Requests whose tokens are not drawn from the distribution that a trainer recomputes, refused where every request enters."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from mindspeed_tpi import sampling, strict
from mindspeed_tpi.errors import RequestError
from mindspeed_tpi.patches.vllm._versions import UNTIL, VERSIONS
from mindspeed_tpi.patching import Patch


def _validate_params(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def validate_params(self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm import SamplingParams

        result = original(self, params, *args, **kwargs)
        if isinstance(params, SamplingParams):
            clauses = sampling.irreproducible(sampling.document(params), self.model_config.logprobs_mode)
            if clauses:
                strict.outside(
                    f"sampling with {'; '.join(clauses)}. What a request leaves out, generation_config.json of the model decides: "
                    "start the engine with generation_config='vllm'",
                    RequestError,
                )
        return result

    return validate_params


PATCHES = (
    Patch(
        target="vllm.v1.engine.input_processor:InputProcessor._validate_params",
        factory=_validate_params,
        reason="no bits: what a trainer cannot reproduce must be named before it is sampled",
        versions=VERSIONS,
        parameters=("self", "params", "supported_tasks"),
        until=UNTIL,
        kind="wrap",
        anytime=True,
    ),
)
