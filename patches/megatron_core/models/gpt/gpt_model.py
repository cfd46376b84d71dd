"""Where a GPTModel is built and run: refusal of what is not served, and its rotary tables."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from mindspeed_tpi import ops
from mindspeed_tpi.patches.megatron_core import _checkpoint, _coverage
from mindspeed_tpi.patches.megatron_core.support import UNTIL, VERSIONS, check_vocab, outside, served
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
        target="megatron.core.transformer.transformer_block:TransformerBlock.forward",
        factory=forward,
        reason="no bits: the same, for a block in a model of the user's own",
        versions=VERSIONS,
        parameters=None,  # only passed through
        until=UNTIL,
        kind="wrap",
    ),
)
