"""Megatron-core's own GPTModel under the patches: forward against a plain model, gradients, invariances."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import mindspeed_tpi
from mindspeed_tpi.errors import ParityError
from mindspeed_tpi.parity.batches import Batch
from mindspeed_tpi.parity.schedule import cross_entropy
from mindspeed_tpi.parity.trainer import Trainer
from mindspeed_tpi.patches.megatron_core._coverage import check_covered
from mindspeed_tpi.patches.megatron_core.tensor_parallel.layers import head_gradient
from mindspeed_tpi.patching import resolve
from mindspeed_tpi.weights import entries
from tests.models import FAMILIES
from tests.patches.megatron_core.conftest import VOCAB, main_grads, rollout_for, same_bits
from tests.plain_model import PlainModel

Build = Callable[..., Trainer]
ROPE = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 2.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "partial": {"partial_rotary_factor": 0.5},
}


def plain_logprobs(trainer: Trainer, sequences: list[Tensor], temperature: float = 1.0) -> Tensor:
    plain = PlainModel.load(trainer.request.model, trainer.profile.torch_dtype)
    first = torch.full((1,), float("nan"))
    with torch.no_grad():
        return torch.cat([torch.cat((first, plain.logprobs(s, temperature))) for s in sequences])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_the_plain_model(trainer: Build, family: str, dtype: str) -> None:
    t = trainer(family, dtype)
    rollout = rollout_for(t)
    logprobs = t.logprobs(rollout)
    assert int(logprobs.isnan().sum()) == len(rollout.sequences)
    assert same_bits(logprobs, plain_logprobs(t, rollout.sequences))


@pytest.mark.parametrize("scaling", sorted(ROPE))
def test_rope_scalings(trainer: Build, scaling: str) -> None:
    t = trainer("llama", rope_scaling=ROPE[scaling], rope_theta=1e4)
    rollout = rollout_for(t, [40])
    assert same_bits(t.logprobs(rollout), plain_logprobs(t, rollout.sequences))


def test_temperature(trainer: Build) -> None:
    t = trainer("llama")
    rollout = rollout_for(t, temperature=0.7)
    logprobs = t.logprobs(rollout)
    assert same_bits(logprobs, plain_logprobs(t, rollout.sequences, 0.7))
    assert not same_bits(logprobs, t.logprobs(rollout_for(t)))


def test_logits_without_labels(trainer: Build) -> None:
    t = trainer("llama-tied")
    tokens = rollout_for(t, [11]).sequences[0]
    with torch.no_grad():
        logits = t.model(tokens.unsqueeze(0), torch.arange(11).unsqueeze(0), None)
        expected = PlainModel.load(t.request.model).logits(tokens)
    assert logits.shape == (1, 11, VOCAB) and same_bits(logits[0], expected)


def test_micro_batches_padding_and_train_mode_do_not_matter(trainer: Build) -> None:
    t = trainer("qwen3")
    rollout = rollout_for(t)
    whole = t.logprobs(rollout)
    for size in (1, 2, 3):
        assert same_bits(whole, t.logprobs(rollout, micro_batch=size))
    t.model.train()
    batch = Batch.of(rollout.sequences, [1, 0], 33)
    batch.tokens[1, 9:] = torch.arange(24)  # what stands in the padding does not matter either
    loss = cross_entropy(t.model, batch, 1.0)
    start = int(rollout.offsets[1])
    assert same_bits(-loss[0, :19].detach(), whole[start + 1 : start + 20])
    assert same_bits(-loss[1, :8].detach(), whole[1:9])


@pytest.mark.parametrize("family", ["llama-tied", "qwen2", "qwen3", "mistral"])
def test_gradients_run_to_run_and_across_micro_batches(trainer: Build, family: str) -> None:
    t = trainer(family)
    rollout = rollout_for(t)
    advantages = torch.randn(rollout.token_ids.numel(), generator=torch.Generator().manual_seed(0))
    runs = []
    for size in (1, 1, 2, 4):
        t.backward(rollout, advantages, micro_batch=size)
        runs.append(main_grads(t))
    assert all(float(g.abs().max()) > 0 for g in runs[0].values())
    for other in runs[1:]:
        assert all(same_bits(runs[0][name], other[name]) for name in runs[0])


def test_padding_reaches_what_is_cut_by_the_row(trainer: Build) -> None:
    """Gradients of keys and values, norms and biases are cut in spans of the padded row, so they follow its length; what is above
    the last attention does not."""
    t = trainer("llama")
    rollout = rollout_for(t, [9, 20])
    t.backward(rollout)
    short = main_grads(t)
    sequences = rollout.sequences
    for row in range(2):
        batch = Batch.of(sequences, [row], 56)
        loss = cross_entropy(t.model, batch, 1.0)
        gradient = torch.zeros_like(loss)
        gradient[0, : len(sequences[row]) - 1] = 1 / 27
        loss.backward(gradient)
    long = main_grads(t)
    differing = {name for name in short if not same_bits(short[name], long[name])}
    assert any("linear_qkv" in name for name in differing) and "decoder.final_layernorm.weight" in differing
    last = "decoder.layers.1.mlp.linear_fc"
    assert not differing & {"output_layer.weight", f"{last}1.weight", f"{last}2.weight"}


def test_gradients_are_those_of_the_plain_model(trainer: Build) -> None:
    """f32, where nothing is rounded on the way to the optimizer: the same bits without Megatron."""
    t = trainer("qwen3", "float32")
    rollout = rollout_for(t, [16])
    t.backward(rollout)
    grads = main_grads(t)
    plain = PlainModel.load(t.request.model, torch.float32)
    loss = -plain.logprobs(rollout.sequences[0])
    loss.backward(torch.full_like(loss, 1 / 15))
    for entry in entries(t.model):
        parts = [plain.weights[name] for name, _ in entry.tensors]
        if len(parts) == 1:  # merged weights have no f32 accumulator in the plain model
            assert same_bits(grads[entry.name], parts[0].main_grad), entry.name  # type: ignore[attr-defined]
        else:
            assert same_bits(grads[entry.name], entry.merge([p.grad for p in parts])), entry.name  # type: ignore[misc]


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "qwen3", "mistral"])
def test_gradients_against_float64_transformers(trainer: Build, family: str) -> None:
    """Accuracy, not bits: f32 training against autograd of the Hugging Face model in float64."""
    transformers = pytest.importorskip("transformers")
    t = trainer(family, "float32", std=0.05)
    rollout = rollout_for(t, [17])
    t.backward(rollout)
    grads = main_grads(t)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        t.request.model, dtype=torch.float64, attn_implementation="eager"
    )
    tokens = rollout.sequences[0].unsqueeze(0)
    logprobs = torch.log_softmax(model(tokens).logits[0, :-1], dim=-1)
    (-logprobs.gather(1, tokens[0, 1:, None]).mean()).backward()
    reference = {name: p.grad for name, p in model.named_parameters()}
    for entry in entries(t.model):
        expected = entry.merge([reference[name] for name, _ in entry.tensors])
        error = (grads[entry.name] - expected).norm() / expected.norm()
        assert float(error) < 2e-5, (entry.name, float(error))


def test_the_tied_head_has_an_accumulator_of_its_own(trainer: Build) -> None:
    """It joins the embedding's once, where Megatron-core ends a gradient reduction, with or without finalize_model_grads."""

    t = trainer("llama-tied")
    rollout = rollout_for(t, [16])
    t.backward(rollout)
    weight = t.model.embedding.word_embeddings.weight
    whole = main_grads(t)["embedding.word_embeddings.weight"]
    wrapped = t._training.chunks[0]  # type: ignore[union-attr]
    batch = Batch.of(rollout.sequences, [0], 16)
    for _ in range(2):  # nothing is left over for the next step
        wrapped.zero_grad_buffer()
        loss = wrapped(batch.tokens, None, None, labels=batch.labels)
        gradient = torch.zeros_like(loss)
        gradient[0, :15] = 1 / 15
        loss.backward(gradient)
        embedding, head = weight.main_grad.clone(), head_gradient(weight).clone()
        assert head.any() and not same_bits(embedding, whole)
        wrapped.finish_grad_sync()
        assert same_bits(weight.main_grad, embedding + head) and same_bits(weight.main_grad, whole)


