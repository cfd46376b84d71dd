"""Undo, refusals and single replacements, without an engine."""

import importlib
import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import mindspeed_tpi
from mindspeed_tpi import ops, strict
from mindspeed_tpi.errors import ParityError, RequestError
from mindspeed_tpi.integrations import vllm as plugin
from mindspeed_tpi.ops import RopeConfig
from mindspeed_tpi.patches.vllm import PATCHES, _limits
from mindspeed_tpi.patches.vllm._status import in_force
from mindspeed_tpi.patches.vllm.v1.attention.backends.cpu_attn import attention_backend_class
from mindspeed_tpi.patches.vllm.v1.engine import input_processor
from mindspeed_tpi.patches.vllm.v1.sample.sampler import compute_logprobs
from mindspeed_tpi.patching import resolve
from tests.models import write_model


@pytest.fixture
def unpatched(monkeypatch):
    """This process without any patch; afterwards those that were enabled are enabled again (late, hence not strict)."""
    before = list(mindspeed_tpi._registries)
    mindspeed_tpi.disable()
    yield
    mindspeed_tpi.disable()
    monkeypatch.setenv("MINDSPEED_TPI", "1")
    if before:
        mindspeed_tpi.enable(*before)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A real VllmConfig that the contract covers."""
    from vllm.engine.arg_utils import EngineArgs

    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    path = write_model(tmp_path_factory.mktemp("model"), "llama", layers=1, hidden=64, heads=2, head_dim=32, ffn=64)
    return EngineArgs(model=str(path), skip_tokenizer_init=True, max_model_len=256).create_engine_config()


def stored():
    for module in {p.module for p in PATCHES}:
        importlib.import_module(module)
    return {p.target: resolve.stored(*resolve.holder(p.target)) for p in PATCHES}


def test_undo(unpatched, monkeypatch):
    originals = stored()
    monkeypatch.setenv("MINDSPEED_TPI", "strict")
    for _ in range(2):
        plugin.register()
        plugin.register()
        assert in_force()
        assert all(now is not originals[target] for target, now in stored().items())
        mindspeed_tpi.disable()
        assert not in_force()
        assert all(now is originals[target] for target, now in stored().items())


@pytest.mark.parametrize("mode", [None, "0"])
def test_off(unpatched, monkeypatch, mode):
    originals = stored()
    monkeypatch.delenv("MINDSPEED_TPI", raising=False)
    if mode:
        monkeypatch.setenv("MINDSPEED_TPI", mode)
    plugin.register()
    assert all(now is originals[target] for target, now in stored().items())


def test_patches_import_no_upstream():
    code = "import sys, mindspeed_tpi.patches.vllm, mindspeed_tpi.integrations.vllm; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "MINDSPEED_TPI": "0"}).returncode == 0


def test_covered(config):
    _limits.check(config)


@pytest.mark.parametrize(
    ("owner", "changes", "named"),
    [
        ("model_config", {"quantization": "fp8"}, "quantised weights (fp8)"),
        ("model_config", {"runner_type": "pooling"}, "runner 'pooling'"),
        ("model_config", {"dtype": torch.float64}, "dtype torch.float64"),
        ("model_config", {"max_model_len": 1 << 20}, "max_model_len 1048576"),
        ("cache_config", {"cache_dtype": "fp8"}, "kv_cache_dtype 'fp8'"),
        ("cache_config", {"block_size": 96}, "block_size 96"),
        ("parallel_config", {"tensor_parallel_size": 3}, "tensor_parallel_size 3 for 2 heads"),
        ("parallel_config", {"pipeline_parallel_size": 2}, "pipeline_parallel_size 2"),
        ("parallel_config", {"data_parallel_size": 2}, "data_parallel_size 2 of a model without experts"),
        ("parallel_config", {"decode_context_parallel_size": 2}, "decode_context_parallel_size 2"),
        ("parallel_config", {"prefill_context_parallel_size": 2}, "prefill_context_parallel_size 2"),
        ("parallel_config", {"tensor_parallel_size": 2}, "torch.compile over 2 ranks"),
        ("parallel_config", {"enable_eplb": True}, "expert load balancing"),
        ("aux_output_config", {"enable_return_routed_experts": True}, "enable_return_routed_experts"),
        ("parallel_config", {"worker_cls": "somebody.Worker"}, "worker_cls 'somebody.Worker'"),
        (None, {"lora_config": object()}, "LoRA"),
        (None, {"speculative_config": SimpleNamespace()}, "speculative decoding"),
        (None, {"kv_transfer_config": object()}, "KV-cache transfer"),
        (None, {"quant_config": object()}, "quantisation config"),
        ("hf", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("hf", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("hf", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("hf", {"architectures": ["Qwen3MoeForCausalLM"]}, "lacks num_experts"),
        ("hf", {"architectures": ["DeepseekV3ForCausalLM"]}, "architecture DeepseekV3ForCausalLM"),
        ("hf", {"llama_4_scaling": {"beta": 0.1}}, "llama_4_scaling"),
        ("hf", {"logit_scale": 0.5}, "logit_scale=0.5"),
    ],
)
def test_refused(config, monkeypatch, owner, changes, named):
    if "speculative_config" in changes or owner == "model_config":
        monkeypatch.setattr(type(config), "use_v2_model_runner", False)
    holder = {None: config, "hf": config.model_config.hf_text_config}.get(owner) or getattr(config, owner)
    for name, value in changes.items():
        monkeypatch.setattr(holder, name, value, raising=False)
    with pytest.raises(ParityError) as error:
        _limits.check(config)
    assert named in str(error.value)
    assert "MINDSPEED_TPI=0" in str(error.value)


@pytest.mark.parametrize(
    ("backend", "free", "ranks", "named"),
    [
        ("mp", 2, 1, r"need 240 MiB in /dev/shm, which has 2 MiB free; enlarge it .*, or set VLLM_ENABLE_V1_MULTIPROCESSING=0"),
        ("mp", 245, 2, r"need \d+ MiB in /dev/shm, which has 245 MiB free; enlarge it \(.*size=1g /dev/shm\)$"),
        ("mp", 245, 1, None),
        ("uni", 2, 1, None),
    ],
)  # fmt: skip
def test_small_shared_memory(config, monkeypatch, backend, free, ranks, named):
    """Docker gives /dev/shm 64 MB, some clusters 2."""
    monkeypatch.setattr(_limits.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free << 20))
    monkeypatch.setattr(config.parallel_config, "distributed_executor_backend", backend)
    monkeypatch.setattr(config.parallel_config, "tensor_parallel_size", ranks)
    with pytest.raises(ParityError, match=named) if named else nullcontext():
        _limits.check_shared_memory(config)


def test_audit_refuses_a_compiled_model(config, monkeypatch):
    monkeypatch.setenv("MINDSPEED_TPI", "audit")
    with pytest.raises(ParityError, match="torch.compile in mode audit.*set enforce_eager, or MINDSPEED_TPI=strict"):
        _limits.check(config)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"alibi_slopes": [1.0, 0.5]}, "ALiBi"),
        ({"logits_soft_cap": 30.0}, "softcap"),
        ({"attn_type": "encoder_only"}, "encoder_only"),
        ({"kv_sharing_target_layer_name": "layers.0"}, "KV-cache sharing"),
        ({"sinks": torch.zeros(2)}, "sinks"),
        ({"head_size": 260}, "head_dim 260"),
    ],
)
def test_attention_refuses(changes, named):
    arguments = {
        "num_heads": 2, "head_size": 32, "scale": 1.0, "num_kv_heads": 1, "alibi_slopes": None,
        "sliding_window": None, "kv_cache_dtype": "auto",
    }  # fmt: skip
    with pytest.raises(ParityError, match=named):
        attention_backend_class().get_impl_cls()(**arguments | changes)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_rotary_tables_are_those_of_the_contract(config, monkeypatch, rope):
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT, get_rope

    monkeypatch.setenv("MINDSPEED_TPI", "strict")
    plugin.register()
    parameters = {**rope, "rope_theta": 1e6}
    hf = config.model_config.hf_text_config
    monkeypatch.setattr(hf, "rope_parameters", parameters)
    _ROPE_DICT.clear()
    with set_current_vllm_config(config):
        layer = get_rope(32, hf.max_position_embeddings, rope_parameters=parameters, dtype=torch.bfloat16)
        with pytest.raises(ParityError, match="interleaved"):
            get_rope(32, 64, is_neox_style=False, rope_parameters=parameters, dtype=torch.bfloat16)
        with pytest.raises(ParityError, match="theta"):
            get_rope(32, 64, rope_parameters={**parameters, "rope_theta": 1e4}, dtype=torch.bfloat16)
    _ROPE_DICT.clear()
    expected = RopeConfig.from_hf(hf.to_dict())
    assert expected.scaling == rope["rope_type"]
    for table, wanted in zip((layer.cos, layer.sin), ops.rope_tables(expected), strict=True):
        assert table.dtype == torch.float32
        assert torch.equal(table, wanted)
    assert layer.cos_sin_cache.numel() == 0


@pytest.mark.parametrize("scale", [0.01, 3.0, 60.0])
def test_every_column_has_the_bits_of_token_logprob(scale):
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(0)) * scale
    logits[1, 100:] = -torch.inf
    full = compute_logprobs(logits)
    for token in (0, 7, 99, 150, 299, *logits.argmax(-1).tolist()):
        chosen = ops.token_logprob(logits, torch.full((3,), token))
        assert torch.equal(full[:, token].contiguous().view(torch.int32), chosen.view(torch.int32))


@pytest.mark.parametrize(
    ("parameters", "logprobs_mode", "named"),
    [
        ({"top_p": 0.9}, "processed_logprobs", "top_p=0.9"),
        ({"top_k": 5}, "processed_logprobs", "top_k=5"),
        ({"min_p": 0.1}, "processed_logprobs", "min_p=0.1"),
        ({"presence_penalty": 0.5}, "processed_logprobs", "presence_penalty=0.5"),
        ({"frequency_penalty": 0.5}, "processed_logprobs", "frequency_penalty=0.5"),
        ({"repetition_penalty": 1.1}, "processed_logprobs", "repetition_penalty=1.1"),
        ({"logit_bias": {3: 1.0}}, "processed_logprobs", "logit_bias="),
        ({"allowed_token_ids": [3]}, "processed_logprobs", "allowed_token_ids="),
        ({"min_tokens": 2}, "processed_logprobs", "min_tokens=2"),
        ({"temperature": 0.7}, "raw_logprobs", "temperature=0.7 with logprobs_mode='raw_logprobs'"),
        ({"temperature": 0.7}, "processed_logprobs", None),
        ({"temperature": 0.0}, "raw_logprobs", None),
    ],
)
def test_sampling_that_a_trainer_cannot_reproduce(monkeypatch, parameters, logprobs_mode, named):
    """Where every request of an LLM, AsyncLLM or server enters; a ValueError, which a server answers with status 400."""
    from vllm import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor

    monkeypatch.setenv("MINDSPEED_TPI", "strict")
    plugin.register()
    assert InputProcessor._validate_params.__code__.co_filename.endswith("patches/vllm/v1/engine/input_processor.py")
    upstream = input_processor._validate_params(lambda self, params, tasks: None)
    request = (
        SimpleNamespace(model_config=SimpleNamespace(logprobs_mode=logprobs_mode)),
        SamplingParams(**parameters),
        (),
    )
    if named is None:
        upstream(*request)
        return
    with pytest.raises(RequestError) as error:
        upstream(*request)
    assert named in str(error.value) and "generation_config='vllm'" in str(error.value)
    assert isinstance(error.value, ValueError) and isinstance(error.value, ParityError)
    monkeypatch.setenv("MINDSPEED_TPI", "1")
    upstream(*request)
    assert any(named in line for line in strict.coverage()["outside"])


LATE = """
import os
from vllm.plugins import load_general_plugins
load_general_plugins()                                # as vLLM does, once, before anybody imported this package
import mindspeed_tpi
from mindspeed_tpi.patches.vllm._status import in_force
assert in_force() and os.environ["MINDSPEED_TPI"] == "1"
"""


def test_a_plugin_that_was_asked_before_the_import():
    """With MINDSPEED_TPI unset, vLLM's entry point declines; `import mindspeed_tpi` then serves this process's engine too."""
    env = {name: value for name, value in os.environ.items() if name != "MINDSPEED_TPI"}
    done = subprocess.run([sys.executable, "-c", LATE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
