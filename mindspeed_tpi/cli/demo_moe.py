"""The shapes of Qwen3-30B-A3B, two layers with random weights, stock and parity side by side.

Hidden 2048, 32 query and 4 KV heads of 128, 128 experts of width 768 of which a token uses 8, vocabulary 151,936, bfloat16. The
checkpoint (3.7 GB) is made once and kept. Exit status as for `demo`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from mindspeed_tpi.cli.demo import default_cache, made_once, show
from mindspeed_tpi.parity import driver, prompts
from mindspeed_tpi.parity.request import EngineOptions, Request

RECIPE = 1  # number of the cached checkpoint; raise it when it is made differently
LAYERS = 2
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_sliding_window": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "dtype": "bfloat16",
}
PROMPTS, LENGTHS, NEW_TOKENS, STOCK_PROMPTS = 12, (16, 128), 24, 3
ENGINE = EngineOptions(
    max_num_seqs=12, max_num_batched_tokens=128, block_size=32, kv_cache_blocks=48, max_model_len=512
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cache", type=Path, help="where the checkpoint is kept (default as for the command demo)")
    parser.add_argument(
        "--out", type=Path, default=Path("out/moe"), help="directory of the results (default %(default)s)"
    )
    parser.add_argument("--train", default="tp=1", help="layout of the training side (default %(default)s)")
    parser.add_argument("--rollout", default="tp=1", help="layout of the rollout side (default %(default)s)")
    parser.add_argument("--no-stock", action="store_true", help="leave the stock run out")


def run(options: argparse.Namespace) -> int:
    model = prepare(options.cache or default_cache())
    request = Request(
        model=str(model),
        prompts=tuple(map(tuple, prompts.random_prompts(PROMPTS, LENGTHS, int(str(CONFIG["vocab_size"])), seed=0))),
        max_new_tokens=NEW_TOKENS,
        temperature=1.0,
        train=options.train,
        rollout=options.rollout,
        engine=ENGINE,
    )
    few = replace(request, prompts=request.prompts[:STOCK_PROMPTS], train="tp=1", rollout="tp=1")
    result = driver.run(
        request,
        stock=None if options.no_stock else few,  # stock bf16 is slow on CPUs without bf16 instructions
        announce=lambda line: print(line, file=sys.stderr),
    )
    return show(result, options.out, "mindspeed-tpi demo-moe", must_happen=("prompts_chunked",))


def prepare(cache: Path) -> Path:
    """The checkpoint with its configuration, made once and kept in `cache`."""
    return made_once(cache / f"qwen3-30b-a3b-{LAYERS}-layers-{RECIPE}", "making random weights in", _write)


def _write(target: Path) -> None:
    (target / "config.json").write_text(json.dumps(CONFIG, indent=2), encoding="utf-8")
    shards = list(_shards())
    index: dict[str, str] = {}
    for number, shapes in enumerate(tqdm(shards, desc="weights", unit="shard")):
        generator = torch.Generator().manual_seed(number)
        name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors = {key: _random(key, shape, generator) for key, shape in shapes.items()}
        save_file(tensors, target / name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, name)
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Norm weights 1 ± 0.2; matrices wide enough for a distribution that is far from uniform; two router rows are equal, so
    that their experts tie."""
    if len(shape) == 1:
        return (1 + 0.2 * torch.randn(shape, generator=generator)).bfloat16()
    scale = 0.06 if name == "lm_head.weight" else 0.03
    value = torch.empty(shape, dtype=torch.bfloat16).normal_(0, scale, generator=generator)
    if name.endswith("mlp.gate.weight"):
        value[7] = value[3]
    return value


def _shards() -> Iterator[dict[str, tuple[int, ...]]]:
    """Names and shapes of every tensor, file by file."""
    hidden, heads, groups, dim, ffn, vocab, experts = 2048, 32, 4, 128, 768, 151936, 128
    yield {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (heads * dim, hidden),
            "self_attn.k_proj.weight": (groups * dim, hidden),
            "self_attn.v_proj.weight": (groups * dim, hidden),
            "self_attn.o_proj.weight": (hidden, heads * dim),
            "self_attn.q_norm.weight": (dim,),
            "self_attn.k_norm.weight": (dim,),
            "mlp.gate.weight": (experts, hidden),
        }
        for expert in range(experts):
            shapes |= {f"mlp.experts.{expert}.{part}_proj.weight": (ffn, hidden) for part in ("gate", "up")}
            shapes[f"mlp.experts.{expert}.down_proj.weight"] = (hidden, ffn)
        yield {prefix + name: shape for name, shape in shapes.items()}
    yield {"lm_head.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
