"""logdiff is exactly 0 under every rotary scaling, at positions beyond those the model was first trained for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mindspeed_tpi.errors import ContractError
from mindspeed_tpi.parity.compare import compare
from mindspeed_tpi.parity.request import EngineOptions, Request
from mindspeed_tpi.parity.rollout import Rollout
from mindspeed_tpi.parity.trainer import Trainer
from tests.models import random_prompts, write_model
from tests.parity.conftest import Case, assert_exact, roll_out

ORIGINAL = 64
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    # not the constants that Megatron-core has built in
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn-own-factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "attention_factor": 0.9,
        "beta_fast": 16.0,
        "truncate": False,
    },
}
ENGINE = EngineOptions(max_num_seqs=4, max_num_batched_tokens=96)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    directory = tmp_path_factory.mktemp("rope")
    prompts = tuple(map(tuple, random_prompts([5, 60, 130, 200], shared=40, seed=3)))
    requests = {}
    for name, scaling in SCALINGS.items():
        model = write_model(
            directory / name, "llama", layers=2, rope_scaling=scaling, rope_theta=1e4,
            max_positions=4 * ORIGINAL,
        )  # fmt: skip
        requests[name] = Request(str(model), prompts, max_new_tokens=8, temperature=1.0, seed=7, engine=ENGINE)
    return roll_out(requests, directory)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_logdiff_is_zero(cases: dict[str, Case], scaling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases[scaling]
    trainer = Trainer(case.request)
    assert_exact(case, trainer.logprobs(case.rollout))
    rotary = trainer.model.rotary_pos_emb
    rotary.rope_config = replace(rotary.rope_config, scaling="default", parameters=())
    with pytest.raises(ContractError, match="rope_table"):
        trainer.logprobs(case.rollout)
    monkeypatch.setattr(Rollout, "check_contract", lambda *_: None)
    unscaled = compare(case.rollout, trainer.logprobs(case.rollout), case.expected_tokens)
    assert unscaled.nonzero > unscaled.tokens // 2
