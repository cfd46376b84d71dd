"""Attention over the paged cache: one definition for prefill, chunked prefill and decode.

vLLM resolves the backend by its dotted path, so the class is made when `ContractAttentionBackend` is looked up here.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from mindspeed_tpi import ops
from mindspeed_tpi.errors import ParityError

PATH = f"{__name__}.ContractAttentionBackend"


@cache
def attention_backend_class() -> type[Any]:
    """The backend that stands in for vLLM's `CPUAttentionBackend`; upstream's metadata and cache shape are kept."""
    from vllm.v1.attention.backend import AttentionType, MultipleOf
    from vllm.v1.attention.backends.cpu_attn import (
        CPUAttentionBackend,
        CPUAttentionBackendImpl,
        CPUAttentionMetadataBuilder,
    )

    class ContractAttentionImpl(CPUAttentionBackendImpl):  # type: ignore[misc]
        def __init__(
            self,
            num_heads: int,
            head_size: int,
            scale: float,
            num_kv_heads: int,
            alibi_slopes: list[float] | None,
            sliding_window: int | None,
            kv_cache_dtype: str,
            logits_soft_cap: float | None = None,
            attn_type: str = AttentionType.DECODER,
            kv_sharing_target_layer_name: str | None = None,
            sinks: Tensor | None = None,
        ) -> None:
            refused = {
                f"attention type {attn_type!r}": attn_type != AttentionType.DECODER,
                "ALiBi": alibi_slopes is not None,
                "attention logit softcap": bool(logits_soft_cap),
                "attention sinks": sinks is not None,
                "KV-cache sharing between layers": kv_sharing_target_layer_name is not None,
                f"head_dim {head_size} (a multiple of 8, at most 256)": bool(head_size % 8) or head_size > 256,
            }
            for what, found in refused.items():
                if found:
                    raise ParityError(f"{what} is outside the numerics contract; run with MINDSPEED_TPI=0")
            super().__init__(num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype)
            self.window = sliding_window or 0

        def do_kv_cache_update(
            self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
        ) -> None:
            tokens = slot_mapping.shape[0]
            ops.paged_cache_write(key[:tokens], value[:tokens], kv_cache, slot_mapping)

        def forward(
            self,
            layer: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            kv_cache: Tensor,
            attn_metadata: Any,
            output: Tensor,
            output_scale: Tensor | None = None,
            output_block_scale: Tensor | None = None,
        ) -> Tensor:
            if attn_metadata is None:  # warm-up, or a step without requests: what follows must not meet a NaN
                return output.zero_()
            if not attn_metadata.causal or attn_metadata.dynamic_causal is not None:
                raise ParityError("non-causal attention is outside the numerics contract; run with MINDSPEED_TPI=0")
            tokens = attn_metadata.num_actual_tokens
            output[:tokens] = ops.paged_attention(
                query[:tokens],
                kv_cache,
                attn_metadata.block_table,
                attn_metadata.query_start_loc,
                attn_metadata.seq_lens,
                scale=self.scale,
                window=self.window,
            )
            return output

    class ContractMetadataBuilder(CPUAttentionMetadataBuilder):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.head_dim = 128  # upstream's plan for its own kernel, which serves few sizes and is not used here

    class ContractAttentionBackend(CPUAttentionBackend):  # type: ignore[misc]
        supported_kv_cache_dtypes = ["auto"]

        @staticmethod
        def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
            return [32, 64, MultipleOf(128)]

        @classmethod
        def supports_non_causal(cls) -> bool:
            return False

        @classmethod
        def supports_attn_type(cls, attn_type: str) -> bool:
            return bool(attn_type == AttentionType.DECODER)

        @staticmethod
        def get_impl_cls() -> type[Any]:
            return ContractAttentionImpl

        @staticmethod
        def get_builder_cls() -> type[Any]:
            return ContractMetadataBuilder

    return ContractAttentionBackend


def __getattr__(name: str) -> Any:
    if name == "ContractAttentionBackend":
        return attention_backend_class()
    raise AttributeError(name)
