"""The real engine: handshake, weight update, counters, and independence of everything that must not matter."""

import logging
from dataclasses import replace

import pytest
import torch

from mindspeed_tpi.errors import InputError, LayoutError, ParityError, PatchError
from mindspeed_tpi.parity.engine import Engine
from mindspeed_tpi.parity.request import EngineOptions, Request
from mindspeed_tpi.patches.vllm.platforms import cpu
from mindspeed_tpi.patches.vllm.v1.worker import cpu_worker
from mindspeed_tpi.weights import Checkpoint
from tests.models import random_prompts, write_model

SIZES = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 128, "vocab": 120}
SMALL = EngineOptions(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=192)


def same(a, b):
    return torch.equal(a.token_ids, b.token_ids) and torch.equal(
        a.logprobs.view(torch.int32), b.logprobs.view(torch.int32)
    )


def generated(rollout):
    return rollout.logprobs[rollout.generated].view(torch.int32)


@pytest.fixture(scope="module")
def request_(tmp_path_factory):
    path = write_model(tmp_path_factory.mktemp("model"), "llama", **SIZES, max_positions=256)
    prompts = random_prompts([5, 40, 70, 33, 70], vocab=120, shared=40)
    return Request(model=str(path), prompts=prompts, max_new_tokens=6, engine=SMALL)


@pytest.fixture(scope="module")
def first(request_, tmp_path_factory):
    """One engine, several scenarios: its rollout, the same again from a warm cache, its own prefill of it, updates."""
    other = write_model(tmp_path_factory.mktemp("other"), "llama", **SIZES, max_positions=256, seed=1)
    results = {"other": str(other)}
    with Engine(request_) as engine:
        results["workers"] = engine.workers
        results["rollout"] = engine.generate()
        results["again"] = engine.generate()
        full = [s.tolist() for s in results["rollout"].sequences]
        results["prefill"] = engine.generate(full, 1, prompt_logprobs=True)
        with pytest.raises(InputError, match="outside the vocabulary of 120"):
            engine.generate([[120]])
        with pytest.raises(InputError, match="max_model_len=192"):
            engine.generate([[3] * 190], 6)
        with pytest.raises(InputError, match="raw logprobs"):
            engine.generate(temperature=0.7)
        with pytest.raises(InputError, match=r"lacks .*lm_head"):
            engine.update_weights((n, t) for n, t in Checkpoint(str(other)) if n != "lm_head.weight")
        results["kept"] = engine.generate()
        assert engine.update_weights(Checkpoint(str(other))) == 1
        results["updated"] = engine.generate()
        assert engine.update_weights(Checkpoint(request_.model)) == 2
        results["back"] = engine.generate()
    return results


def test_report(first):
    (worker,) = first["workers"]
    assert worker["plugin"] and worker["mode"] == "strict" and worker["uncovered"] == []
    meta = first["rollout"].meta
    assert meta["fingerprint"] == worker["fingerprint"]
    assert meta["contract"]["rope_table"]
    assert meta["op_calls"]["linear"] == meta["counters"]["steps"] * (2 * 4 + 1)


def test_counters_come_from_the_scheduler(first):
    assert first["rollout"].meta["counters"]["prompts_chunked"] >= 2
    assert first["again"].meta["counters"]["prefix_cache_hits"] >= 64


def test_decode_is_its_own_prefill(first):
    assert same(first["rollout"], first["again"])
    rollout, prefill = first["rollout"], first["prefill"]
    starts = zip(rollout.offsets[:-1], prefill.offsets[:-1], rollout.offsets.diff(), strict=True)
    whole = torch.cat([prefill.logprobs[b : b + n] for _, b, n in starts])
    assert torch.equal(whole[rollout.generated].view(torch.int32), generated(rollout))


