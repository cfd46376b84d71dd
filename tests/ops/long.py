"""Many random cases, cpu == reference: `python -m tests.ops.long --operator linear --cases 100000 --state DIR`.

Every seed is one case. The state directory remembers, per operator, which shards of seeds have passed, so that an
interrupted run goes on where it stopped. Exit status 1 and the seeds when a case fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from tests.ops import cases

SHARD = 500


def run_shard(operator: str, shard: int, cases_in_shard: int) -> list[tuple[int, str]]:
    """Check the seeds of one shard; returns (seed, message) of every failure."""
    torch.set_num_threads(1)
    failures = []
    for seed in range(shard * SHARD, shard * SHARD + cases_in_shard):
        try:
            cases.check(*cases.seeded(operator, seed))
        except Exception as error:  # whatever is wrong, the seed reproduces it
            failures.append((seed, f"{type(error).__name__}: {error}"))
    return failures


class State:
    """Shards of one operator that have passed, on disk."""

    def __init__(self, directory: Path, operator: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"{operator}.json"
        self.done: dict[int, int] = {}
        if self._path.is_file():
            self.done = {int(shard): n for shard, n in json.loads(self._path.read_text())["shards"].items()}

    def record(self, shard: int, cases_in_shard: int) -> None:
        self.done[shard] = cases_in_shard
        partial = self._path.with_suffix(".tmp")
        partial.write_text(json.dumps({"cases": sum(self.done.values()), "shards": self.done}))
        partial.replace(self._path)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ops.long", description=__doc__.splitlines()[0])
    parser.add_argument("--operator", choices=[*cases.BUILDERS, "all"], default="all")
    parser.add_argument("--cases", type=int, default=100_000, help="per operator")
    parser.add_argument("--state", type=Path, required=True, help="directory of the progress files")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args = parser.parse_args()
    operators = list(cases.BUILDERS) if args.operator == "all" else [args.operator]
    failed = False
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        for operator in operators:
            state = State(args.state, operator)
            sizes = {i: min(SHARD, args.cases - i * SHARD) for i in range(-(-args.cases // SHARD))}
            missing = [i for i, n in sizes.items() if state.done.get(i, 0) < n]
            start, bad = time.monotonic(), 0
            shards = zip(
                missing, pool.map(run_shard, [operator] * len(missing), missing, map(sizes.get, missing)), strict=True
            )
            for finished, (shard, failures) in enumerate(shards, 1):
                if failures:
                    bad += len(failures)
                    seed, message = failures[0]
                    print(f"\n{operator}: {len(failures)} failures in shard {shard}; seed {seed}: {message}")
                else:
                    state.record(shard, sizes[shard])
                print(
                    f"\r{operator}: {sum(state.done.values())} of {args.cases} cases passed, {bad} failed, "
                    f"{time.monotonic() - start:.0f} s of about {(time.monotonic() - start) / finished * len(missing):.0f} s",
                    end="",
                    flush=True,
                )
            print(f"\r{operator}: {sum(state.done.values())} of {args.cases} cases passed, {bad} failed" + " " * 30)
            failed |= bad > 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
