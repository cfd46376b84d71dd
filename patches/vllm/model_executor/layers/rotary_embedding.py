"""Rotary embeddings with f32 tables (upstream rounds cos and sin to the model's dtype)."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi import ops
from mindspeed_tpi.errors import ParityError
from mindspeed_tpi.ops import RopeConfig

CLASSES = {
    "RotaryEmbedding": "default",
    "LinearScalingRotaryEmbedding": "linear",
    "Llama3RotaryEmbedding": "llama3",
    "YaRNScalingRotaryEmbedding": "yarn",
}


@cache
def rotary_class(name: str) -> type[Any]:
    """The class that stands in for vLLM's rotary embedding class of that name (a key of `CLASSES`)."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding

    class ContractRotaryEmbedding(getattr(rotary_embedding, name)):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if not self.is_neox_style:
                raise ParityError("interleaved rope (is_neox_style=False) is outside the numerics contract")
            config = RopeConfig.from_hf(get_current_vllm_config().model_config.hf_text_config.to_dict())
            here = (CLASSES[name], self.rotary_dim, float(self.base))
            there = (config.scaling, config.rotary_dim, config.theta)
            if here != there:
                raise ParityError(
                    f"this layer's rope (scaling, rotary_dim, theta) {here} is not that of the model's config.json "
                    f"{there}; one rope for all layers is what the numerics contract covers"
                )
            self.tpi_rope = config
            cos, sin = ops.rope_tables(config)
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)

        def _compute_cos_sin_cache(self) -> Tensor:
            return torch.empty(0)  # upstream's own table stays empty: nothing can read it by mistake

        def forward_native(
            self, positions: Tensor, query: Tensor, key: Tensor | None = None
        ) -> tuple[Tensor, Tensor | None]:
            return self._rotate(positions, query), None if key is None else self._rotate(positions, key)

        forward_cpu = forward_native

        def _rotate(self, positions: Tensor, x: Tensor) -> Tensor:
            heads = x.view(positions.shape[0], -1, self.head_size)
            return ops.rope(heads, self.cos, self.sin, positions).view(x.shape)

    return ContractRotaryEmbedding


def built_rope(model: Any) -> RopeConfig:
    """What the rotary tables of a loaded vLLM model are made from, read from its modules.

    Raises:
        ParityError: no rotary embedding of ours, several that differ, or a table that is not what its constants give.
    """
    modules = [m for m in model.modules() if hasattr(m, "tpi_rope")]
    configs: set[RopeConfig] = {module.tpi_rope for module in modules}
    if len(configs) != 1:
        raise ParityError(
            f"the model has {len(configs)} different rotary tables; the numerics contract covers one for all layers"
        )
    (config,) = configs
    for module in modules:
        for name, table in zip(("cos", "sin"), ops.rope_tables(config), strict=True):
            if not torch.equal(getattr(module, name), table):
                raise ParityError(
                    f"the rotary table {name} of the loaded model is not that of {config}: it was changed after loading"
                )
    return config