def test_weight_update_is_in_place_and_forgets_the_cache(first, request_):
    with Engine(replace(request_, model=first["other"])) as engine:
        assert same(engine.generate(), first["updated"])
    assert not same(first["updated"], first["rollout"])
    assert same(first["back"], first["rollout"])
    assert first["back"].meta["counters"]["prefix_cache_hits"] == first["rollout"].meta["counters"]["prefix_cache_hits"]
    assert same(first["kept"], first["rollout"]) and first["kept"].weight_versions.unique().tolist() == [0]
    assert first["updated"].weight_versions.unique().tolist() == [1]
    assert first["back"].weight_versions.unique().tolist() == [2]


def test_compiled(first, request_):
    with Engine(replace(request_, engine=replace(SMALL, enforce_eager=False))) as engine:
        assert same(engine.generate(), first["rollout"])


def test_spawned_with_preemptions(first, request_):
    options = replace(SMALL, spawn=True, max_num_seqs=5, max_num_batched_tokens=64, kv_cache_blocks=8)
    with Engine(replace(request_, engine=options)) as engine:
        long = engine.generate(max_new_tokens=40)
        assert long.meta["counters"]["preemptions"] > 0
        assert long.meta["op_calls"]["linear"] > 0
        engine.update_weights(Checkpoint(first["other"]))
        updated = engine.generate()
    assert same(updated, replace(first["updated"], meta={}))
    lengths = zip(first["rollout"].offsets[:-1], long.offsets[:-1], first["rollout"].offsets.diff(), strict=True)
    start = torch.cat([long.logprobs[b : b + n] for _, b, n in lengths])
    assert torch.equal(start[first["rollout"].generated].view(torch.int32), generated(first["rollout"]))


def own_engine(request_, **options):
    """A user's own `LLM(...)`, not built by our driver."""
    import vllm

    options = {"enforce_eager": True, "skip_tokenizer_init": True, "max_model_len": 64, "block_size": 32} | options
    return vllm.LLM(model=request_.model, **options)


