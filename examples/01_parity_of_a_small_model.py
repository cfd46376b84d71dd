"""Logdiff of a small random model, with stock numerics and with parity: about a minute on two cores.

A Qwen3 model with random weights is written to a temporary directory, vLLM samples from it, Megatron-core recomputes the
log-probabilities of the sampled tokens, and both are compared: `python examples/01_parity_of_a_small_model.py`.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from mindspeed_tpi.page import text_table
from mindspeed_tpi.parity import driver, prompts, report
from mindspeed_tpi.parity.request import Request


def write_random_model(path: str) -> None:
    """Weights large enough for the order of operations to show."""
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        initializer_range=0.08,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)


def main() -> int:
    with tempfile.TemporaryDirectory() as model:
        write_random_model(model)
        request = Request(
            model=model,
            prompts=tuple(prompts.random_prompts(count=8, lengths=(16, 200), vocab=512, seed=0)),
            max_new_tokens=32,
            temperature=1.0,
        )
        result = driver.run(request, stock=request, announce=print)
    print(text_table(report.rows(result)))
    print(report.verdict(result))
    return 0 if result.exact else 1


if __name__ == "__main__":
    sys.exit(main())
