"""vLLM's entry point. A module of its own, so that merely installing the package imports and changes nothing in an engine."""

import os

declined = False
"""Whether vLLM has asked in vain: an `import mindspeed_tpi` that follows registers late."""


def register() -> None:
    """Load the plugin if `MINDSPEED_TPI` is set to anything but 0; called by vLLM in every process it starts."""
    global declined
    declined = os.environ.get("MINDSPEED_TPI", "") == ""
    if not declined and os.environ["MINDSPEED_TPI"] != "0":
        from mindspeed_tpi.integrations.vllm import register as register_plugin

        register_plugin()
