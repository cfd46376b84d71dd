"""Which modules of a loaded vLLM model the contract does not serve, by the code that will run and not by names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mindspeed_tpi.coverage import Known, listed
from mindspeed_tpi.errors import ParityError
from mindspeed_tpi.patches.vllm.model_executor.custom_op import CLASS_MAKERS
from mindspeed_tpi.patches.vllm.v1.attention.backends.cpu_attn import attention_backend_class

_MODELS = {
    "llama": ("MLP", "Attention", "DecoderLayer", "Model", "ForCausalLM"),
    "mistral": ("MLP", "Attention", "DecoderLayer", "Model"),
    "qwen2": ("MLP", "Attention", "DecoderLayer", "Model", "ForCausalLM"),
    "qwen3": ("Attention", "DecoderLayer", "ForCausalLM"),
    "qwen2_moe": ("SparseMoeBlock", "Attention", "DecoderLayer", "Model", "ForCausalLM"),
    "qwen3_moe": ("MLP", "SparseMoeBlock", "Attention", "DecoderLayer", "Model", "ForCausalLM"),
    "mixtral": ("MoE", "Attention", "DecoderLayer", "Model", "ForCausalLM"),
    "glm4_moe": ("MLP", "MoE", "Attention", "DecoderLayer", "Model", "ForCausalLM"),
}
_PREFIXES = {"glm4_moe": {"MoE": "Glm4MoE"}}
_METHODS = {"Model": ("forward", "embed_input_ids"), "ForCausalLM": ("forward", "embed_input_ids", "compute_logits")}
_LAYERS = {
    "layers.linear:ColumnParallelLinear": ("forward",),
    "layers.linear:ReplicatedLinear": ("forward",),
    "layers.vocab_parallel_embedding:ParallelLMHead": ("forward",),
    "layers.logits_processor:LogitsProcessor": ("forward", "_apply_head", "_get_logits", "_gather_logits"),
    "layers.attention.attention:Attention": ("forward",),
    "layers.rotary_embedding.common:ApplyRotaryEmb": ("forward_cpu", "forward_native"),
    "layers.fused_moe.routed_experts:RoutedExperts": ("forward",),
    "layers.fused_moe.runner.shared_experts:SharedExperts": ("forward",),
    "custom_op:CustomOp": ("forward", "forward_cpu"),
}
_SAMPLER = (
    "forward",
    "sample",
    "greedy_sample",
    "apply_temperature",
    "apply_logits_processors",
    "apply_penalties",
    "gather_logprobs",
)


def _kept() -> Iterator[str]:
    for model, classes in _MODELS.items():
        family = "".join(part.title() for part in model.split("_"))
        for name in classes:
            owner = _PREFIXES.get(model, {}).get(name, family + name)
            for method in _METHODS.get(name, ("forward",)):
                yield f"vllm.model_executor.models.{model}:{owner}.{method}"
    for owner, methods in _LAYERS.items():
        yield from (f"vllm.model_executor.{owner}.{method}" for method in methods)
    yield from (f"vllm.v1.sample.sampler:Sampler.{method}" for method in _SAMPLER)
    attention = "vllm.model_executor.layers.attention.attention"
    yield from (f"{attention}:{name}" for name in ("unified_kv_cache_update", "unified_attention_with_output"))


KEPT = tuple(_kept())
"""Upstream's code between the operators: it passes tensors on, or (experts, the head's own call) is never called."""

ATTRIBUTES = ("_forward_method", "quant_method", "impl")
"""Those of a module that hold the code which its `forward` calls."""
WAY_OUT = "Use a model and settings that are covered"


def calling_operators() -> dict[str, Callable[..., Any]]:
    """vLLM's operators that only call Python, by which it hides attention from the compiler → the function."""
    from vllm.model_executor.layers.attention import attention

    names = ("unified_kv_cache_update", "unified_attention_with_output")
    return {f"vllm.{name}.default": getattr(attention, name) for name in names}


