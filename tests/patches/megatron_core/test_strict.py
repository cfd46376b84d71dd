"""Strict mode on a user's own path: own spec, own GPTModel, own loop, nothing of `mindspeed_tpi.parity` but the start."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mindspeed_tpi
from mindspeed_tpi import strict
from mindspeed_tpi.errors import ParityError, PatchError
from mindspeed_tpi.parity.megatron import start_megatron
from mindspeed_tpi.patching import active, resolve

ROOT = Path(__file__).resolve().parents[3]
VOCAB = 64


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> None:
    start_megatron()


def config(**changes: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields: dict[str, Any] = {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 64,
        "normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False, "hidden_dropout": 0.0, "attention_dropout": 0.0, "use_cpu_initialization": True,
        "params_dtype": torch.bfloat16, "bf16": True,
    }  # fmt: skip
    return TransformerConfig(**fields | changes)


EXPERTS = {"num_moe_experts": 4, "moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "alltoall"}


def build(spec: Callable[[Any], None] | None = None, settings: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """A GPTModel as a user builds one: the local spec, changed in place."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    experts = (settings or {}).get("num_moe_experts")
    layer = copy.deepcopy(get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm"))
    if spec:
        spec(layer.submodules)
    return GPTModel(config(**settings or {}), layer, VOCAB, 64, **{"position_embedding_type": "rope", **arguments})


TOKENS = torch.arange(12).unsqueeze(0)


def logits(model: Any, mask: Tensor | None = None) -> Tensor:
    return model(TOKENS, TOKENS, mask)  # type: ignore[no-any-return]


def loss(model: Any) -> Tensor:
    return model(TOKENS, TOKENS, None, labels=TOKENS)  # type: ignore[no-any-return]


def library_norm(submodules: Any) -> None:
    class Norm(torch.nn.RMSNorm):
        def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
            super().__init__(hidden_size, eps, dtype=config.params_dtype)

    submodules.pre_mlp_layernorm = Norm


def library_product(submodules: Any) -> None:
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    class Linear(RowParallelLinear):
        def forward(self, input_: Tensor) -> tuple[Tensor, None]:
            return torch.nn.functional.linear(input_, self.weight), None

    submodules.mlp.submodules.linear_fc2 = Linear


def own_residual_add(submodules: Any) -> None:
    submodules.mlp_bda = lambda training, fused: lambda x, residual, prob: x[0] + residual


def own_attention(submodules: Any) -> None:
    from megatron.core.transformer.attention import SelfAttention

    class Attention(SelfAttention):
        def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
            return super().get_query_key_value_tensors(*args, **kwargs)

    submodules.self_attention.module = Attention


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (library_norm, r"decoder\.layers\.0\.pre_mlp_layernorm \(.*Norm: forward is torch\.nn.*RMSNorm\.forward"),
        (library_product, r"decoder\.layers\.1\.mlp\.linear_fc2 \(.*Linear: forward is .*test_strict"),
        (own_residual_add, r"decoder\.layers\.0 \(.*TransformerLayer: mlp_bda is .*own_residual_add"),
        (own_attention, r"self_attention \(.*Attention: get_query_key_value_tensors is .*own_attention"),
    ],
)
def test_a_spec_of_the_users_own(spec: Callable[[Any], None], named: str, monkeypatch: Any) -> None:
    with pytest.raises(ParityError, match=named) as error:
        build(spec)
    assert "Build the model from get_gpt_layer_local_spec" in str(error.value) and "\n" not in str(error.value)
    monkeypatch.setenv("MINDSPEED_TPI", "1")
    before = sum(strict.coverage()["outside"].values())
    with torch.no_grad():
        logits(build(spec))
    assert sum(strict.coverage()["outside"].values()) > before


@pytest.mark.parametrize(
    ("settings", "arguments", "named"),
    [
        ({}, {"position_embedding_type": "learned_absolute"}, r"position_embedding_type='learned_absolute' \(use 'rope'"),
        (EXPERTS | {"add_bias_linear": True}, {}, r"add_bias_linear=True \(set it to False: biases of routers and experts"),
    ],
)  # fmt: skip
def test_settings(settings: dict[str, Any], arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ParityError, match=named):
        build(None, settings, **arguments)


def test_a_dense_bias_is_served() -> None:
    model = build(None, {"add_bias_linear": True})
    before = logits(model)
    with torch.no_grad():
        model.decoder.layers[0].mlp.linear_fc1.bias += 1
    assert not torch.equal(before, logits(model))


