"""Drives the real vLLM: a request in, a rollout record out.

    python -m mindspeed_tpi.parity.engine REQUEST.json OUT.safetensors

Exit status: 0 done, 2 bad input, 3 the engine failed. A stock run is the same command with `MINDSPEED_TPI=0` and
`"stock": true` in the request.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi import envs, ops, weights
from mindspeed_tpi.errors import InputError, LayoutError, ParityError
from mindspeed_tpi.parallel.layout import Layout
from mindspeed_tpi.parity import identity, process
from mindspeed_tpi.parity.replicas import Replicas, free_port
from mindspeed_tpi.parity.request import Request
from mindspeed_tpi.parity.rollout import Rollout, Sample
from mindspeed_tpi.patches.vllm._limits import layout_problems
from mindspeed_tpi.patches.vllm.v1.worker.cpu_worker import DRIVER
from mindspeed_tpi.profiles import Profile
from mindspeed_tpi.weights.update import stream

_DEFAULT_LENGTH = 1024
_ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "MINDSPEED_TPI": "strict",
}


class Engine:
    """A running `vllm.LLM` for one request's model and settings; use it as a context manager.

    Variables of the environment that the user has set are kept; those the engine needs are set while it runs.
    An engine with data parallelism starts its further ranks itself, which get `dp_rank` and a port to meet at.

    Raises:
        InputError: the request asks for what the engine cannot do.
        ParityError: the engine would run outside the numerics contract.
    """

    def __init__(self, request: Request, dp_rank: int = 0, dp_port: int | None = None) -> None:
        self.dp_rank, self._dp_port = dp_rank, dp_port
        self.layout = Layout.parse(request.rollout, "rollout")
        active = envs.MODE.get() != "0" if envs.MODE.is_set else not request.stock
        if active == request.stock:
            raise InputError(
                f"stock={str(request.stock).lower()} in the request, but MINDSPEED_TPI={os.environ.get('MINDSPEED_TPI', '')!r}: "
                "a stock run needs MINDSPEED_TPI=0, any other run MINDSPEED_TPI=strict or 1"
            )
        self.request = request
        self.weight_version = 0
        self.profile = Profile.load(request.model)
        for model in (request.model, *request.weight_updates):
            weights.check(model, self.profile)
        problems = layout_problems(self.profile, self.layout.tp, self.layout.dp, self.layout.ep > 1)
        if problems and not request.stock:
            raise LayoutError(f"rollout layout {self.layout}: {'. '.join(problems)}")
        longest = max(len(prompt) for prompt in request.prompts) + request.max_new_tokens
        limit = self.profile.rope.max_position
        if (request.engine.max_model_len or 0) > limit:
            raise InputError(
                f"engine.max_model_len={request.engine.max_model_len} exceeds the model's {limit} positions; lower it, or raise "
                "max_position_embeddings in config.json"
            )
        self.max_model_len = request.engine.max_model_len or min(max(longest, _DEFAULT_LENGTH), limit)
        self.logprobs_mode = "raw_logprobs" if request.temperature in (0, 1) else "processed_logprobs"
        self.workers: list[dict[str, Any]] = []
        self._identity: dict[str, Any] = {}
        self._saved: dict[str, str | None] = {}
        self._llm: Any = None
        self._replicas: Replicas | None = None

    def __enter__(self) -> Engine:
        wanted = {name: os.environ.get(name) or value for name, value in _ENVIRONMENT.items()}
        if self.request.stock:
            wanted["MINDSPEED_TPI"] = "0"
        wanted[DRIVER] = str(os.getpid())
        wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if self.request.engine.spawn else "0"
        if self.layout.ranks > 1:
            threads = max(1, len(os.sched_getaffinity(0)) // self.layout.ranks)
            wanted["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(threads)
        if self.layout.dp > 1:
            self._dp_port = self._dp_port or free_port()
            wanted |= {
                "VLLM_DP_SIZE": str(self.layout.dp),
                "VLLM_DP_RANK": str(self.dp_rank),
                "VLLM_DP_RANK_LOCAL": str(self.dp_rank),
                "VLLM_DP_MASTER_IP": "127.0.0.1",
                "VLLM_DP_MASTER_PORT": str(self._dp_port),
            }
        self._saved = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            if self.layout.dp > 1 and self.dp_rank == 0:
                self._replicas = Replicas(self.layout.dp, partial(Engine, self.request, dp_port=self._dp_port))
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine and put the environment back."""
        if self._replicas is not None:
            self._replicas.close()
            self._replicas = None
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            import vllm.envs

            vllm.envs.disable_envs_cache()  # an in-process engine core had frozen them
        for name, value in self._saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._saved = {}

    def _start(self) -> None:
        from mindspeed_tpi.integrations.vllm import register
        from mindspeed_tpi.patches.vllm import _limits
        from mindspeed_tpi.patches.vllm._status import in_force

        request, options = self.request, self.request.engine
        extra: dict[str, Any] = {}
        if not request.stock:
            register()
        elif in_force():
            raise InputError("this process's vLLM is patched already; make the stock run in a process of its own")
        else:
            extra["worker_cls"] = _limits.OBSERVED_WORKER
        started = time.perf_counter()
        self._llm = _import_llm()(
            model=request.model,
            dtype=request.dtype,
            seed=request.seed,
            skip_tokenizer_init=True,
            generation_config="vllm",
            logprobs_mode=self.logprobs_mode,
            max_model_len=self.max_model_len,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            enable_chunked_prefill=True,
            block_size=options.block_size,
            enable_prefix_caching=options.enable_prefix_caching,
            enforce_eager=options.enforce_eager,
            num_gpu_blocks_override=options.kv_cache_blocks,
            tensor_parallel_size=self.layout.tp,
            enable_expert_parallel=self.layout.ep > 1,
            config_format="hf",
            load_format="safetensors",  # "auto" would take consolidated.safetensors, whatever the index says
            **extra,
        )
        self.start_seconds = time.perf_counter() - started
        if not request.stock:
            self.workers = self._rpc(identity.REPORT)
            self._check_workers()
        self._rpc("tpi_take_counts")
        if self._replicas is not None:
            self._replicas.receive()  # each has started
            self.workers = [report for reports in self._everywhere("report") for report in reports]
        self._identity = identity.of_engine(self._llm if request.stock else self.workers)

    def _check_workers(self) -> None:
        """The parent's half of the handshake; each worker has refused to start on a difference already."""
        wanted = {
            "plugin": True,
            "mode": envs.MODE.get(),
            "backend": ops.backends.active().name,
            "fingerprint": self.profile.contract().fingerprint,
        }
        for report in self.workers:
            for name, value in wanted.items():
                if report[name] != value:
                    raise ParityError(
                        f"worker rank {report['rank']} (process {report['pid']}): field {name} is {report[name]!r}, "
                        f"the driver has {value!r}"
                    )

    def report(self) -> list[dict[str, Any]]:
        """What each worker of this rank runs."""
        return self.workers

    def _everywhere(self, method: str, arguments: Sequence[tuple[Any, ...]] = ()) -> list[Any]:
        """Run a method on every data-parallel rank at once, with arguments of its own; the answers in rank order."""
        arguments = arguments or [()] * self.layout.dp
        if self._replicas is None:
            return [getattr(self, method)(*arguments[0])]
        self._replicas.send(method, arguments[1:])
        mine = getattr(self, method)(*arguments[0])
        return [mine, *self._replicas.receive()]

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        results: list[Any] = self._llm.collective_rpc(method, args=args)
        return results

    def generate(
        self,
        prompts: Sequence[Sequence[int]] | None = None,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
        prompt_logprobs: bool | None = None,
        progress: bool = False,
    ) -> Rollout:
        """Sample a continuation of every prompt; what is not given is taken from the request.

        Args:
            seed: seeds the workers' sampler before this call; None: the sampler goes on where it was.
            progress: show a progress bar.

        Raises:
            InputError: a token id outside the vocabulary, a sequence beyond `max_model_len`, or a temperature the
                engine was not built for.
        """
        request = self.request
        prompts = request.prompts if prompts is None else prompts
        max_new_tokens = request.max_new_tokens if max_new_tokens is None else max_new_tokens
        temperature = request.temperature if temperature is None else temperature
        prompt_logprobs = request.prompt_logprobs if prompt_logprobs is None else prompt_logprobs
        self._check_prompts(prompts, max_new_tokens, temperature, prompt_logprobs)
        sampling = {
            "temperature": temperature,
            "max_tokens": max_new_tokens,
            "logprobs": 0,
            "prompt_logprobs": 0 if prompt_logprobs else None,
            "ignore_eos": True,
            "detokenize": False,
        }
        ranks = self.layout.dp
        started = time.perf_counter()
        shares = self._everywhere("sample", [(prompts[r::ranks], sampling, seed, progress) for r in range(ranks)])
        seconds = time.perf_counter() - started
        samples: list[Sample] = [shares[i % ranks][0][i // ranks] for i in range(len(prompts))]
        rollout = Rollout.from_samples(samples, self._identity)
        rollout.meta.update(
            engine=asdict(request.engine),
            seed=request.seed if seed is None else seed,
            **{name: _added(taken[name] for _, taken in shares) for name in ("counters", "op_calls")},
            seconds={
                "start": self.start_seconds,
                "generate": seconds,
                "tokens_per_second": int(rollout.generated.sum()) / seconds,
            },
        )
        return rollout

    def sample(
        self, prompts: Sequence[Sequence[int]], sampling: dict[str, Any], seed: int | None, progress: bool
    ) -> tuple[list[Sample], dict[str, Any]]:
        """This data-parallel rank's share of `generate`: samples, and what its first worker counted."""
        from vllm import SamplingParams

        if seed is not None:
            self._rpc("tpi_seed", seed)
        parameters = SamplingParams(**sampling)
        outputs = self._llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts], parameters, use_tqdm=progress
        )
        samples = [sample for output in outputs for sample in Sample.of(output, parameters)]
        return samples, self._rpc("tpi_take_counts")[0]

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> int:
        """Load Hugging Face tensors into the running model in place, all or none (see `weights.update`), and forget the prefix
        cache.

        Returns:
            The new weight version, which tokens sampled from now on carry.

        Raises:
            InputError: tensors other than the model's.
            ParityError: requests are running, there is no room, or a worker cannot take them.
        """
        ranks = self.layout.dp

        def workers(method: str, *args: Any) -> list[Any]:
            return [answer for rank in self._everywhere("_rpc", [(method, *args)] * ranks) for answer in rank]

        stream(tensors, self.profile, workers, lambda: all(self._everywhere("forget")))
        self.weight_version += 1
        self._everywhere("label", [(self.weight_version,)] * ranks)
        return self.weight_version

    def forget(self) -> bool:
        """Empty this data-parallel rank's prefix cache; whether it could."""
        return bool(self._llm.reset_prefix_cache())

    def label(self, version: int) -> None:
        """Say which weights this data-parallel rank has."""
        self._llm.llm_engine.set_weight_version(str(version))

    def _check_prompts(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float, prompt_logprobs: bool
    ) -> None:
        vocab = self.profile.vocab
        for index, prompt in enumerate(prompts):
            if not prompt or max(prompt) >= vocab or min(prompt) < 0:
                raise InputError(f"prompt {index} is empty or holds a token id outside the vocabulary of {vocab}")
            if len(prompt) + max_new_tokens > self.max_model_len:
                raise InputError(
                    f"prompt {index} of {len(prompt)} tokens and {max_new_tokens} new ones exceed "
                    f"max_model_len={self.max_model_len}; shorten them or raise engine.max_model_len"
                )
        if self.logprobs_mode == "raw_logprobs" and temperature not in (0, 1):
            raise InputError(
                f"temperature {temperature} on an engine built for raw logprobs, which ignore it; "
                "build the engine from a request with that temperature"
            )
        if prompt_logprobs and temperature not in (0, 1):
            raise InputError(
                f"vLLM reports prompt logprobs at temperature 1 only, not at {temperature}; set prompt_logprobs to false"
            )


