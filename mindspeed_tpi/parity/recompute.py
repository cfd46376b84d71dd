"""The trainer's process: recomputes the log-probabilities of rollouts by the real Megatron-core.

    python -m mindspeed_tpi.parity.recompute REQUEST.json ROLLOUT.safetensors OUT.safetensors ...

Further triples of files are worked on one after the other; their layouts have as many ranks. OUT holds `logprobs` (f32 [N], aligned with the rollout's tokens, NaN for first tokens) and a JSON document `meta`.
Exit status: 0 done, 2 bad input, 3 the engine failed. A stock run is the same command with `MINDSPEED_TPI=0` and
`"stock": true` in the request. A layout of several ranks is started under torchrun; rank 0 writes OUT.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from mindspeed_tpi import ops, versions
from mindspeed_tpi.errors import InputError
from mindspeed_tpi.parity import process
from mindspeed_tpi.parity.megatron import import_megatron
from mindspeed_tpi.parity.request import Request
from mindspeed_tpi.parity.rollout import Rollout
from mindspeed_tpi.parity.trainer import Trainer


def run(trainer: Trainer, rollout: Rollout, progress: bool = False) -> tuple[Tensor, dict[str, Any]]:
    """(log-probabilities f32 [N], report) of a rollout."""
    calls = Counter(ops.backends.call_counts())
    started = time.perf_counter()
    logprobs = trainer.logprobs(rollout, progress=progress)
    seconds = time.perf_counter() - started
    contract = trainer.contract
    meta = {
        "seconds": {"recompute": seconds, "tokens_per_second": rollout.token_ids.numel() / seconds},
        "op_calls": dict(Counter(ops.backends.call_counts()) - calls),
        "versions": {name: found for name in versions.UPSTREAMS if (found := versions.installed(name))},
        "backend": None if contract is None else ops.backends.active().describe(),
        "fingerprint": None if contract is None else contract.fingerprint,
    }
    return logprobs, meta


def main(arguments: Sequence[str] | None = None) -> int:
    """Process entry; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m mindspeed_tpi.parity.recompute", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="REQUEST ROLLOUT OUT", help="three files, or several times three")
    parser.add_argument("--progress", action="store_true", help="show a progress bar")
    parser.add_argument(
        "--wait", action="store_true", help="start up, then wait until the (first) rollout record exists"
    )
    options = parser.parse_args(arguments)

    def work() -> None:
        if len(options.files) % 3:
            raise InputError(f"{len(options.files)} files, but three each are needed: REQUEST ROLLOUT OUT")
        if options.wait:
            import_megatron()
            process.wait_for(Path(options.files[1]))
        trainer = None
        for asked, record, out in zip(options.files[::3], options.files[1::3], options.files[2::3], strict=True):
            request = Request.load(asked)
            started = time.perf_counter()
            if trainer is None or replace(trainer.request, rollout=request.rollout) != request:
                trainer = None  # frees its memory first
                trainer = Trainer(request)
            start = time.perf_counter() - started
            logprobs, meta = run(trainer, Rollout.load(record), options.progress)
            meta["seconds"]["start"] = start
            if dist.get_rank() == 0:
                save_file({"logprobs": logprobs}, out, metadata={"meta": json.dumps(meta, sort_keys=True)})

    return process.status(work)


if __name__ == "__main__":
    sys.exit(main())