@pytest.fixture
def model() -> Any:
    return build()


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Changes to Megatron-core that end with the test."""
    yield monkeypatch
    monkeypatch.undo()
    strict.check_patches()


def theirs(self: Any, input_: Tensor) -> tuple[Tensor, None]:
    return 2 * torch.nn.functional.linear(input_, self.weight), None


def replaced_forward(m: Any) -> None:
    m.decoder.layers[1].mlp.linear_fc2.forward = theirs.__get__(m.decoder.layers[1].mlp.linear_fc2)


def replaced_module(m: Any) -> None:
    m.decoder.layers[0].input_layernorm = torch.nn.RMSNorm(64, dtype=torch.bfloat16)


def hooked(m: Any) -> None:
    m.decoder.layers[0].mlp.register_forward_hook(lambda module, inputs, output: (output[0] * 2, None))


def hooked_in_place(m: Any) -> None:
    m.decoder.layers[0].input_layernorm.register_forward_pre_hook(
        lambda module, inputs: [inputs[0].detach().mul_(2), None][1]
    )


def compiled(m: Any) -> None:
    m.decoder.layers[0].mlp.compile()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (replaced_forward, r"layers\.1\.mlp\.linear_fc2 .*forward is .*theirs"),
        (replaced_module, r"layers\.0\.input_layernorm"),
        (hooked, r"the hook .*hooked.* changes what a MLP takes or gives"),
        (hooked_in_place, r"the hook .*hooked_in_place.* changes what a RMSNorm takes or gives"),
        (compiled, r"layers\.0\.mlp .*compiled by Module\.compile"),
    ],
)
def test_a_later_wrap(model: Any, change: Callable[[Any], None], named: str) -> None:
    logits(model)
    change(model)
    with pytest.raises(ParityError, match=named):
        logits(model)


def test_a_hook_may_look(model: Any) -> None:
    kept: list[Any] = []
    for register in ("register_forward_pre_hook", "register_forward_hook"):
        getattr(model.output_layer, register)(lambda module, *seen: kept.append(seen))
    logits(model)
    assert len(kept) == 2


def test_overwritten_after_enable(model: Any, restored: pytest.MonkeyPatch, caplog: Any) -> None:
    """What MindSpeed's import and its `repatch()` do; `enable()` goes back on top, and `disable()` leaves theirs."""
    from megatron.core.tensor_parallel import layers

    wanted = logits(model)
    registry = active["megatron_core"]
    (entry,) = [e for e in registry._applied if e.patch.target.endswith("RowParallelLinear.forward")]
    restored.setattr(layers.RowParallelLinear, "forward", theirs)
    who = r"RowParallelLinear\.forward is now tests\.patches\.megatron_core\.test_strict\.theirs|test_strict.theirs"
    (status,) = [s for s in mindspeed_tpi.patch_status() if s.state == "overwritten"]
    assert status.patch is entry.patch and "test_strict.theirs" in status.why
    for run in (lambda: logits(model), build):
        with pytest.raises(PatchError, match=rf"{who}.*Call mindspeed_tpi\.enable\(\)"):
            run()
    restored.setenv("MINDSPEED_TPI", "1")
    assert not torch.equal(logits(model), wanted)
    assert len(strict.coverage()["overwritten"]) == 1 and "RowParallelLinear.forward is now" in caplog.text
    restored.setenv("MINDSPEED_TPI", "strict")
    mindspeed_tpi.enable()
    try:
        assert torch.equal(logits(model), wanted)
    finally:
        (again,) = [e for e in registry._applied if e.patch is entry.patch]
        assert again.original is theirs
        registry._applied[registry._applied.index(again)] = entry
        registry._links = None


def test_upstream_code_that_is_kept_is_watched(model: Any, restored: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.transformer_layer import TransformerLayer

    original = TransformerLayer._forward_mlp
    restored.setattr(TransformerLayer, "_forward_mlp", lambda *args, **kwargs: original(*args, **kwargs))
    with pytest.raises(PatchError, match=r"TransformerLayer\._forward_mlp is now .*<lambda>"):
        logits(model)


def test_every_alias(restored: pytest.MonkeyPatch) -> None:
    """Each function is patched under every name of it, and a name that keeps an original is refused."""
    from megatron.core import tensor_parallel
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    assert tensor_parallel.vocab_parallel_cross_entropy is vocab_parallel_cross_entropy
    for function in (get_bias_dropout_add, apply_rotary_pos_emb, get_grad_norm_fp32, vocab_parallel_cross_entropy):
        assert function.__module__.startswith("mindspeed_tpi.")
    registry = active["megatron_core"]
    assert registry.stray_aliases() == []
    (entry,) = [e for e in registry._applied if e.patch.target.endswith("vocab_parallel_cross_entropy")]
    restored.setattr(sys.modules[__name__], "kept_from_before", entry.original, raising=False)
    with pytest.raises(ParityError, match=r"test_strict:kept_from_before is the original of .*cross_entropy"):
        build()
    restored.undo()
    restored.setattr(tensor_parallel, "vocab_parallel_cross_entropy", theirs)
    with pytest.raises(PatchError, match=r"tensor_parallel:vocab_parallel_cross_entropy is now .*theirs"):
        build()


def test_a_mask_edited_in_place(model: Any) -> None:
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).triu(1)
    with torch.no_grad():
        logits(model, mask)
        for edited in (mask, mask.data):  # `.data` leaves no trace in the version counter
            edited[..., 5, 3] = True
            with pytest.raises(ParityError, match="attention mask that is not the causal one"):
                logits(model, mask)
            edited[..., 5, 3] = False
            logits(model, mask)
    with torch.inference_mode():
        frozen = mask.clone()
        logits(model, frozen)
        frozen[..., 5, 3] = True
        with pytest.raises(ParityError, match="attention mask"):
            logits(model, frozen)