@pytest.fixture
def own(request_, monkeypatch):
    """Builds an engine of a user's own, with the plugin loaded, and stops it afterwards."""
    from mindspeed_tpi.integrations.vllm import register

    for name, value in {"MINDSPEED_TPI": "strict", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
                        "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    register()

    def run(generate=False, change=None, **options):
        from vllm import SamplingParams

        llm = own_engine(request_, **options)
        try:
            for after in (None, change) if change else (None,):
                if after:
                    llm.collective_rpc(after)
                if generate:
                    prompt = [{"prompt_token_ids": [3, 4]}]
                    llm.generate(prompt, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
        finally:
            llm.llm_engine.engine_core.shutdown()

    yield run
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.envs import disable_envs_cache

    cleanup_dist_env_and_memory()
    disable_envs_cache()


def test_worker_without_the_plugin_is_refused(own, monkeypatch):
    monkeypatch.setattr(cpu_worker, "in_force", lambda: False)
    with pytest.raises(ParityError, match=r"worker rank 0 \(process \d+\): field plugin is False"):
        own()


def test_a_patch_that_somebody_overwrote_is_refused(own, monkeypatch):
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # once in a process: it would go back on top of what came before

    def theirs(self, layer, x, bias=None):
        return torch.nn.functional.linear(x, layer.weight, bias)

    monkeypatch.setattr(UnquantizedLinearMethod, "apply", theirs)
    with pytest.raises(PatchError, match=r"UnquantizedLinearMethod\.apply is now .*theirs.*Call mindspeed_tpi\.enable"):
        own()


@pytest.mark.parametrize("compiling", [True, False])
def test_the_first_step_of_a_compiled_engine_is_checked(own, monkeypatch, compiling):
    """The graph that vLLM runs is out of a dispatch mode's sight: the Python code of it is not, and both have the same bits."""
    from mindspeed_tpi.patches.vllm.model_executor.layers import activation

    swiglu = activation.ops.swiglu

    def theirs(x):
        in_the_graph = torch.compiler.is_compiling()
        return swiglu(x) + x.sum() if in_the_graph is compiling else swiglu(x)

    monkeypatch.setattr(activation.ops, "swiglu", theirs)
    named = (
        r"the compiled graph of model \(LlamaModel\) gives other bits than its Python code"
        if compiling
        else r"model\.layers\.0\.mlp\.act_fn ran aten\.sum.*called at .*test_engine\.py"
    )
    with pytest.raises(ParityError, match=named):
        own(generate=True, enforce_eager=False)


class TheirNorm(torch.nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x, residual=None):
        x = x if residual is None else x + residual
        y = torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return y if residual is None else (y, x)


def their_down(self, x):
    return x @ self.weight.T, None


def test_changes_of_a_running_model_are_named(own, monkeypatch):
    """By the code that runs, whatever its name; the last one by the step that follows a first one without it."""

    def change(worker):
        runner = worker.model_runner
        first, second = runner.model.model.layers
        down, impl = first.mlp.down_proj, first.self_attn.attn.impl
        kind = type(down)
        alike = type(kind.__name__, (kind,), {"__module__": kind.__module__, "forward": their_down})
        changes = [
            (second, "input_layernorm", TheirNorm(second.input_layernorm),
             r"model\.layers\.1\.input_layernorm \(.*TheirNorm: forward is .*TheirNorm\.forward"),
            (down, "__class__", alike, r"layers\.0\.mlp\.down_proj \(.*RowParallelLinear: forward is .*their_down"),
            (first.self_attn.o_proj.quant_method, "apply", print, r"self_attn\.o_proj \(.*quant_method is Unquantized"),
            (impl, "forward", print, r"layers\.0\.self_attn\.attn \(.*Attention: impl is"),
            (runner.model.model.norm, "_forward_method", print, r"model\.norm \(.*ContractRMSNorm: _forward_method is"),
            (runner.model.logits_processor, "scale", 0.5, r"logits_processor \(.*scale=0\.5"),
            (runner.sampler, "sample", print, r"sampler model \(vllm\.v1\.sample\.sampler\.Sampler: sample is"),
        ]  # fmt: skip
        for owner, name, theirs, named in changes:
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, theirs)
                with pytest.raises(ParityError, match=named):
                    worker._tpi_check_covered()
        worker._tpi_check_covered()
        second.mlp.forward = their_down.__get__(down)

    with pytest.raises(ParityError, match=r"model\.layers\.1\.mlp \(vllm.*LlamaMLP: forward is .*their_down"):
        own(generate=True, change=change)


@pytest.mark.parametrize("field", ["fingerprint", "backend", "mode"])
def test_worker_that_differs_is_refused(own, monkeypatch, field):
    expected = cpu.expected
    monkeypatch.setattr(cpu, "expected", lambda hf: expected(hf) | {field: "other"})
    with pytest.raises(
        ParityError, match=rf"worker rank 0 \(process \d+\): field {field} is '.*', the parent .* 'other'"
    ):
        own()


def test_uncovered_module(own, monkeypatch, caplog):
    from vllm.model_executor import custom_op

    monkeypatch.delitem(custom_op.op_registry_oot, "SiluAndMul")
    with pytest.raises(ParityError, match=r"worker rank 0 .*model\.layers\.0\.mlp\.act_fn \(vllm.*\.SiluAndMul: "):
        own()
    monkeypatch.setenv("MINDSPEED_TPI", "1")
    with caplog.at_level(logging.WARNING, "mindspeed_tpi"):
        own()
    (warning,) = [r for r in caplog.records if "outside the numerics contract" in r.getMessage()]
    assert "model.layers.1.mlp.act_fn (vllm.model_executor.layers.activation.SiluAndMul: " in warning.getMessage()


@pytest.mark.parametrize(
    ("layout", "error"), [("cp=2", LayoutError), ("tp=3", LayoutError), ("tp", InputError), ("pp=1", LayoutError)]
)
def test_layouts_the_engine_cannot_have(request_, layout, error):
    with pytest.raises(error, match=layout.split("=")[0]):
        Engine(replace(request_, rollout=layout))


def test_stock_needs_the_flag(request_, monkeypatch):
    monkeypatch.setenv("MINDSPEED_TPI", "strict")
    with pytest.raises(InputError, match="MINDSPEED_TPI=0"):
        Engine(replace(request_, stock=True))
