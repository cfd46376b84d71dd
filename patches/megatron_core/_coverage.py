"""Which modules of a built Megatron-core model the contract does not serve, by the code that will run and not by names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch

from mindspeed_tpi import envs, strict
from mindspeed_tpi.coverage import Known, Watch, listed
from mindspeed_tpi.patches.megatron_core.extensions.transformer_engine import GroupedLinear, layer_norm_linear_forward
from mindspeed_tpi.patches.megatron_core.transformer.torch_norm import RMSNorm

_CORE = "megatron.core."
_KEPT = {
    "models.gpt.gpt_model:GPTModel": ("_preprocess", "shared_embedding_or_output_weight"),
    "models.common.language_module.language_module:LanguageModule": (
        "compute_language_model_loss",
        "shared_embedding_or_output_weight",
    ),
    "models.common.embeddings.language_model_embedding:LanguageModelEmbedding": ("forward",),
    "transformer.transformer_block:TransformerBlock": (
        "__call__",
        "_checkpointed_forward",
        "_get_layer",
        "_should_call_local_cudagraph",
    ),
    "transformer.transformer_layer:TransformerLayer": (
        "__call__",
        "_should_call_local_cudagraph",
        "forward",
        "_forward_attention",
        "_forward_mlp",
        "_forward_post_mlp",
        "_forward_pre_mlp_layernorm",
    ),
    "transformer.module:GraphableMegatronModule": (
        "__call__",
        "_should_call_local_cudagraph",
        "_should_call_te_cudagraph",
    ),
    "transformer.module:Float16Module": ("forward",),
    "transformer.attention:Attention": (
        "forward",
        "_checkpointed_attention_forward",
        "_adjust_key_value_for_inference",
    ),
    "transformer.identity_op:IdentityOp": ("forward",),
    "transformer.identity_op:IdentityFuncOp": ("forward",),
    "transformer.moe.router:Router": ("forward", "routing", "gating"),
    "transformer.moe.router:TopKRouter": ("forward", "routing", "gating"),
    "transformer.moe.experts:SequentialMLP": ("forward",),
    "transformer.moe.experts:GroupedMLP": ("forward",),
    "transformer.moe.experts:TEGroupedMLP": ("forward",),
    "fusions.fused_softmax:FusedScaleMaskSoftmax": ("forward",),
    "distributed.data_parallel_base:_BaseDataParallel": ("forward",),
}
KEPT = tuple(f"{_CORE}{owner}.{name}" for owner, names in _KEPT.items() for name in names)
"""Upstream's code between a model's modules: it passes tensors on, or (routers, experts, the softmax) is never called."""

_FUNCTIONS = ("self_attn_bda", "cross_attn_bda", "mlp_bda")
"""Attributes of a TransformerLayer that hold a function of its spec; an IdentityFuncOp is among its modules."""

_WAY_OUT = "Build the model from get_gpt_layer_local_spec and take log-probabilities from mindspeed_tpi.logprobs or the model's own loss"


def uncovered(model: torch.nn.Module) -> list[str]:
    """`name (class: what)` of every module of a Megatron-core model that computes by itself and is not served.

    A module is served when what a call of it would run is a replacement of this package or upstream's own code that was read
    (`KEPT`): its `forward`, own or inherited, and its other methods that a replacement or upstream calls. Hooks may only look.
    """
    own = RMSNorm.forward, layer_norm_linear_forward, GroupedLinear.forward
    known = Known("megatron_core", (*own, torch.nn.Dropout.forward))

    def problems(module: torch.nn.Module) -> Iterator[str]:
        yield from known.problems(module, _FUNCTIONS)
        if isinstance(module, torch.nn.Dropout) and module.p:
            yield f"p={module.p}"

    return listed(model, problems)


def check_covered(model: torch.nn.Module) -> None:
    """Refuse a built model with modules outside the contract; outside strict mode, one warning.

    Raises:
        ParityError: names each such module, its class, and what of it is not served.
    """
    strays = uncovered(model)
    if strays:
        strict.outside(
            f"modules {', '.join(strays)}. Build the model from get_gpt_layer_local_spec, after mindspeed_tpi has applied its "
            "patches; MINDSPEED_TPI=1 runs them as they are"
        )


class _Passes:
    """One model's forward passes: its modules as they were last checked, and which pass is next."""

    def __init__(self) -> None:
        self._watch = Watch(*_FUNCTIONS)
        self._counts = [0, 0]
        """Without and with gradients."""
        self._open: strict.Checked | None = None

    def look(self, model: torch.nn.Module) -> None:
        """Check the model again if anything about its modules has changed since the last time."""
        self._watch.look(model, lambda: check_covered(model))

    def run(self, model: torch.nn.Module, call: Callable[[], Any], logits: bool) -> Any:
        if self._open is not None:
            self._open.close()
            self._open = None
        kind = torch.is_grad_enabled()
        due = strict.due(self._counts[kind])
        self._counts[kind] += 1
        if not due or not envs.strict():
            return call()
        names = {id(module): name or "model" for name, module in model.named_modules()}
        self._open = strict.Checked("megatron_core", names, _WAY_OUT)
        return self._open.run(call, logits)


_passes: WeakKeyDictionary[torch.nn.Module, _Passes] = WeakKeyDictionary()
_within: ContextVar[bool] = ContextVar("within", default=False)
_number = 0


def pass_number() -> int:
    """Forward passes of models that this process has begun: what was computed from a tensor holds within one of them."""
    return _number


def built(model: torch.nn.Module) -> None:
    """Check a model that has just been built."""
    strict.check_patches()
    strict.check_aliases()
    check_covered(model)


def forward_pass(model: torch.nn.Module, call: Callable[[], Any], logits: bool) -> Any:
    """Run a forward pass of a model, or of a block that no model of ours holds, after asking whether it is still covered.

    Args:
        call: the pass. logits: its result is logits.

    Raises:
        ParityError: strict mode, and it is not; or an operator outside the contract ran in a pass that is checked.
    """
    global _number
    if _within.get():
        return call()
    token = _within.set(True)
    _number += 1
    try:
        strict.check_patches()
        passes = _passes.setdefault(model, _Passes())
        passes.look(model)
        return passes.run(model, call, logits)
    finally:
        _within.reset(token)
