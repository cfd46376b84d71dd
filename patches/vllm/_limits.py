"""What the engine's configuration may hold: everything outside the contract is refused by name, before a worker starts."""

from __future__ import annotations

import os
import shutil
from multiprocessing import current_process
from pathlib import Path
from typing import Any

from mindspeed_tpi import contract, envs, weights
from mindspeed_tpi.contract import NumericsContract
from mindspeed_tpi.errors import InputError, ParityError
from mindspeed_tpi.profiles import Profile

DTYPES = ("torch.bfloat16", "torch.float16", "torch.float32")
STOCK_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
CONTRACT_WORKER = "mindspeed_tpi.patches.vllm.v1.worker.cpu_worker.ContractWorker"
OBSERVED_WORKER = "mindspeed_tpi.patches.vllm.v1.worker.cpu_worker.ObservedWorker"
SHARED = "/dev/shm"


def bound_contract(hf_config: Any) -> NumericsContract:
    """This process's contract, bound to the rotary tables of a model (a transformers configuration)."""
    return Profile.from_hf(hf_config.to_dict()).contract()


def check(config: Any) -> None:
    """Refuse a `VllmConfig` the contract does not cover.

    Raises:
        ParityError: names the setting, what is covered, and the way out.
    """
    problems = [f"{what}; {remedy}" for what, remedy in _problems(config)]
    if problems:
        raise ParityError(
            f"outside the numerics contract: {'. '.join(problems)}. (MINDSPEED_TPI=0 runs vLLM's own numerics.)"
        )


_QUEUES = 240 << 20  # bytes that vLLM's message queues ask /dev/shm for, with one worker or several
_EXCHANGE = 8 << 20  # and, over tensor-parallel ranks, each thread's buffers (measured)


def check_shared_memory(config: Any) -> None:
    """Refuse to start workers that /dev/shm has no room for: each would end with an error of its own, in a process of its own.

    Raises:
        ParityError: names what is free, what is needed and the remedy.
    """
    parallel = config.parallel_config
    if parallel.distributed_executor_backend != "mp" or not Path(SHARED).is_dir():
        return
    if current_process().name.startswith("EngineCore"):  # its parent has looked, and part of the room is in use by now
        return
    threads = len(os.sched_getaffinity(0)) if parallel.tensor_parallel_size > 1 else 0
    needed, free = _QUEUES + threads * _EXCHANGE, shutil.disk_usage(SHARED).free
    if free < needed:
        alone = parallel.tensor_parallel_size * parallel.data_parallel_size == 1
        raise ParityError(
            f"vLLM's workers need {needed >> 20} MiB in {SHARED}, which has {free >> 20} MiB free; enlarge it (docker run --shm-size=1g, "
            f"mount -o remount,size=1g {SHARED})"
            + (", or set VLLM_ENABLE_V1_MULTIPROCESSING=0: one process needs none" if alone else "")
        )