def test_a_step_without_the_tied_heads_gradient_is_refused(trainer: Build) -> None:
    t = trainer("llama-tied")
    rollout = rollout_for(t, [16])
    t.train_step(rollout)
    batch = Batch.of(rollout.sequences, [0], 16)
    t._training.zero_gradients()  # type: ignore[union-attr]
    t._training.chunks[0](batch.tokens, None, None, labels=batch.labels).sum().backward()  # type: ignore[union-attr]
    with pytest.raises(ParityError, match=r"call finish_grad_sync\(\) .* or finalize_model_grads\(model\)"):
        t._training.step(1e-3)  # type: ignore[union-attr]


def test_residual_gradient_is_rounded_twice(trainer: Build) -> None:
    """The fork before a norm: rounded(rounded(dx of the norm) + gradient of the residual), by the norm's own operator."""
    from mindspeed_tpi.ops import schemas

    t = trainer("llama")
    norm = t.model.decoder.layers[0].pre_mlp_layernorm
    generator = torch.Generator().manual_seed(5)
    width = t.model.config.hidden_size
    x, skip, dy = (torch.randn(8, 2, width, generator=generator).to(torch.bfloat16) for _ in range(3))
    x.requires_grad_()
    add = t.model.decoder.layers[0].mlp_bda(True, False)
    y = norm(x)
    total = add((y, None), x, 0.0)
    total.backward(dy)
    x, gradient = x.detach(), x.grad
    with torch.no_grad():
        _, rstd = schemas.rms_norm(x, norm.weight, norm.eps)
        assert same_bits(gradient, schemas.rms_norm_backward(dy, x, norm.weight, rstd, dy))


