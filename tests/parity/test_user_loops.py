"""The promise on the user's own path: a rollout script with vLLM's LLM, a loop with Megatron-core's GPTModel, and between them
only the public API. What cannot be reproduced is refused by name."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import mindspeed_tpi
from mindspeed_tpi.errors import ContractError, InputError, LayoutError
from mindspeed_tpi.parity.megatron import start_megatron
from tests.models import write_model
from tests.parity.conftest import ROOT
from tests.parity.user_rollout import PAGE, snippets

SIZES = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 96, "vocab": 120}
THETA = 1e6


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(model directory, the records of the user's script), of a strict and of a stock engine. Beside the model is `other`, whose
    weights the strict engine gets at last."""
    model, other = (
        write_model(tmp_path_factory.mktemp("model"), "llama", **SIZES, rope_theta=THETA, max_positions=512, seed=seed)
        for seed in (0, 1)
    )
    shutil.copytree(other, model / "other")
    out = tmp_path_factory.mktemp("records")
    settings = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": str(ROOT)}  # fmt: skip
    command = [sys.executable, "-m", "tests.parity.user_rollout", str(model), str(other), str(out)]
    running = [
        subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **settings, "MINDSPEED_TPI": mode}, stderr=subprocess.PIPE
        )
        for mode in ("strict", "0")
    ]
    for process in running:
        _, log = process.communicate()
        assert process.returncode == 0, log.decode()[-4000:]
    return model, out


@pytest.fixture(scope="module")
def records(user: tuple[Path, Path]) -> dict[str, mindspeed_tpi.Rollout]:
    return {path.stem: mindspeed_tpi.Rollout.load(path) for path in user[1].glob("*.safetensors")}


def gpt(directory: Path, rotary_base: float = THETA, positions: int = 200) -> Any:
    """The user's own GPTModel, spec and checkpoint conversion; shorter rotary tables than the engine's."""
    start_megatron()
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    heads, groups, width = SIZES["heads"], SIZES["kv_heads"], SIZES["head_dim"]
    config = TransformerConfig(
        num_layers=SIZES["layers"], hidden_size=SIZES["hidden"], num_attention_heads=heads, num_query_groups=groups,
        kv_channels=width, ffn_hidden_size=SIZES["ffn"], layernorm_epsilon=1e-6, normalization="RMSNorm",
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False, hidden_dropout=0.0,
        attention_dropout=0.0, params_dtype=torch.bfloat16, bf16=True, use_cpu_initialization=True, bias_activation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False,
    )  # fmt: skip
    model = GPTModel(config, get_gpt_layer_local_spec(normalization="RMSNorm"), SIZES["vocab"], positions, position_embedding_type="rope",
                     rotary_base=rotary_base, share_embeddings_and_output_weights=False).bfloat16()  # fmt: skip
    hf = load_file(directory / "model.safetensors")

    def qkv(prefix: str) -> Tensor:
        q, k, v = (hf[f"{prefix}self_attn.{n}_proj.weight"].unflatten(0, (groups, -1)) for n in "qkv")
        return torch.cat([q, k, v], dim=1).flatten(0, 1)

    state = {"embedding.word_embeddings.weight": hf["model.embed_tokens.weight"], "decoder.final_layernorm.weight": hf["model.norm.weight"],
             "output_layer.weight": hf["lm_head.weight"]}  # fmt: skip
    for layer in range(SIZES["layers"]):
        here, there = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        state |= {
            here + "input_layernorm.weight": hf[there + "input_layernorm.weight"],
            here + "pre_mlp_layernorm.weight": hf[there + "post_attention_layernorm.weight"],
            here + "self_attention.linear_qkv.weight": qkv(there),
            here + "self_attention.linear_proj.weight": hf[there + "self_attn.o_proj.weight"],
            here + "mlp.linear_fc1.weight": torch.cat([hf[f"{there}mlp.{n}_proj.weight"] for n in ("gate", "up")]),
            here + "mlp.linear_fc2.weight": hf[there + "mlp.down_proj.weight"],
        }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state.pop(name))
    assert not state
    return model


@pytest.fixture(scope="module")
def model(user: tuple[Path, Path]) -> Any:
    return gpt(user[0])


