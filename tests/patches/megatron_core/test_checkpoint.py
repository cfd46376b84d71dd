"""Megatron-core's checkpoints, distributed and `torch.save`d, carry the contract's fingerprint and refuse another; bits survive the way."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch

from mindspeed_tpi import contract, contract_of, weights
from mindspeed_tpi.errors import ContractError
from mindspeed_tpi.parity.trainer import Trainer
from mindspeed_tpi.patches.megatron_core import _checkpoint
from mindspeed_tpi.patches.megatron_core.dist_checkpointing import serialization
from tests.patches.megatron_core.conftest import rollout_for, same_bits


def test_a_checkpoint_carries_its_contract(
    trainer: Callable[..., Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from megatron.core import dist_checkpointing

    t = trainer("llama-tied")
    monkeypatch.setattr(serialization, "BUILT", WeakSet([t.model]))  # other tests' models may still live
    before = t.logprobs(rollout_for(t))
    saved = tmp_path / "saved"
    saved.mkdir()
    state = {"model": t.model.sharded_state_dict(), "iteration": 3}
    dist_checkpointing.save(state, str(saved))
    assert set(state) == {"model", "iteration"}
    document = torch.load(saved / "common.pt", weights_only=False)[_checkpoint.KEY]
    assert document["fingerprint"] == contract_of(t.model).fingerprint
    assert document["contract"] == json.loads(contract_of(t.model).to_json())

    with torch.no_grad():
        for parameter in t.model.parameters():
            parameter.zero_()
    loaded = dist_checkpointing.load({"model": t.model.sharded_state_dict()}, str(saved))
    assert set(loaded) == {"model", "iteration"}
    t.model.load_state_dict(loaded["model"])
    assert same_bits(t.logprobs(rollout_for(t)), before)

    def load(directory: Path) -> None:
        dist_checkpointing.load({"model": t.model.sharded_state_dict()}, str(directory))

    whole = t.model.rotary_pos_emb.rope_config
    t.model.rotary_pos_emb.rope_config = replace(whole, theta=5.0)
    with pytest.raises(
        ContractError, match=r"saved was trained under another .*rope_table \(here .*MINDSPEED_TPI_CONTRACT"
    ):
        load(saved)
    t.model.rotary_pos_emb.rope_config = whole
    contract.set_current(replace(contract.current(), leaf=64))
    try:
        with pytest.raises(ContractError, match=r"leaf \(here 64, there 128\)"):
            load(saved)
        monkeypatch.setenv("MINDSPEED_TPI", "1")
        with caplog.at_level(logging.WARNING, "mindspeed_tpi"):
            load(saved)
        assert "leaf (here 64, there 128)" in caplog.text
        monkeypatch.setenv("MINDSPEED_TPI", "strict")
    finally:
        contract.set_current(None)

    common = torch.load(saved / "common.pt", weights_only=False)
    common[_checkpoint.KEY]["contract"]["leaf"] = 64
    torch.save(common, saved / "common.pt")
    with pytest.raises(ContractError, match="is not that of its contract"):
        load(saved)
    del common[_checkpoint.KEY]
    torch.save(common, saved / "common.pt")
    with caplog.at_level(logging.WARNING, "mindspeed_tpi"):
        load(saved)
    assert "carries no numerics contract" in caplog.text


def test_a_state_dict_carries_its_contract(
    trainer: Callable[..., Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron-LM's format `torch`: `state_dict_for_save_checkpoint`, `torch.save`, `load_state_dict`."""
    from megatron.core.transformer.module import Float16Module

    t = trainer("llama-tied")
    model = Float16Module(t.model.config, t.model)
    torch.save({"model": model.state_dict_for_save_checkpoint(), "iteration": 3}, tmp_path / "legacy.pt")
    state = torch.load(tmp_path / "legacy.pt", weights_only=True)["model"]
    assert list(state) == list(torch.nn.Module.state_dict(t.model))
    model.load_state_dict(state)
    whole = t.model.rotary_pos_emb.rope_config
    t.model.rotary_pos_emb.rope_config = replace(whole, theta=5.0)
    with pytest.raises(ContractError, match=r"state dict of a GPTModel.* another .*rope_table \(here"):
        model.load_state_dict(state)
    t.model.rotary_pos_emb.rope_config = whole
    monkeypatch.setattr(contract, "_current", replace(contract.current(), leaf=64))
    with pytest.raises(ContractError, match=r"leaf \(here 64, there 128\)"):
        model.load_state_dict(state)
    model.load_state_dict(dict(state))  # weights from elsewhere


@pytest.mark.parametrize(
    ("family", "one", "other"),
    [
        ("qwen3", "local", "te"),
        ("qwen3", "te", "local"),
        ("qwen3-moe", "te", "te grouped"),  # between local and TE experts upstream's keys of the norms differ
        ("qwen3-moe", "te grouped", "te"),
    ],
)
def test_specs_exchange_checkpoints(
    trainer: Callable[..., Trainer], tmp_path: Path, family: str, one: str, other: str
) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    local = trainer(family).model

    def build(kind: str) -> Any:
        config = replace(local.config, moe_grouped_gemm="grouped" in kind)
        te = "te" in kind
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=te, normalization="RMSNorm")
        model = GPTModel(config, spec, local.vocab_size, local.max_sequence_length, position_embedding_type="rope")
        model.rotary_pos_emb.rope_config = local.rotary_pos_emb.rope_config
        names = {name for name, _ in model.named_parameters()}
        assert ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in names) == te
        assert ("decoder.layers.0.mlp.experts.linear_fc1.weight1" in names) == ("grouped" in kind)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        return model

    source, target = build(one), build(other)
    (tmp_path / "saved").mkdir()
    dist_checkpointing.save({"model": source.sharded_state_dict()}, str(tmp_path / "saved"))
    loaded = dist_checkpointing.load({"model": target.sharded_state_dict()}, str(tmp_path / "saved"))
    target.load_state_dict(loaded["model"])
    found, wanted = (dict(weights.hf_tensors(model)) for model in (target, source))
    assert found.keys() == wanted.keys() and all(same_bits(found[name], wanted[name]) for name in wanted)