def test_a_step_changes_the_model_and_repeats(trainer: Build) -> None:
    first, second = trainer("llama"), trainer("llama")
    rollout = rollout_for(first)
    before = first.logprobs(rollout)
    losses = [
        [t.train_step(rollout, lr=1e-2, micro_batch=size) for _ in range(3)] for t, size in ((first, 1), (second, 4))
    ]
    assert first.weight_hashes() == second.weight_hashes() and first.grad_norm == second.grad_norm
    assert losses[0] == losses[1] and losses[0][2] < losses[0][0]
    assert first.weight_version == 3
    newer = replace(rollout, weight_versions=rollout.weight_versions + 3)
    assert not same_bits(first.logprobs(newer), before)
    assert same_bits(first.logprobs(newer), second.logprobs(newer))


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    ],
)
def test_recomputing_activations_changes_no_bit(trainer: Build, recompute: dict[str, object]) -> None:
    t = trainer("qwen2")
    rollout = rollout_for(t, [9, 16])
    t.backward(rollout)
    expected = main_grads(t)
    for name, value in recompute.items():
        setattr(t.model.config, name, value)
    for layer in t.model.decoder.layers:
        layer.self_attention.checkpoint_core_attention = recompute["recompute_granularity"] == "selective"
    t.backward(rollout)
    found = main_grads(t)
    assert all(same_bits(expected[name], found[name]) for name in expected)


_DECIDES = {
    "ColumnParallelLinear.forward": ("megatron.core.tensor_parallel.layers:ColumnParallelLinear.forward",),
    "RowParallelLinear.forward": ("megatron.core.tensor_parallel.layers:RowParallelLinear.forward",),
    "norm": ("megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",),
    "attention": ("megatron.core.transformer.dot_product_attention:DotProductAttention.forward",),
    "rotary": (
        "megatron.core.models.common.embeddings.rope_utils:apply_rotary_pos_emb",
        "megatron.core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding.forward",
    ),
    "MLP.forward": ("megatron.core.transformer.mlp:MLP.forward",),
    "cross entropy": ("megatron.core.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy",),
}


@pytest.mark.parametrize("what", sorted(_DECIDES))
def test_every_patch_decides_bits(trainer: Build, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's own code in the place of any one replacement gives other log-probabilities (f32: no rounding hides it)."""
    t = trainer("llama", "float32")
    rollout = rollout_for(t, [40, 31])
    ours = t.logprobs(rollout)
    applied = {e.patch.target: e for registry in mindspeed_tpi._registries.values() for e in registry._applied}
    for target in _DECIDES[what]:
        entry = applied[target]
        for name in (target, *resolve.names(entry.replacement, entry.patch.module)):
            monkeypatch.setattr(*resolve.holder(name), entry.original)
    monkeypatch.setenv("MINDSPEED_TPI", "1")
    monkeypatch.setattr(
        "mindspeed_tpi.parity.trainer.contract_of", lambda _: rollout.contract
    )  # it refuses upstream's rotary
    theirs = trainer("llama", "float32").logprobs(rollout)
    assert not same_bits(ours, theirs)
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0, equal_nan=True)


def test_the_whole_model_is_covered(trainer: Build) -> None:
    t = trainer("qwen3")
    check_covered(t.model)
    t.model.decoder.final_layernorm = torch.nn.RMSNorm(64)
    with pytest.raises(
        ParityError, match=r"decoder\.final_layernorm \(torch\.nn\.modules\.normalization\.RMSNorm: forward is torch"
    ):
        check_covered(t.model)
