"""Megatron-core's MoE layer under the patches: against the model written out, router replay, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mindspeed_tpi.errors import ParityError
from mindspeed_tpi.parity.trainer import Trainer
from tests.models import megatron_config
from tests.patches.megatron_core.conftest import main_grads, rollout_for, same_bits
from tests.patches.megatron_core.test_model import plain_logprobs

Build = Callable[..., Trainer]
MOE = ["qwen3-moe", "qwen2-moe", "mixtral", "glm4-moe"]
SIZES: dict[str, Any] = {"experts": 8, "topk": 4, "moe_ffn": 32}


def routers(trainer: Trainer) -> list[Any]:
    return [module.router for module in trainer.model.modules() if type(module).__name__ == "MoELayer"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("family", MOE)
def test_logprobs_are_those_of_the_plain_model(trainer: Build, family: str, dtype: str) -> None:
    t = trainer(family, dtype, **SIZES)
    rollout = rollout_for(t)
    assert same_bits(t.logprobs(rollout), plain_logprobs(t, rollout.sequences))


def test_a_models_cast_leaves_the_expert_bias_in_f32(trainer: Build) -> None:
    """Upstream's own forward pass sees to it: its updates are smaller than what bf16 resolves."""
    t = trainer("glm4-moe", **SIZES)
    t.model.bfloat16()
    t.logprobs(rollout_for(t))
    assert {router.expert_bias.dtype for router in routers(t)} == {torch.float32}


def test_selective_recompute_changes_nothing(trainer: Build) -> None:
    t = trainer("qwen2-moe", **SIZES)
    rollout = rollout_for(t)
    t.backward(rollout)
    plain = main_grads(t)
    for module in t.model.modules():
        if type(module).__name__ == "MoELayer":
            module.moe_layer_recompute = True
    t.backward(rollout)
    again = main_grads(t)
    assert all(same_bits(plain[name], again[name]) for name in plain)
    assert any(bool(plain[name].any()) for name in plain if "experts" in name)


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_gradient_accumulation_fusion_is_the_same_path(trainer: Build, family: str) -> None:
    """Upstream's fusion needs a CUDA extension; the operators add into `main_grad` whatever the setting says."""
    t = trainer(family, **SIZES)
    rollout = rollout_for(t)
    t.backward(rollout)
    plain = main_grads(t)
    with megatron_config(gradient_accumulation_fusion=True):
        t = Trainer(t.request)
    assert t.model.decoder.layers[0].self_attention.linear_proj.gradient_accumulation_fusion
    t.backward(rollout)
    fused = main_grads(t)
    assert all(same_bits(plain[name], fused[name]) for name in plain)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", MOE)
def test_grouped_gemm_is_the_same_model(trainer: Build, family: str, dtype: str) -> None:
    """GroupedMLP's transposed weights: log-probabilities, gradients of every expert, weights after a step, and export."""
    from megatron.core.transformer.moe.experts import GroupedMLP

    t = trainer(family, dtype, **SIZES)
    with megatron_config(moe_grouped_gemm=True):
        grouped = Trainer(t.request)
    layer = [module for module in grouped.model.modules() if type(module).__name__ == "MoELayer"][-1]
    assert isinstance(layer.experts, GroupedMLP)
    rollout = rollout_for(t)
    assert same_bits(grouped.logprobs(rollout), t.logprobs(rollout))
    assert grouped.weight_hashes() == t.weight_hashes()
    for trainer_ in (t, grouped):
        trainer_.train_step(rollout)
    gradients = t.gradient_hashes()
    assert sum("experts." in name for name in gradients) >= 8 * 3
    assert grouped.gradient_hashes() == gradients
    assert grouped.weight_hashes() == t.weight_hashes()
    with torch.no_grad():  # the comparison sees one element
        layer.experts.weight1[3, 5] += 1
    assert len(set(grouped.weight_hashes().items()) - set(t.weight_hashes().items())) == 1


