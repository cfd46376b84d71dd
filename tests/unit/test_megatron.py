"""Which models a training layout can be cut into, and ranks that must agree."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mindspeed_tpi import versions
from mindspeed_tpi.errors import InputError, LayoutError, ParityError
from mindspeed_tpi.parallel.layout import Layout
from mindspeed_tpi.parity.megatron import check_agreement, check_model, start_megatron, transformer_config
from mindspeed_tpi.profiles import Profile
from tests.models import write_model


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Profile]:
    sizes = {"layers": 4, "hidden": 96, "heads": 12, "kv_heads": 4, "head_dim": 16, "ffn": 96, "vocab": 50}
    directory = tmp_path_factory.mktemp("models")
    families = ("llama", "qwen3-moe", "glm4-moe", "qwen2-moe", "mixtral")
    return {
        f: Profile.load(write_model(directory / f, f, **sizes, experts=8, moe_ffn=32))  # type: ignore[arg-type]
        for f in families
    }


@pytest.mark.parametrize(
    ("family", "layout", "said"),
    [
        ("llama", "tp=8", "12 attention heads cannot be split by tp; divisors that work: 1, 2, 3, 4, 6, 12"),
        ("llama", "pp=4,vpp=2", r"4 layers cannot be split by pp\*vpp; divisors that work: 1, 2, 4"),
        ("llama", "tp=2,ep=2", "LlamaForCausalLM has no experts; leave ep=2 out"),
        ("llama", "dispatcher=allgather", "has no experts; leave dispatcher=allgather out"),
        ("qwen3-moe", "dp=16,ep=16", "8 experts cannot be split by ep; divisors that work: 1, 2, 4, 8"),
    ],
)
def test_a_model_that_cannot_be_cut_so(profiles: dict[str, Profile], family: str, layout: str, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        check_model(profiles[family], Layout.parse(layout, "train"))


def test_too_few_leaves_are_refused(profiles: dict[str, Profile]) -> None:
    with pytest.raises(
        LayoutError, match=r"tp=4, ffn of 90: a reduction of 2 leaves cannot be split over 4 ranks .* work: 1, 2"
    ):
        check_model(replace(profiles["llama"], ffn=90), Layout(tp=4))


def test_more_ranks_than_kv_heads(profiles: dict[str, Profile]) -> None:
    check_model(replace(profiles["llama"], heads=8, kv_heads=2), Layout(tp=8))
    with pytest.raises(LayoutError, match="3 KV heads cannot be split by tp"):
        check_model(replace(profiles["llama"], kv_heads=3), Layout(tp=2))


def test_stock_pads_its_vocabulary_otherwise(profiles: dict[str, Profile]) -> None:
    check_model(profiles["llama"], Layout(tp=2), stock=True)
    with pytest.raises(LayoutError, match="stock's vocabulary of 50"):
        check_model(profiles["llama"], Layout(tp=4), stock=True)
    check_model(profiles["llama"], Layout(tp=4))


def test_the_job_must_have_the_layouts_ranks() -> None:
    with pytest.raises(
        LayoutError, match="tp=2,pp=2 needs 4 ranks, this job has 1; start it with torchrun --nproc-per-node 4"
    ):
        start_megatron(Layout(tp=2, pp=2))


def test_ranks_that_differ() -> None:
    same = {"dtype": "bfloat16", "layout": "tp=2"}
    check_agreement({0: same, 1: dict(same)})
    with pytest.raises(
        ParityError, match="rank 1 differs from rank 0 in dtype, layout: dtype is 'float16' there and 'bfloat16'"
    ):
        check_agreement({0: same, 1: {"dtype": "float16"}})


def test_routers(profiles: dict[str, Profile]) -> None:
    glm, qwen2, qwen3 = (transformer_config(profiles[f], Layout()) for f in ("glm4-moe", "qwen2-moe", "qwen3-moe"))
    assert (glm.moe_router_score_function, glm.moe_router_num_groups, glm.moe_router_group_topk) == ("sigmoid", 4, 2)
    assert glm.moe_router_topk_scaling_factor == 2.5 and glm.moe_router_enable_expert_bias
    assert glm.moe_layer_freq == [0, 1, 1, 1] and qwen3.moe_layer_freq == [1, 1, 1, 1]
    assert qwen2.moe_router_pre_softmax and not qwen3.moe_router_pre_softmax
    assert qwen2.moe_shared_expert_gate and qwen2.moe_shared_expert_intermediate_size == 64
    assert qwen3.moe_shared_expert_intermediate_size is None


@pytest.mark.parametrize(("family", "changes"), [("glm4-moe", {"renormalize": False}), ("mixtral", {"topk": 1})])
def test_a_router_that_megatron_cannot_express(
    profiles: dict[str, Profile], family: str, changes: dict[str, object]
) -> None:
    profile = profiles[family]
    assert profile.moe is not None
    with pytest.raises(InputError, match="Megatron-core renormalises only over more than one expert"):
        transformer_config(replace(profile, moe=replace(profile.moe, **changes)), Layout())  # type: ignore[arg-type]


def test_what_an_earlier_version_has_no_field_for(
    profiles: dict[str, Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    monkeypatch.delitem(TransformerConfig.__dataclass_fields__, "moe_shared_expert_gate")
    transformer_config(profiles["qwen3-moe"], Layout())
    with pytest.raises(
        ParityError, match="has no moe_shared_expert_gate=True, which Qwen2MoeForCausalLM needs; install"
    ):
        transformer_config(profiles["qwen2-moe"], Layout())


def test_yarn_needs_a_version(profiles: dict[str, Profile], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda name: "0.15.3")
    llama = profiles["llama"]
    numbers = (("factor", 2.0), ("original_max_position_embeddings", 64.0))
    with pytest.raises(ParityError, match="yarn rotary scaling needs megatron-core>=0.16, found megatron-core 0.15.3"):
        transformer_config(replace(llama, rope=replace(llama.rope, scaling="yarn", parameters=numbers)), Layout())