def uncovered(runner: Any) -> list[str]:
    """`name (class: what)` of every module of a model runner's model and sampler that computes by itself and is not served.

    A module is served when what a call of it would run is a replacement of this package or upstream's own code that was read
    (`KEPT`). Logits processors that are not vLLM's own are named too.
    """
    from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS

    classes = [make() for make in CLASS_MAKERS.values()]
    known = Known("vllm", [getattr(kind, name) for kind in classes for name in ("forward_native", "forward_cpu")])

    def problems(module: torch.nn.Module) -> Iterator[str]:
        return _problems(known, module)

    processors = runner.input_batch.logitsprocs.all
    return [
        *listed(runner.get_model(), problems),
        *(f"sampler {line}" for line in listed(runner.sampler, problems)),
        *(
            f"logits processor {type(processor).__module__}.{type(processor).__qualname__}"
            for processor in processors
            if type(processor) not in BUILTIN_LOGITS_PROCESSORS
        ),
    ]


def changed_logits(config: Any) -> list[str]:
    """What an engine's configuration does to the logits before it samples, outside a request's sampling parameters."""
    found = [f"logits processor {processor}" for processor in config.model_config.logits_processors or ()]
    if getattr(config, "watermark_config", None) is not None:
        found.append("watermarking")
    return found


def _problems(known: Known, module: torch.nn.Module) -> Iterator[str]:
    from vllm.compilation import decorators
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

    kind = type(module)
    call = getattr(kind.__call__, "__code__", None)
    for problem in known.problems(module, ("_forward_method",)):
        if not problem.startswith("__call__ ") or call not in decorators._support_torch_compile.__code__.co_consts:
            yield problem
    methods = {LinearBase: UnquantizedLinearMethod, VocabParallelEmbedding: UnquantizedEmbeddingMethod}
    for base, method in methods.items():
        if isinstance(module, base):
            held = module.quant_method
            if type(held) is not method or "apply" in vars(held):
                yield f"quant_method is {type(held).__qualname__}"
            if not hasattr(module, "tpi_leaves"):
                yield "its weights were not loaded by vLLM"
    if isinstance(module, UnquantizedFusedMoEMethod) and kind is not UnquantizedFusedMoEMethod:
        yield "a method of its own"
    if isinstance(module, MoERunner) and not hasattr(module, "tpi_route"):
        yield "made before mindspeed_tpi's patches"
    if isinstance(module, Attention):
        impl = module.impl
        if (
            type(impl) is not attention_backend_class().get_impl_cls()
            or {"forward", "do_kv_cache_update"} & vars(impl).keys()
        ):
            yield f"impl is {type(impl).__qualname__}"
    if isinstance(module, LogitsProcessor) and (module.scale != 1.0 or module.soft_cap is not None):
        yield f"scale={module.scale}, soft_cap={module.soft_cap}"


def compiled(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules of a model that vLLM calls as a compiled graph, outside any dispatch mode."""
    return [module for module in model.modules() if getattr(module, "do_not_compile", True) is False]


@contextmanager
def run_eagerly_too(model: torch.nn.Module) -> Iterator[None]:
    """Within it every compiled module runs eagerly, where a dispatch mode sees it, and then compiled: both must have the same bits.

    Running twice is safe: a pass writes the same keys and values to the same places of the cache.

    Raises:
        ParityError: at the call, names a module whose graph gives other bits than its Python code.
    """
    modules = compiled(model)
    for module in modules:
        _both(module, next(name for name, other in model.named_modules() if other is module))
    try:
        yield
    finally:
        for module in modules:
            _compiled_again(module)


def _both(module: Any, name: str) -> None:
    eager = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        wanted = eager(*args, **kwargs)
        _compiled_again(module)
        found = module(*args, **kwargs)
        pairs = zip(tree_leaves(wanted), tree_leaves(found), strict=True)
        if not all(torch.equal(_bits(a), _bits(b)) for a, b in pairs if isinstance(a, Tensor)):
            raise ParityError(
                f"outside the numerics contract: the compiled graph of {name} ({type(module).__qualname__}) gives other bits than "
                "its Python code. Set enforce_eager, or drop what changes the graph (a compiler backend or passes of your own)"
            )
        return found

    module.forward, module.do_not_compile = forward, True


def _compiled_again(module: Any) -> None:
    vars(module).pop("forward", None)
    module.do_not_compile = False


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)
