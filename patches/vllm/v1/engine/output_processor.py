"""Each answer remembers how it was sampled, so that a rollout record can say it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from mindspeed_tpi.patches.vllm._versions import UNTIL, VERSIONS
from mindspeed_tpi.patching import Patch

SAMPLING = "tpi_sampling"
"""Attribute of a RequestOutput: the SamplingParams of its request."""


def _from_new_request(original: Any) -> Any:
    function = original.__func__

    @wraps(function)
    def from_new_request(cls: Any, tokenizer: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        state = function(cls, tokenizer, request, *args, **kwargs)
        setattr(state, SAMPLING, request.sampling_params)
        return state

    return classmethod(from_new_request)


def _new_request_output(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def new_request_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        setattr(output, SAMPLING, getattr(self, SAMPLING, None))
        return output

    return new_request_output


_STATE = "vllm.v1.engine.output_processor:RequestState"
_REASON = "no bits: an answer does not say how it was sampled, and a trainer must refuse what it cannot reproduce"
PATCHES = (
    Patch(
        target=f"{_STATE}.from_new_request",
        factory=_from_new_request,
        reason=_REASON,
        versions=VERSIONS,
        parameters=(
            "cls",
            "tokenizer",
            "request",
            "prompt",
            "parent_req",
            "request_index",
            "queue",
            "log_stats",
            "stream_interval",
        ),
        until=UNTIL,
        kind="wrap",
        anytime=True,
    ),
    Patch(
        target=f"{_STATE}._new_request_output",
        factory=_new_request_output,
        reason=_REASON,
        versions=VERSIONS,
        parameters=(
            "self",
            "external_req_id",
            "outputs",
            "finished",
            "kv_transfer_params",
            "ec_transfer_params",
            "error",
        ),
        until=UNTIL,
        kind="wrap",
        anytime=True,
    ),
)
