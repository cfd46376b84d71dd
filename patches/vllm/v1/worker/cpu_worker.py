"""Workers that report what they run. vLLM resolves them by dotted path, so the classes are made when looked up here."""

from __future__ import annotations

import json
import os
import select
import threading
from collections import Counter
from functools import cache, partial
from typing import Any

import torch
from safetensors import safe_open

from mindspeed_tpi import contract, envs, ops, strict, versions
from mindspeed_tpi.coverage import Watch
from mindspeed_tpi.errors import ParityError
from mindspeed_tpi.parallel.layout import Layout
from mindspeed_tpi.patches.vllm._coverage import (
    ATTRIBUTES,
    WAY_OUT,
    calling_operators,
    changed_logits,
    run_eagerly_too,
    uncovered,
)
from mindspeed_tpi.patches.vllm._status import in_force
from mindspeed_tpi.patches.vllm.model_executor.layers.rotary_embedding import built_rope
from mindspeed_tpi.patches.vllm.platforms.cpu import KEY

DRIVER = "_MINDSPEED_TPI_DRIVER"
"""In the environment of the engines that `parity.engine` starts: its process, with which their workers end."""


class _Counters:
    """What the real scheduler did, read from the work it hands out."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._prompts: dict[str, int] = {}

    def observe(self, work: Any) -> None:
        """Count one `SchedulerOutput`."""
        if not work.total_num_scheduled_tokens:
            return
        self.counts["steps"] += 1
        self.counts["preemptions"] += len(work.preempted_req_ids or ())
        for request in work.scheduled_new_reqs:
            self._prompts[request.req_id] = request.prompt_len
            self.counts["prefix_cache_hits"] += request.num_computed_tokens
            ends = request.num_computed_tokens + work.num_scheduled_tokens[request.req_id]
            self.counts["prompts_chunked"] += ends < request.prompt_len
        for name in work.finished_req_ids:
            self._prompts.pop(name, None)

    def take(self) -> dict[str, int]:
        names = ("steps", "prompts_chunked", "prefix_cache_hits", "preemptions")
        taken = {name: self.counts[name] for name in names}
        self.counts.clear()
        return taken


def end_with(driver: int) -> None:
    """End this process as soon as another one has ended: vLLM's engine core in a process of its own outlives its killed driver,
    but not its worker."""

    def wait() -> None:
        try:
            process = os.pidfd_open(driver)
        except ProcessLookupError:
            os._exit(1)
        poll = select.poll()
        poll.register(process, select.POLLIN)
        poll.poll()
        os._exit(1)

    threading.Thread(target=wait, name="mindspeed_tpi: ends with the driver", daemon=True).start()


class _Staged:
    """New weights beside those in use, in this worker's shards, until all have come."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._parameters = dict(model.named_parameters())
        # Memory that is not written takes no room yet.
        self._new = {name: torch.empty_like(p, device="cpu") for name, p in self._parameters.items()}
        self._loaded: set[str] = set()

    def load(self, path: str) -> None:
        """Have vLLM's own loaders take their parts of a safetensors file of Hugging Face tensors."""
        in_use = {name: parameter.data for name, parameter in self._parameters.items()}
        try:
            for name, parameter in self._parameters.items():
                parameter.data = self._new[name]
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
                self._loaded |= self._model.load_weights((name, file.get_tensor(name)) for name in names)
        finally:
            for name, parameter in self._parameters.items():
                parameter.data = in_use[name]

    def lacking(self) -> list[str]:
        return sorted(self._parameters.keys() - self._loaded)

    def commit(self) -> None:
        """Overwrite the weights in use, each new one's memory being freed at once."""
        for name, parameter in self._parameters.items():
            parameter.data.copy_(self._new.pop(name))


@cache
def observed_worker_class() -> type[Any]:
    """vLLM's CPU worker with counters, seeding and in-place weight updates; its numerics are upstream's."""
    from vllm.utils.torch_utils import set_random_seed
    from vllm.v1.worker.cpu_worker import CPUWorker

    class ObservedWorker(CPUWorker):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            driver = os.environ.get(DRIVER, "")
            if driver not in ("", str(os.getpid())):
                end_with(int(driver))
            self._tpi_counters = _Counters()
            self._tpi_staged: _Staged | None = None

        def execute_model(self, scheduler_output: Any) -> Any:
            self._tpi_counters.observe(scheduler_output)
            return super().execute_model(scheduler_output)

        def tpi_take_counts(self) -> dict[str, dict[str, int]]:
            """Scheduler counters and operator calls since the last time."""
            calls = ops.backends.call_counts()
            ops.backends.reset_counts()
            return {"counters": self._tpi_counters.take(), "op_calls": calls}

        def tpi_seed(self, seed: int) -> None:
            set_random_seed(seed)

        def tpi_stage_weights(self, path: str) -> str:
            """Keep this worker's part of a file of Hugging Face tensors beside the weights in use; returns what went wrong."""
            try:
                if self._tpi_staged is None:
                    self._tpi_staged = _Staged(self.model_runner.get_model())
                self._tpi_staged.load(path)
            except Exception as error:  # vLLM's loaders raise anything
                return f"worker rank {self.rank}: {error!r}"
            return ""

        def tpi_commit_weights(self) -> str:
            """Put what was kept in the place of the weights in use; returns what is lacking, and then changes nothing."""
            if self._tpi_staged is None:
                return f"worker rank {self.rank} has been given no weights"
            if lacking := self._tpi_staged.lacking():
                return f"worker rank {self.rank} lacks {', '.join(lacking[:8])}"
            self._tpi_staged.commit()
            self._tpi_staged = None
            return ""

        def tpi_discard_weights(self) -> None:
            self._tpi_staged = None

    return ObservedWorker