def test_a_grouped_weight_is_stored_once(trainer: Build) -> None:
    """The operators read views of GroupedMLP's parameters, and nothing holds a second form of them."""
    from mindspeed_tpi.parallel import moe

    t = trainer("qwen3-moe", **SIZES)
    with megatron_config(moe_grouped_gemm=True):
        t = Trainer(t.request)
    experts = next(module for module in t.model.modules() if type(module).__name__ == "GroupedMLP")
    assert [tuple(p.shape) for p in experts.parameters()] == [(256, 8 * 64), (8 * 32, 256)]
    for weight, of_experts in ((experts.weight1, moe.grouped_fc1), (experts.weight2, moe.grouped_fc2)):
        assert of_experts(weight, 8, 256).data_ptr() == weight.data_ptr()


def test_experts_of_another_class_are_refused(trainer: Build) -> None:
    t = trainer("qwen3-moe", **SIZES)
    layer = next(module for module in t.model.modules() if type(module).__name__ == "MoELayer")
    layer.experts = type("TEGroupedMLP", (torch.nn.Module,), {})()
    with pytest.raises(
        ParityError, match="experts of class TEGroupedMLP; build the layers from get_gpt_layer_local_spec"
    ):
        layer(torch.zeros(4, 1, 64, dtype=torch.bfloat16))


def test_stand_ins_say_what_is_missing(monkeypatch: pytest.MonkeyPatch, trainer: Build) -> None:
    """A model that runs as upstream wrote it meets the missing extension when it is used, by name."""
    t = trainer("qwen3-moe", **SIZES)
    with megatron_config(moe_grouped_gemm=True):
        t = Trainer(t.request)
    monkeypatch.setenv("MINDSPEED_TPI", "1")
    t.model.config.moe_z_loss_coeff = 1e-3
    experts = next(module for module in t.model.modules() if type(module).__name__ == "GroupedMLP")
    with pytest.raises(
        ParityError, match="the package grouped_gemm is not installed, .* or leave moe_grouped_gemm off"
    ):
        experts(torch.zeros(8, 64, dtype=torch.bfloat16), torch.ones(8, dtype=torch.int64), torch.ones(8))


def test_router_replay_must_agree(trainer: Build) -> None:
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    t = trainer("qwen3-moe", **SIZES)
    rollout = rollout_for(t, [12])
    wanted = t.logprobs(rollout)
    for router in routers(t):
        router.router_replay = RouterReplay()
        router.router_replay.set_router_replay_action(RouterReplayAction.RECORD)
    t.logprobs(rollout)
    for router in routers(t):
        replay = router.router_replay
        replay.set_target_indices(replay.get_recorded_indices().flip(1))  # any order within a token
        replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    assert same_bits(t.logprobs(rollout), wanted)
    last = routers(t)[-1].router_replay
    chosen = last.target_topk_idx.clone()
    chosen[3] = torch.tensor([e for e in range(8) if e not in chosen[3].tolist()][:4])
    last.set_target_indices(chosen)
    with pytest.raises(ParityError, match=r"router replay of layer 2 differs at 1 of 16 tokens \(token 3: replayed"):
        t.logprobs(rollout)


def test_a_token_routed_to_nan(trainer: Build) -> None:
    t = trainer("qwen3-moe", **SIZES)
    with torch.no_grad():
        routers(t)[0].weight[3, 5] = float("nan")
    with pytest.raises(ParityError, match="NaN"):
        t.logprobs(rollout_for(t))


def test_cuda_graph_arguments_are_refused(trainer: Build) -> None:
    t = trainer("qwen3-moe", **SIZES)
    layer = next(module for module in t.model.modules() if type(module).__name__ == "MoELayer")
    with pytest.raises(ParityError, match="intermediate_tensors"):
        layer(torch.zeros(4, 1, 64, dtype=torch.bfloat16), padding_mask=torch.ones(1, 4))
