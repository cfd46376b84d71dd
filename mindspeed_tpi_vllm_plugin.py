"""vLLM's entry point. A module of its own, so that merely installing the package imports and changes nothing in an engine."""

import os


def register() -> None:
    """Load the plugin if `MINDSPEED_TPI` is set to anything but 0; called by vLLM in every process it starts."""
    if os.environ.get("MINDSPEED_TPI", "0") not in ("", "0"):
        from mindspeed_tpi.integrations.vllm import register as register_plugin

        register_plugin()