@cache
def contract_worker_class() -> type[Any]:
    """A worker that refuses to start unless it runs the contract its parent process asked for."""

    class ContractWorker(observed_worker_class()):  # type: ignore[misc]
        def load_model(self, *, load_dummy_weights: bool = False) -> None:
            if not in_force():
                raise ParityError(
                    f"{self._tpi_name}: field plugin is False: it did not load mindspeed_tpi's vLLM plugin and would run vLLM's "
                    f"own numerics. Check MINDSPEED_TPI={os.environ.get('MINDSPEED_TPI')!r}, "
                    f"VLLM_PLUGINS={os.environ.get('VLLM_PLUGINS')!r} and the package's installation."
                )
            strict.check_patches()
            super().load_model(load_dummy_weights=load_dummy_weights)
            self._tpi_verify()
            self._tpi_steps = 0
            self._tpi_watches = [Watch(*ATTRIBUTES), Watch(*ATTRIBUTES)]

        def execute_model(self, scheduler_output: Any) -> Any:
            """A step: from the embedding to the logits. The first in strict mode, and every `MINDSPEED_TPI_CHECK_EVERY`-th, runs
            under `strict.Checked`: there a compiled model runs eagerly too, since its graph is out of that mode's sight."""
            strict.check_patches()
            for watch, root in zip(
                self._tpi_watches, (self.model_runner.get_model(), self.model_runner.sampler), strict=True
            ):
                watch.look(root, self._tpi_check_covered)
            step = partial(super().execute_model, scheduler_output)
            if not (envs.strict() and scheduler_output.total_num_scheduled_tokens):
                return step()
            due = strict.due(self._tpi_steps)
            self._tpi_steps += 1
            if not due:
                return step()
            model = self.model_runner.get_model()
            names = {id(module): name for name, module in model.named_modules()}
            with run_eagerly_too(model):
                return strict.Checked("vllm", names, WAY_OUT, calling_operators()).run(step)

        @property
        def _tpi_name(self) -> str:
            return f"worker rank {self.rank} (process {os.getpid()})"

        def tpi_report(self) -> dict[str, Any]:
            """What this worker runs, JSON-able: the engine's part of a rollout record."""
            model, parallel = self.model_runner.get_model(), self.parallel_config
            rope = built_rope(model)
            built = contract.current().overridden({"rope_table": ops.table_hash(rope)})
            outside = uncovered(self.model_runner)
            ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
            return {
                "rank": self.rank,
                "pid": os.getpid(),
                "plugin": in_force(),
                "mode": envs.MODE.get(),
                "model": self.model_config.model,
                "dtype": str(self.model_config.dtype).removeprefix("torch."),
                "layout": str(
                    Layout(
                        tp=parallel.tensor_parallel_size,
                        dp=parallel.data_parallel_size,
                        ep=ranks if parallel.enable_expert_parallel else 1,
                    )
                ),
                "logprobs_mode": self.model_config.logprobs_mode,
                "backend": ops.backends.active().name,
                "backend_details": ops.backends.active().describe(),
                "contract": json.loads(built.to_json()),
                "fingerprint": built.fingerprint,
                "rope": rope.document(),
                "uncovered": outside,
                "coverage": [*outside, *changed_logits(self.vllm_config), *strict.lines()],
                "versions": {name: found for name in versions.UPSTREAMS if (found := versions.installed(name))},
            }

        def _tpi_verify(self) -> None:
            report = self.tpi_report()
            wanted = self.vllm_config.additional_config[KEY]
            differing = [
                f"{k} is {report[k]!r}, the parent process has {v!r}" for k, v in wanted.items() if report[k] != v
            ]
            if differing:
                raise ParityError(
                    f"{self._tpi_name}: field {'; field '.join(differing)}. "
                    "Start all processes of the engine with the same MINDSPEED_TPI* environment and package version."
                )
            self._tpi_check_covered()

        def _tpi_check_covered(self) -> None:
            strays = uncovered(self.model_runner)
            if strays:
                strict.outside(
                    f"{self._tpi_name}: {', '.join(strays)}. {WAY_OUT}; MINDSPEED_TPI=1 runs these as vLLM wrote them"
                )

    return ContractWorker


def __getattr__(name: str) -> Any:
    if name == "ObservedWorker":
        return observed_worker_class()
    if name == "ContractWorker":
        return contract_worker_class()
    raise AttributeError(name)