def test_the_first_step_is_checked_and_every_nth(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def checked() -> int:
        return strict.coverage()["checked"].get("megatron_core", 0)  # type: ignore[no-any-return]

    monkeypatch.setenv("MINDSPEED_TPI_CHECK_EVERY", "3")
    start = checked()
    with torch.no_grad():
        logits(model)  # the first
    loss(model).mean().backward()  # the first with gradients
    for _ in range(5):  # of which the third is the fourth with gradients
        loss(model).mean().backward()
    assert checked() == start + 3
    monkeypatch.setenv("MINDSPEED_TPI_CHECK_EVERY", "often")
    with pytest.raises(ValueError, match="MINDSPEED_TPI_CHECK_EVERY='often' is not a number"):
        loss(model)


def test_an_operator_outside_the_contract_in_the_forward_pass(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that no look at modules can see: here inside an operator of ours."""
    from mindspeed_tpi import ops

    monkeypatch.setattr(ops, "swiglu", lambda x: x[..., :64] * x[..., 64:].float().softmax(-1).bfloat16())
    with pytest.raises(
        ParityError, match=r"decoder\.layers\.0\.mlp ran aten\._softmax.*called at .*test_strict\.py:\d+ <lambda>"
    ):
        logits(model)
    monkeypatch.undo()
    logits(model)


def test_an_operator_outside_the_contract_in_the_backward_pass(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mindspeed_tpi.patches.megatron_core.transformer import mlp

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            return dy + 0 * dy.sum()

    original = mlp.ops.swiglu
    monkeypatch.setattr(mlp.ops, "swiglu", lambda x: Scaled.apply(original(x)))
    value = loss(model).mean()  # the mean itself is the loss, and free
    with pytest.raises(
        ParityError, match=r"backward pass of decoder\.layers\.1\.mlp ran aten\.sum.*test_strict\.py:\d+ backward"
    ):
        value.backward()
    monkeypatch.undo()
    loss(model).mean().backward()


@pytest.mark.parametrize("gradients", [False, True])
def test_log_probabilities_of_the_users_own(model: Any, gradients: bool) -> None:
    """The defect that no patch can see: the model is right, and `log_softmax` follows it."""
    with torch.set_grad_enabled(gradients):
        out = logits(model)
        with pytest.raises(
            ParityError, match=r"what follows the model's logits ran aten\._log_softmax.*mindspeed_tpi\.logprobs"
        ):
            torch.log_softmax((out / 0.7).float(), dim=-1)
    from megatron.core import tensor_parallel

    out = logits(build())
    tensor_parallel.vocab_parallel_cross_entropy(out.transpose(0, 1).contiguous(), TOKENS.t()).mean().backward()


def test_a_block_in_a_model_of_the_users_own(model: Any) -> None:
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = model.decoder

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x, None, rotary_pos_emb=model.rotary_pos_emb(12))  # type: ignore[no-any-return]

    x = torch.randn(12, 1, 64, dtype=torch.bfloat16)
    own = Own()
    own(x)
    replaced_module(model)
    with pytest.raises(ParityError, match=r"layers\.0\.input_layernorm"):
        own(x)


def test_a_second_look_costs_little(model: Any) -> None:
    """Not a benchmark: the look at an unchanged model and at the patches stays far below a forward pass."""
    import timeit

    from mindspeed_tpi.patches.megatron_core import _coverage

    logits(model)
    passes = _coverage._passes[model]
    look = timeit.timeit(lambda: (strict.check_patches(), passes.look(model)), number=50) / 50
    assert look < 2e-3
    assert resolve.names(theirs, __name__) == [f"{__name__}:theirs"]


UNSET = """
import os
import mindspeed_tpi
assert os.environ["MINDSPEED_TPI"] == "1"
mindspeed_tpi.disable()
assert "MINDSPEED_TPI" not in os.environ
mindspeed_tpi.enable()
assert os.environ["MINDSPEED_TPI"] == "1"
"""


def test_the_default_is_not_half() -> None:
    """With the variable unset, an import puts it where children and vLLM's plugin look for it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MINDSPEED_TPI")}
    done = subprocess.run(
        [sys.executable, "-c", UNSET], env=env | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