def batch(rollout: mindspeed_tpi.Rollout) -> tuple[Tensor, Tensor]:
    """Right-padded tokens and next tokens, −1 where there is none."""
    sequences = rollout.sequences
    tokens = torch.zeros(len(sequences), -(-max(map(len, sequences)) // 8) * 8, dtype=torch.int64)
    labels = torch.full_like(tokens, -1)
    for row, label, sequence in zip(tokens, labels, sequences, strict=True):
        row[: len(sequence)], label[: len(sequence) - 1] = sequence, sequence[1:]
    return tokens, labels


def sampled(rollout: mindspeed_tpi.Rollout, values: Tensor) -> list[Tensor]:
    """Of each row of a padded batch, the values of the tokens that the engine sampled."""
    lengths = rollout.offsets.diff().tolist()
    return [v[p - 1 : n - 1] for v, p, n in zip(values, rollout.prompt_lengths.tolist(), lengths, strict=True)]


def positions_of(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1]).expand(tokens.shape)


@pytest.mark.parametrize(("name", "temperature"), [("several", 1.0), ("prompts", 1.0), ("cool", 0.7), ("later", 1.0)])
def test_own_loops_agree_to_the_bit(
    records: dict[str, mindspeed_tpi.Rollout], model: Any, name: str, temperature: float
) -> None:
    rollout = records[name]
    tokens, labels = batch(rollout)
    model.train()
    logits = model(tokens, positions_of(tokens), None)
    ours = mindspeed_tpi.logprobs(logits, labels, temperature=temperature, model=model)
    version = 3 if name == "later" else 0
    found = mindspeed_tpi.check(rollout, model, sampled(rollout, ours), temperature=temperature, weight_version=version)
    assert found.exact and found.tokens == 6 * len(rollout.sequences) and found.first is None
    assert mindspeed_tpi.check(rollout, model).exact and model.training
    reported = ~rollout.logprobs.isnan()
    assert int(reported.sum()) == found.tokens + (74 if name == "prompts" else 0)
    assert mindspeed_tpi.contract_of([model]) == rollout.contract
    assert rollout.meta["mode"] == "strict" and rollout.meta["coverage"] == []
    assert rollout.meta["sampling"][0]["temperature"] == (0 if name == "later" else temperature)


def test_new_weights(records: dict[str, mindspeed_tpi.Rollout], user: tuple[Path, Path], model: Any) -> None:
    updated = records["updated"]
    assert updated.weight_versions.unique().tolist() == [4]
    assert mindspeed_tpi.check(updated, gpt(user[0] / "other"), weight_version=4).exact
    assert not mindspeed_tpi.check(updated, model, weight_version=4).exact


def test_several_completions_and_the_wire(records: dict[str, mindspeed_tpi.Rollout], user: tuple[Path, Path]) -> None:
    rollout = records["several"]
    assert len(rollout.sequences) == 6 and rollout.prompt_lengths.tolist() == [6, 6, 70, 70, 1, 1]
    assert not torch.equal(rollout.sequences[2], rollout.sequences[3])
    wire = json.loads((user[1] / "wire.json").read_text())
    again = mindspeed_tpi.Rollout.from_tokens(**wire)
    for name in ("token_ids", "offsets", "positions", "weight_versions", "temperatures"):
        assert torch.equal(getattr(again, name), getattr(rollout, name)), name
    assert torch.equal(again.logprobs.view(torch.int32), rollout.logprobs.view(torch.int32))
    assert again.contract == rollout.contract
    with pytest.raises(InputError, match="report lacks contract, fingerprint"):
        broken = [{k: v for k, v in wire["engine"][0].items() if k not in ("contract", "fingerprint")}]
        mindspeed_tpi.Rollout.from_tokens(**{**wire, "engine": broken})
    with pytest.raises(InputError, match="5 completions for 6 prompts"):
        mindspeed_tpi.Rollout.from_tokens(**{**wire, "completions": wire["completions"][1:]})


def test_packed_fused_and_entropy_have_the_same_bits(records: dict[str, mindspeed_tpi.Rollout], model: Any) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    rollout = records["cool"]
    tokens, labels = batch(rollout)
    kept: list[Tensor] = []
    handle = model.output_layer.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
    model.train()
    logits = model(tokens, positions_of(tokens), None)
    handle.remove()
    scale = rollout.temperatures.unsqueeze(1)  # one per sequence
    plain, entropy = mindspeed_tpi.logprobs(logits, labels, temperature=scale, entropy=True, model=model)
    assert torch.equal(plain, mindspeed_tpi.logprobs(logits, labels, temperature=0.7))

    hidden = kept[0].detach().transpose(0, 1).requires_grad_()  # [batch, length, hidden]
    weight = model.output_layer.weight.detach().clone().requires_grad_()
    fused, fused_entropy = mindspeed_tpi.logprobs(hidden, labels, weight=weight, temperature=scale, entropy=True)
    assert torch.equal(fused, plain) and torch.equal(fused_entropy, entropy)
    assert bool((plain[labels < 0] == 0).all())
    cotangent = torch.linspace(-1, 1, labels.numel()).view(labels.shape)
    (fused * cotangent).sum().backward()
    model.zero_grad()
    (plain * cotangent).sum().backward()
    assert torch.equal(weight.grad, model.output_layer.weight.grad)

    starts = rollout.offsets.int()
    pack = rollout.token_ids.unsqueeze(0)
    longest = int(rollout.offsets.diff().max())
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    packed_labels = torch.full_like(pack, -1)
    packed_labels[0, :-1] = pack[0, 1:]
    packed_labels[0, rollout.offsets[1:] - 1] = -1
    with torch.no_grad():
        logits = model(pack, rollout.positions.unsqueeze(0), None, packed_seq_params=params)
        packed = mindspeed_tpi.logprobs(logits, packed_labels, temperature=0.7, model=model)[0]
    shifted = torch.cat([torch.tensor([torch.nan]), packed[:-1]])
    assert mindspeed_tpi.check(rollout, model, shifted, temperature=0.7).exact


def test_every_snippet_of_the_page_runs(model: Any, user: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one has run in the engine's process and left rollout.safetensors."""
    monkeypatch.chdir(user[1])
    wire = json.loads((user[1] / "wire.json").read_text())
    rollout = mindspeed_tpi.Rollout.load("rollout.safetensors")
    tokens, labels = batch(rollout)
    hidden = torch.zeros(*labels.shape, SIZES["hidden"], dtype=torch.bfloat16)
    names = {
        **{name: wire[name] for name in ("prompts", "completions", "logprobs")},
        "reports": wire["engine"],
        "model": model,
        "tokens": tokens,
        "labels": labels,
        "position_ids": positions_of(tokens),
        "hidden": hidden,
        "lm_head": model.output_layer.weight,
    }
    for snippet in snippets()[1:]:
        if "update_weights" not in snippet:  # that one has run in the engine's process, too
            exec(snippet, names)
    assert names["logprob"].shape == labels.shape


def test_the_page_names_all_that_is_public() -> None:
    table = set(re.findall(r"`(\w+)[(`]", PAGE.read_text().partition("\n\nBad input")[0]))
    assert set(mindspeed_tpi.__all__) - {"__version__"} <= table
    for name in mindspeed_tpi.__all__:
        assert getattr(mindspeed_tpi, name) is not None and name in dir(mindspeed_tpi)
    with pytest.raises(AttributeError, match="no attribute 'compare'"):
        _ = mindspeed_tpi.compare


def refused(rollout: mindspeed_tpi.Rollout, model: Any, message: str, **said: Any) -> None:
    with pytest.raises(ContractError, match=message):
        mindspeed_tpi.check(rollout, model, torch.zeros(rollout.token_ids.numel()), **said)


def changed(rollout: mindspeed_tpi.Rollout, **meta: Any) -> mindspeed_tpi.Rollout:
    return replace(rollout, meta={**rollout.meta, **meta})


def test_what_cannot_be_reproduced_is_refused_by_name(
    records: dict[str, mindspeed_tpi.Rollout], model: Any, user: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    several, cool = records["several"], records["cool"]
    wrong = gpt(user[0], rotary_base=10000)
    refused(
        several, wrong, r"rope_table .*theta \(here 10000\.0, there 1000000\.0\); theta is Megatron-core's rotary_base"
    )
    with pytest.raises(ContractError, match="rope_table"):
        mindspeed_tpi.check(several, wrong)
    refused(cool, model, r"temperature 1\.0 here, 0\.7 there")
    refused(several, model, r"temperature 0\.7 here, 1\.0 there", temperature=0.7)
    refused(records["later"], model, "weight version 2 here, 3 there", weight_version=2)
    refused(records["stock"], model, "carries no numerics contract: it came from a stock engine")
    (sampling,) = several.meta["sampling"]
    for name, value in {
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "logit_bias": {"3": 1.0},
    }.items():
        refused(changed(several, sampling=[{**sampling, name: value}]), model, f"{name}=")
    refused(
        changed(cool, logprobs_mode="raw_logprobs"),
        model,
        "temperature=0.7 with logprobs_mode='raw_logprobs'",
        temperature=0.7,
    )
    refused(changed(several, mode="1"), model, "its engine ran in mode '1'")
    refused(
        changed(several, coverage=["model.norm (RMSNorm)"]), model, r"outside the contract: model\.norm \(RMSNorm\)"
    )
    mixed = several.weight_versions.clone()
    mixed[-1] = 1
    refused(replace(several, weight_versions=mixed), model, r"weights of versions \[0, 1\]")
    monkeypatch.setenv("MINDSPEED_TPI", "0")
    refused_by_mode = mindspeed_tpi.check(several, model, torch.zeros(several.token_ids.numel()))
    assert not refused_by_mode.exact


def test_a_changed_weight_shows_where(records: dict[str, mindspeed_tpi.Rollout], user: tuple[Path, Path]) -> None:
    model = gpt(user[0])
    with torch.no_grad():
        model.output_layer.weight[int(records["several"].sequences[0][-1]), 0] += 0.5
    found = mindspeed_tpi.check(records["several"], model)
    assert not found.exact and found.nonzero and found.first is not None and found.max_abs > found.mean_abs > 0


def test_a_damaged_record_is_refused(records: dict[str, mindspeed_tpi.Rollout], model: Any, tmp_path: Path) -> None:
    several, path = records["several"], tmp_path / "record"
    contract = several.meta["contract"]
    for meta, message in (
        ({"contract": {}}, r"the contract lacks .*family, isa"),
        ({"fingerprint": "00"}, "fingerprint '00' is not that of its contract"),
        ({"contract": {**contract, "leaf": "128"}}, "leaf='128' must be of type int"),
        ({"contract": {**contract, "leaf": 64}}, "is not that of its contract"),
        ({"contract": None}, "no contract: it is damaged"),
    ):
        refused(changed(several, **meta), model, message)
        changed(several, **meta).save(path)
        with pytest.raises(ContractError, match=message):
            mindspeed_tpi.Rollout.load(path)
    for name in ("mode", "coverage", "sampling", "rope"):
        changed(several, **{name: 7}).save(path)
        with pytest.raises(InputError, match=f"lacks {name} in its document"):
            mindspeed_tpi.Rollout.load(path)
    text = path.read_bytes().replace(b"mindspeed-tpi-rollout-2", b"mindspeed-tpi-rollout-1")
    path.write_bytes(text)
    with pytest.raises(InputError, match="rollout-1', which lacks mode.*make the rollout again"):
        mindspeed_tpi.Rollout.load(path)


@pytest.mark.parametrize(
    ("scores", "labels", "options", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int32), {}, "need int64 labels"),
        (torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64), {}, r"of shape \(2,\)"),
        (torch.zeros(2, 3).bfloat16(), torch.zeros(2, dtype=torch.int64), {}, "logits are torch.bfloat16"),
        (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), {"temperature": 0.0}, "must be positive"),
        (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), {"weight": torch.zeros(5, 4)}, "do not fit"),
        (
            torch.zeros(2, 3),
            torch.zeros(2, dtype=torch.int64),
            {"model": torch.nn.Linear(1, 1)},
            "no Megatron-core GPTModel",
        ),
    ],
)
def test_operands_of_logprobs(scores: Tensor, labels: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        mindspeed_tpi.logprobs(scores, labels, **options)


def test_tensor_parallel_logits_need_to_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    start_megatron()
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: 2)
    with pytest.raises(LayoutError, match="say with model= or group="):
        mindspeed_tpi.logprobs(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64))
