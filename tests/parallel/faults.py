"""A rank that meets, one after the other, every kind of disagreement between ranks, and is at last killed in a tree.

    python -m mindspeed_tpi.parity.process 2 tests.parallel.faults MODEL OUT

Each rank writes the refusals it has met to OUT.<rank>.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindspeed_tpi import contract
from mindspeed_tpi.errors import ParityError
from mindspeed_tpi.parallel import tree
from mindspeed_tpi.parity.request import Request
from mindspeed_tpi.parity.trainer import Trainer
from tests.models import write_model
from tests.rollout_records import record

SIZES = {"layers": 1, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 96, "vocab": 100}


def refusal(build: Callable[[], Any]) -> str:
    try:
        build()
    except ParityError as error:
        return str(error)
    return "accepted"


def main() -> None:
    rank, model, out = int(os.environ["RANK"]), sys.argv[1], sys.argv[2]
    other = write_model(f"{model}-of-rank-{rank}", **SIZES, seed=rank)  # type: ignore[arg-type]

    def trainer(**changes: Any) -> Trainer:
        return Trainer(Request(**{"model": model, "prompts": ((1, 2),), "train": "tp=2", **changes}))

    said = {}
    if rank == 1:
        os.environ["WORLD_SIZE"] = "4"
    said["world size"] = refusal(lambda: trainer(train="tp=4" if rank == 1 else "tp=2"))
    os.environ["WORLD_SIZE"] = "2"
    said["layout"] = refusal(lambda: trainer(train="pp=2" if rank == 1 else "tp=2"))
    said["dtype"] = refusal(lambda: trainer(dtype="float32" if rank == 1 else "bfloat16"))
    said["checkpoint"] = refusal(lambda: trainer(model=str(other)))
    ours = contract.current()
    if rank == 1:
        contract.set_current(ours.overridden({"leaf": 64}))
    said["contract"] = refusal(trainer)
    contract.set_current(ours)
    agreed = trainer()
    Path(f"{out}.{rank}").write_text(json.dumps(said))
    if rank == 1:
        tree.tree_reduce = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    agreed.logprobs(record([[3, 4, 5, 6]], agreed.contract))


if __name__ == "__main__":
    main()
