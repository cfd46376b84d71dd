"""Patches of vLLM 0.32 on CPU: what computes in a decoder runs the operators of the contract.

Extension points (`register_oot`, `register_backend`, `worker_cls`) are used where vLLM has them; the tables behind them
are patched, so that they are declared, checked and undone like every other patch.
"""

from __future__ import annotations

from mindspeed_tpi.patches.vllm._coverage import KEPT
from mindspeed_tpi.patches.vllm.config import parallel
from mindspeed_tpi.patches.vllm.model_executor import custom_op
from mindspeed_tpi.patches.vllm.model_executor.layers import linear, vocab_parallel_embedding
from mindspeed_tpi.patches.vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from mindspeed_tpi.patches.vllm.model_executor.layers.fused_moe.router import gate_linear
from mindspeed_tpi.patches.vllm.model_executor.layers.fused_moe.runner import moe_runner
from mindspeed_tpi.patches.vllm.model_executor.models import qwen2_moe
from mindspeed_tpi.patches.vllm.platforms import cpu
from mindspeed_tpi.patches.vllm.v1.attention.backends import registry
from mindspeed_tpi.patches.vllm.v1.engine import input_processor, output_processor
from mindspeed_tpi.patches.vllm.v1.sample import sampler
from mindspeed_tpi.patches.vllm.v1.sample.ops import logprobs, topk_topp_sampler
from mindspeed_tpi.patching import Patch

__all__ = ["KEPT", "PATCHES"]

PATCHES: tuple[Patch, ...] = (
    *custom_op.PATCHES,
    *linear.PATCHES,
    *vocab_parallel_embedding.PATCHES,
    *gate_linear.PATCHES,
    *unquantized_fused_moe_method.PATCHES,
    *moe_runner.PATCHES,
    *qwen2_moe.PATCHES,
    *registry.PATCHES,
    *sampler.PATCHES,
    *topk_topp_sampler.PATCHES,
    *logprobs.PATCHES,
    *input_processor.PATCHES,
    *output_processor.PATCHES,
    *parallel.PATCHES,
    *cpu.PATCHES,
)
