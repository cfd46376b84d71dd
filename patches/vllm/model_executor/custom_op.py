"""vLLM's table of out-of-tree classes (`CustomOp.register_oot`): norm, rotary embedding and activation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mindspeed_tpi.errors import PatchError
from mindspeed_tpi.patches.vllm._versions import UNTIL, VERSIONS
from mindspeed_tpi.patches.vllm.model_executor.layers.activation import silu_and_mul_class
from mindspeed_tpi.patches.vllm.model_executor.layers.layernorm import rms_norm_class
from mindspeed_tpi.patches.vllm.model_executor.layers.rotary_embedding import CLASSES, rotary_class
from mindspeed_tpi.patching import Patch

CLASS_MAKERS: dict[str, Callable[[], type[Any]]] = {
    "RMSNorm": rms_norm_class,
    "SiluAndMul": silu_and_mul_class,
    **{name: partial(rotary_class, name) for name in CLASSES},
}


class _Table(dict[str, Any]):
    """The table with our classes added; each is made at its first use, when the class it replaces has been imported."""

    def __getitem__(self, name: str) -> Any:
        if name in CLASS_MAKERS:
            made = CLASS_MAKERS[name]()
            made.name = name
            return made
        return super().__getitem__(name)


def _op_registry_oot(original: dict[str, Any]) -> dict[str, Any]:
    taken = sorted(set(original) & set(CLASS_MAKERS))
    if taken:
        raise PatchError(
            f"{', '.join(taken)}: another plugin has registered a class for it; load one of the two plugins"
        )
    return _Table({**original, **CLASS_MAKERS})


PATCHES = (
    Patch(
        target="vllm.model_executor.custom_op:op_registry_oot",
        factory=_op_registry_oot,
        reason="RMSNorm, SwiGLU and RoPE round in other places, and RoPE tables are in the model's dtype",
        versions=VERSIONS,
        parameters=None,
        until=UNTIL,
        anytime=True,
    ),
)
