"""Which modules of a loaded model the contract does not serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_tpi.patches.vllm.model_executor.custom_op import CLASS_MAKERS
from mindspeed_tpi.patches.vllm.v1.attention.backends.cpu_attn import attention_backend_class

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "glm4_moe")
CONTAINERS = (
    "torch.nn.modules.container",
    *(f"vllm.model_executor.models.{family}" for family in _FAMILIES),
)

WAY_OUT = "Use a model and settings that are covered"


def calling_operators() -> dict[str, Callable[..., Any]]:
    """vLLM's operators that only call Python, by which it hides attention from the compiler → the function."""
    from vllm.model_executor.layers.attention import attention

    names = ("unified_kv_cache_update", "unified_attention_with_output")
    return {f"vllm.{name}.default": getattr(attention, name) for name in names}


def uncovered(model: Any) -> list[str]:
    """`name (class)` of every module of a vLLM model that computes with upstream's numerics.

    A module is covered when it is served by a class or method of ours, or when it only calls others: a container, or a
    layer of one of the families that were checked.
    """
    found: list[str] = []
    _walk("", model, found)
    return found


def changed_logits(config: Any) -> list[str]:
    """What an engine's configuration does to the logits before it samples, outside a request's sampling parameters."""
    found = [f"logits processor {processor}" for processor in config.model_config.logits_processors or ()]
    if getattr(config, "watermark_config", None) is not None:
        found.append("watermarking")
    return found


def _walk(name: str, module: Any, found: list[str]) -> None:
    if _served(module):
        return
    kind = type(module)
    children = list(module.named_children())
    container = kind.__module__ in CONTAINERS
    if not container or not children or module._parameters:
        found.append(f"{name or 'model'} ({kind.__name__})")
        return
    for child_name, child in children:
        _walk(f"{name}.{child_name}" if name else child_name, child, found)


def _served(module: Any) -> bool:
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

    kind = type(module)
    if isinstance(module, LinearBase):
        return type(module.quant_method) is UnquantizedLinearMethod and hasattr(module, "tpi_leaves")
    if isinstance(module, VocabParallelEmbedding):
        return type(module.quant_method) is UnquantizedEmbeddingMethod and hasattr(module, "tpi_leaves")
    if kind is MoERunner:
        return hasattr(module, "tpi_route")
    if isinstance(module, Attention):
        return type(module.impl) is attention_backend_class().get_impl_cls()
    if isinstance(module, LogitsProcessor):
        return kind is LogitsProcessor and module.scale == 1.0 and module.soft_cap is None
    return kind in {make() for make in CLASS_MAKERS.values()}