def _import_llm() -> Any:
    """vLLM's `LLM`, imported quietly unless the user wants its log."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", _ENVIRONMENT["VLLM_LOGGING_LEVEL"])
    from vllm import LLM

    return LLM


def _added(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Counts by name, zeros kept."""
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)


def join(rollouts: Sequence[Rollout]) -> Rollout:
    """One record of several generations; counters, operator calls and seconds add up, the rest is the first one's."""
    meta = dict(rollouts[0].meta)
    for name in ("counters", "op_calls"):
        meta[name] = _added(r.meta[name] for r in rollouts)
    seconds = sum(r.meta["seconds"]["generate"] for r in rollouts)
    generated = sum(int(r.generated.sum()) for r in rollouts)
    meta["seconds"] = {
        "start": meta["seconds"]["start"],
        "generate": seconds,
        "tokens_per_second": generated / seconds,
    }
    lengths = torch.cat([r.offsets.diff() for r in rollouts])
    return Rollout(
        token_ids=torch.cat([r.token_ids for r in rollouts]),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        prompt_lengths=torch.cat([r.prompt_lengths for r in rollouts]),
        positions=torch.cat([r.positions for r in rollouts]),
        logprobs=torch.cat([r.logprobs for r in rollouts]),
        weight_versions=torch.cat([r.weight_versions for r in rollouts]),
        temperatures=torch.cat([r.temperatures for r in rollouts]),
        meta=meta,
    )


def run(request: Request, progress: bool = False) -> Rollout:
    """The whole request: generate, and once more after each weight update."""
    with Engine(request) as engine:
        rollouts = [engine.generate(progress=progress)]
        for model in request.weight_updates:
            engine.update_weights(weights.unpacked(model, engine.profile))
            rollouts.append(engine.generate(progress=progress))
        return rollouts[0] if len(rollouts) == 1 else join(rollouts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Process entry; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m mindspeed_tpi.parity.engine", description=__doc__)
    parser.add_argument("request", help="REQUEST.json")
    parser.add_argument("out", help="rollout record to write")
    parser.add_argument("--progress", action="store_true", help="show a progress bar")
    parser.add_argument("--wait", action="store_true", help="import vLLM, then wait until the request exists")
    options = parser.parse_args(arguments)

    def work() -> None:
        if options.wait:
            _import_llm()
            process.wait_for(Path(options.request))
        run(Request.load(options.request), options.progress).save(options.out)

    return process.status(work)


if __name__ == "__main__":
    sys.exit(main())