def _problems(config: Any) -> list[tuple[str, str]]:
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    hf = model.hf_text_config
    found: list[tuple[str, str]] = []

    def refuse(condition: object, what: str, remedy: str) -> None:
        if condition:
            found.append((what, remedy))

    try:
        profile = Profile.from_hf(hf.to_dict())
    except InputError as error:
        found.append((str(error), "use another model"))
    else:
        for problem in layout_problems(
            profile, parallel.tensor_parallel_size, parallel.data_parallel_size, parallel.enable_expert_parallel
        ):
            found.append((problem, "use another size"))
        rows = profile.rope.max_position
        refuse(
            model.max_model_len > rows,
            f"max_model_len {model.max_model_len} beyond the rotary table of {rows} positions",
            f"set max_model_len to at most {rows}, or max_position_embeddings in config.json to {model.max_model_len}",
        )
        found += _checkpoint_problems(profile, model.model, config.load_config.load_format)
    refuse(model.runner_type != "generate", f"runner {model.runner_type!r}", "use a generating model")
    refuse(str(model.dtype) not in DTYPES, f"dtype {model.dtype}", "use bfloat16, float16 or float32")
    refuse(
        model.head_dtype not in (None, model.dtype),
        f"head_dtype {model.head_dtype}",
        "drop the override: the contract's logits are f32 already",
    )
    refuse(model.quantization, f"quantised weights ({model.quantization})", "use an unquantised model")
    refuse(config.quant_config is not None, "a quantisation config", "use an unquantised model")
    refuse(config.lora_config, "LoRA", "merge the adapter into the weights")
    refuse(config.speculative_config, "speculative decoding", "decode without a draft")
    refuse(config.kv_transfer_config, "KV-cache transfer", "run without a KV connector")
    refuse(cache.cache_dtype != "auto", f"kv_cache_dtype {cache.cache_dtype!r}", "use 'auto'")
    refuse(
        cache.block_size % 16 or (128 % cache.block_size and cache.block_size % 128),
        f"block_size {cache.block_size}",
        "use 32, 64 or a multiple of 128",
    )
    for name in (
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
    ):
        value = getattr(parallel, name)
        refuse(value != 1, f"{name} {value}", "only 1 is covered")
    ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
    refuse(
        ranks > 1 and not model.enforce_eager,
        f"torch.compile over {ranks} ranks",
        "set enforce_eager: exchanges between ranks are not compiled",
    )
    refuse(
        envs.MODE.get() == "audit" and not model.enforce_eager,
        "torch.compile in mode audit, which sees eager operators only",
        "set enforce_eager, or MINDSPEED_TPI=strict",
    )
    refuse(parallel.enable_eplb, "expert load balancing (enable_eplb)", "switch it off")
    refuse(config.aux_output_config.enable_return_routed_experts, "enable_return_routed_experts", "switch it off")
    refuse(
        parallel.worker_cls not in ("auto", STOCK_WORKER, CONTRACT_WORKER),
        f"worker_cls {parallel.worker_cls!r}",
        "leave it at 'auto'",
    )
    refuse(config.use_v2_model_runner, "model runner V2", "set VLLM_USE_V2_MODEL_RUNNER=0")
    refuse(model.use_mla, "multi-head latent attention", "it is not covered")
    scaling = getattr(hf, "llama_4_scaling", None)
    refuse(scaling, f"llama_4_scaling {scaling}", "it is not covered")
    return found


def _checkpoint_problems(profile: Profile, model: str, load_format: str) -> list[tuple[str, str]]:
    """Why the safetensors files of a model directory are not those that a trainer takes, with the way out."""
    directory = Path(model)
    if not directory.is_dir() or load_format not in ("auto", "hf", "safetensors", "mistral"):
        return []
    consolidated = sorted(path.name for path in directory.glob("consolidated*.safetensors"))
    if consolidated and load_format in ("auto", "mistral"):
        return [
            (f"load_format {load_format!r}, with which vLLM takes {consolidated[0]}", "set load_format='safetensors'")
        ]
    try:
        weights.check(directory, profile)
    except InputError as error:
        return [(str(error), "repair the checkpoint")]
    return []


def layout_problems(profile: Profile, tp: int, dp: int, expert_parallel: bool) -> list[str]:
    """Why a model cannot be split over these ranks with equal bits; empty when it can. Each names the sizes that work.

    Without expert parallelism, every expert is split over all tp · dp ranks.
    """
    rules = contract.current()
    moe = profile.moe
    split = {"attention output": profile.heads * profile.head_dim}
    if moe is None or moe.dense_layers:
        split["MLP"] = profile.ffn
    if moe and moe.shared_ffn:
        split["shared expert"] = moe.shared_ffn
    sizes = [
        size
        for size in (1 << i for i in range(rules.max_tp.bit_length()))
        if profile.heads % size == 0
        and (profile.kv_heads % size == 0 or size % profile.kv_heads == 0)
        and all(size <= rules.leaves(length, "tensor").count for length in split.values())
    ]
    found = []
    if tp not in sizes:
        lengths = ", ".join(f"{what} {length}" for what, length in split.items())
        found.append(
            f"tensor_parallel_size {tp} for {profile.heads} heads, {profile.kv_heads} KV heads and sums over {lengths}; "
            f"sizes that work: {', '.join(map(str, sizes))}"
        )
    if dp > 1 and moe is None:
        found.append(f"data_parallel_size {dp} of a model without experts; vLLM has it only with experts")
    if moe and not expert_parallel:
        cut = rules.leaves(moe.ffn, "expert").count
        sizes = [1 << i for i in range(min(cut, rules.max_etp).bit_length())]
        if tp * dp not in sizes:
            found.append(
                f"experts of width {moe.ffn} split over {tp * dp} ranks (tensor_parallel_size · data_parallel_size); "
                f"sizes that work: {', '.join(map(str, sizes))}, or enable_expert_parallel"
            )
    return found
