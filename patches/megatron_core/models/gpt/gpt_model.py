"""Where a GPTModel is built and run: refusal of what is not served, and its rotary tables."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from mindspeed_tpi import ops
from mindspeed_tpi.parallel import logprob as heads
from mindspeed_tpi.patches.megatron_core import _checkpoint, _coverage
from mindspeed_tpi.patches.megatron_core.support import (
    UNTIL,
    VERSIONS,
    check_vocab,
    gradient_row_group,
    outside,
    real_vocab,
    served,
)
from mindspeed_tpi.patches.megatron_core.tensor_parallel.cross_entropy import current_temperature
from mindspeed_tpi.patches.megatron_core.tensor_parallel.layers import head_weight
from mindspeed_tpi.patching import Patch


def init(original: Callable[..., None]) -> Callable[..., None]:
    """`GPTModel.__init__`: checks the configuration first, and gives the rotary embedding its `rope_config` last."""
    signature = inspect.signature(original)

    def gpt_model_init(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        ours = served(bound.arguments["config"])
        if ours:
            check_vocab(bound.arguments["config"], bound.arguments["vocab_size"])
            kind = bound.arguments["position_embedding_type"]
            if kind not in ("rope", "yarn", "none"):
                outside(f"a Megatron-core model with position_embedding_type={kind!r} (use 'rope' or 'yarn')")
        original(*args, **kwargs)
        model = bound.arguments["self"]
        if ours and hasattr(model, "rotary_pos_emb"):
            model.rotary_pos_emb.rope_config = rope_config(model, bound.arguments)
            _checkpoint.BUILT.add(model)
        if ours:
            _checkpoint.attach(model)
            _coverage.built(model)

    return gpt_model_init


def forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """`GPTModel.forward` and `TransformerBlock.forward`: upstream's, after a look at what will run."""

    @wraps(original)
    def checked_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not served(self.config):
            return original(self, *args, **kwargs)
        labels = kwargs.get("labels", args[4] if len(args) > 4 else None)
        logits = getattr(self, "post_process", False) and hasattr(self, "output_layer") and labels is None
        return _coverage.forward_pass(self, lambda: original(self, *args, **kwargs), logits)

    return checked_forward


def postprocess(original: Callable[..., Any]) -> Callable[..., Any]:
    """`GPTModel._postprocess`: with labels and more logits than one chunk of the fused head, the loss straight from the hidden
    states. The bits are those of logits and `compute_language_model_loss`; [tokens, vocabulary] is never held."""
    signature = inspect.signature(original)

    @wraps(original)
    def fused_postprocess(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        model, options = bound.args[0], bound.arguments
        if not _fusible(model, options):
            return original(*args, **kwargs)
        layer = model.output_layer
        weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
        hidden, labels = options["hidden_states"], options["labels"].t()
        logprob = heads.linear_logprob(
            hidden.flatten(0, 1),
            head_weight(layer, layer.weight if weight is None else weight),
            labels.flatten(),
            temperature=current_temperature(),
            group=layer.tp_group,
            sequence_parallel=layer.sequence_parallel,
            vocab=real_vocab(layer.config, layer.output_size),
            batch=labels.shape[1],
            row_group=gradient_row_group(),
        )
        return -logprob.view(labels.shape).t().contiguous()

    return fused_postprocess


def _fusible(model: Any, options: dict[str, Any]) -> bool:
    """Whether a loss of more than one chunk of logits is wanted, and nobody but upstream's own loss would see the logits."""
    from megatron.core.config_logger import has_config_logger_enabled
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    labels, layer = options["labels"], getattr(model, "output_layer", None)
    if labels is None or layer is None or not served(model.config):
        return False
    return (
        labels.numel() * layer.output_size_per_partition > heads.CHUNK_ELEMENTS
        and type(layer) is ColumnParallelLinear
        and layer.bias is None
        and not (layer.gather_output or options["runtime_gather_output"] or options.get("mtp_in_postprocess"))
        and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)
        and getattr(model.compute_language_model_loss, "__func__", None) is LanguageModule.compute_language_model_loss
        and not has_config_logger_enabled(model.config)
    )


def rope_config(model: Any, arguments: dict[str, Any]) -> ops.RopeConfig:
    """The rotary embedding that a GPTModel's constructor arguments and configuration describe.

    Megatron-core's llama3 scaling has fixed constants (`RotaryEmbedding._apply_scaling`); a checkpoint with others binds
    its own `rope_config` after construction.
    """
    config = model.config
    scaling, parameters = "default", {}
    if model.position_embedding_type == "yarn":
        scaling = "yarn"
        named = {
            "factor": "yarn_rotary_scaling_factor",
            "original_max_position_embeddings": "yarn_original_max_position_embeddings",
            "beta_fast": "yarn_beta_fast",
            "beta_slow": "yarn_beta_slow",
            "mscale": "yarn_mscale",
            "mscale_all_dim": "yarn_mscale_all_dim",
            "truncate": "yarn_correction_range_round_to_int",
        }
        values = {name: getattr(config, field, None) for name, field in named.items()}
        parameters = {name: float(value) for name, value in values.items() if value is not None}
    elif arguments["rope_scaling"]:
        scaling = "llama3"
        parameters = {
            "factor": float(arguments["rope_scaling_factor"]),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192.0,
        }
    elif arguments["seq_len_interpolation_factor"] is not None:
        scaling, parameters = "linear", {"factor": float(arguments["seq_len_interpolation_factor"])}
    fraction = min(arguments["rotary_percent"], 1.0)
    return ops.RopeConfig(
        rotary_dim=int(config.kv_channels * fraction),
        theta=float(arguments["rotary_base"]),
        max_position=model.max_sequence_length,
        scaling=scaling,
        parameters=tuple(sorted(parameters.items())),
    )


PATCHES: tuple[Patch, ...] = (
    Patch(
        target="megatron.core.models.gpt.gpt_model:GPTModel.__init__",
        factory=init,
        reason="a configuration that is not served must be named before the model runs; rotary tables need float64 angles",
        versions=VERSIONS,
        parameters=None,  # only passed through
        until=UNTIL,
        kind="wrap",
    ),
    Patch(
        target="megatron.core.models.gpt.gpt_model:GPTModel.forward",
        factory=forward,
        reason="no bits: what was replaced or wrapped since the model was built must be named before it runs",
        versions=VERSIONS,
        parameters=None,  # only passed through
        until=UNTIL,
        kind="wrap",
    ),
    Patch(
        target="megatron.core.models.gpt.gpt_model:GPTModel._postprocess",
        factory=postprocess,
        reason="no bits: the logits of a long batch, and their gradient, are larger than all other activations",
        versions=VERSIONS,
        parameters=None,  # only passed through
        until=UNTIL,
        kind="wrap",
        optional=True,
    ),
    Patch(
        target="megatron.core.transformer.transformer_block:TransformerBlock.forward",
        factory=forward,
        reason="no bits: the same, for a block in a model of the user's own",
        versions=VERSIONS,
        parameters=None,  # only passed through
        until=UNTIL,
        kind="wrap",
    ),
)
