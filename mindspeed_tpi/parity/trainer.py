"""Drives the real Megatron-core: recomputes a rollout's log-probabilities, and trains a step on it.

    python -m mindspeed_tpi.parity.trainer REQUEST.json ROLLOUT.safetensors OUT.safetensors ...

Further triples of files are worked on one after the other; their layouts have as many ranks. OUT holds `logprobs` (f32 [N], aligned with the rollout's tokens, NaN for first tokens) and a JSON document `meta`.
Exit status: 0 done, 2 bad input, 3 the engine failed. A stock run is the same command with `MINDSPEED_TPI=0` and
`"stock": true` in the request. A layout of several ranks is started under torchrun; rank 0 writes OUT.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from mindspeed_tpi import __version__, contract, envs, ops, versions, weights
from mindspeed_tpi.contract import NumericsContract
from mindspeed_tpi.errors import InputError
from mindspeed_tpi.ops import gradient_groups
from mindspeed_tpi.parallel import tree
from mindspeed_tpi.parallel.layout import Layout
from mindspeed_tpi.parity import process
from mindspeed_tpi.parity.check import contract_of
from mindspeed_tpi.parity.megatron import build_model, import_megatron, start_megatron
from mindspeed_tpi.parity.request import Request
from mindspeed_tpi.parity.rollout import Rollout
from mindspeed_tpi.profiles import Profile

BATCH_TOKENS = 8192  # padded tokens of one micro-batch
LOGITS = 1 << 29  # f32 logits of one micro-batch: 2 GiB


@dataclass(frozen=True)
class Batch:
    """Sequences of a rollout, right-padded; padding follows every real token, so causal attention never sees it.

    Attributes:
        rows: indices of the sequences. lengths: their lengths.
        tokens, labels: int64 [b, s]; label t is token t + 1, and 0 where there is none. Lines beyond `rows` are padding.
    """

    rows: list[int]
    lengths: list[int]
    tokens: Tensor
    labels: Tensor

    @classmethod
    def of(cls, sequences: Sequence[Tensor], rows: list[int], length: int, lines: int | None = None) -> Batch:
        tokens = torch.zeros(len(rows) if lines is None else lines, length, dtype=torch.int64)
        for line, row in zip(tokens, rows, strict=False):
            line[: len(sequences[row])] = sequences[row]
        labels = torch.zeros_like(tokens)
        labels[:, :-1] = tokens[:, 1:]
        return cls(rows, [len(sequences[row]) for row in rows], tokens, labels)

    def padded(self, lines: int, length: int) -> Batch:
        """The same sequences in [lines, length]."""
        more = (0, length - self.tokens.shape[1], 0, lines - self.tokens.shape[0])
        tokens, labels = (torch.nn.functional.pad(x, more) for x in (self.tokens, self.labels))
        return replace(self, tokens=tokens, labels=labels)


Consume: TypeAlias = Callable[[Batch, Tensor, Tensor], Tensor]
"""(micro-batch, its cross entropy f32 [b, s of this rank], positions int64 [s of this rank]) -> what to differentiate."""


class Trainer:
    """Megatron-core's GPTModel with a request's checkpoint, on this process's rank of the request's training layout.

    Every rank makes one and calls its methods together with the others.

    Attributes:
        profile: the model, with the request's dtype.
        layout: the training layout.
        chunks: this rank's GPTModels, one per chunk of a virtual pipeline.
        weight_version: updates received so far; 0 is the request's `model`.

    Raises:
        InputError: a model, dtype or mode that does not fit the request.
        LayoutError: a training layout that the model or the number of ranks does not fit.
        ParityError: strict mode, and the model would run outside the numerics contract; or the ranks differ.
    """

    def __init__(self, request: Request) -> None:
        self.layout = Layout.parse(request.train, "train")
        _check_mode(request.stock)
        self.request = request
        self.profile = replace(Profile.load(request.model), dtype=request.dtype)
        self._sources = (request.model, *request.weight_updates)
        self.weight_version = 0
        self._optimizer: torch.optim.Optimizer | None = None
        self._masters: list[Tensor] = []
        self._complete = False
        start_megatron(self.layout, self._identity())
        stages = range(self.layout.vpp) if self.layout.vpp > 1 else [None]
        self.chunks = [build_model(self.profile, self.layout, stock=request.stock, vp_stage=s) for s in stages]
        if not request.stock and envs.strict():
            from mindspeed_tpi.patches.megatron_core.support import check_covered

            for chunk in self.chunks:
                check_covered(chunk)
        self.load(request.model)

    @property
    def model(self) -> Any:
        """This rank's (first) GPTModel."""
        return self.chunks[0]

    @property
    def contract(self) -> NumericsContract | None:
        """The contract with the model's rotary tables; None for stock."""
        return None if self.request.stock else self.profile.contract()

    def _identity(self) -> dict[str, str]:
        """What all ranks must agree on before the first step."""
        if self.layout.ranks == 1:
            return {}
        contract = self.contract
        return {
            "contract fingerprint": contract.fingerprint if contract else "stock",
            "backend": str(ops.backends.active().describe()["name"]) if contract else "stock",
            "dtype": self.request.dtype,
            "package version": __version__,
            "megatron-core version": str(versions.installed("megatron-core")),
            "checkpoint": ", ".join(weights.identity(source) for source in self._sources),
        }

    def load(self, checkpoint: str | Path) -> None:
        """Replace the model's weights by those of a Hugging Face directory."""
        weights.load(self.chunks, checkpoint)

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The model's weights under their Hugging Face names, for the rollout engine's in-place update; on rank 0."""
        return weights.hf_tensors(self.chunks)

    def logprobs(self, rollout: Rollout, *, micro_batch: int | None = None, progress: bool = False) -> Tensor:
        """Log-probability of every token of a rollout by GPTModel's own forward pass, output layer and loss.

        Args:
            rollout: a record; its weight versions name the request's `model` and `weight_updates`, which are loaded in turn.
            micro_batch: sequences at a time on each data-parallel rank; None: as many as fit a bound on tokens and
                logits. It does not change bits.
            progress: show a progress bar.

        Returns:
            f32 [N], NaN for the first token of each sequence; the same on every rank.

        Raises:
            ContractError: the rollout was made under another numerics contract.
            InputError: a weight version that no checkpoint of the request holds, or a sequence longer than the model's positions.
        """
        if not self.request.stock:
            rollout.check_contract(contract_of(self.chunks), "the rollout")
        sequences = self._sequences(rollout)
        result = torch.zeros(rollout.token_ids.numel())
        seen = torch.zeros(result.numel(), dtype=torch.int32)
        starts = rollout.offsets.tolist()
        temperature = _temperature(rollout)
        for chunk in self.chunks:
            chunk.eval()
        with (
            torch.no_grad(),
            tqdm(total=len(sequences), unit="seq", disable=not (progress and _leads()), desc="recompute") as bar,
        ):

            def keep(batch: Batch, loss: Tensor, positions: Tensor) -> Tensor:
                for row, length, line in zip(batch.rows, batch.lengths, loss if _reports() else (), strict=False):
                    real = positions < length - 1
                    where = starts[row] + 1 + positions[real]
                    result[where], seen[where] = -line[real], 1
                bar.update(len(batch.rows) * self.layout.dp)
                return loss

            for version, rows in self._by_version(rollout):
                self._use_version(version)
                self._run(self._batches(sequences, rows, micro_batch), temperature, keep)
        return _assemble(result, seen, starts)

    def backward(self, rollout: Rollout, advantages: Tensor | None = None, *, micro_batch: int = 1) -> float:
        """The gradient of the policy-gradient loss −Σ advantage · logprob / n over the n sampled tokens.

        It replaces what every parameter's f32 `main_grad` held, summed over data- and context-parallel ranks; a tied
        output projection's part stays apart until `complete_gradients`. Data-parallel rank r takes the r-th contiguous
        run of rows. Every row is padded to one length, a multiple of the contract's `max_tp`, so that `micro_batch`
        does not change bits.

        Args:
            advantages: f32 [N], aligned with the rollout; None: 1 everywhere, the mean negative log-likelihood.

        Returns:
            The loss, for reading only (summed in float64).
        """
        sequences = self._sequences(rollout)
        generated = rollout.generated
        weight = torch.where(generated, torch.ones(()) if advantages is None else advantages, torch.zeros(()))
        weight = weight / int(generated.sum())
        per_row = weight.split(rollout.offsets.diff().tolist())
        self._zero_gradients()
        for chunk in self.chunks:
            chunk.train()
        total = torch.zeros((), dtype=torch.float64)

        def weigh(batch: Batch, loss: Tensor, positions: Tensor) -> Tensor:
            gradient = torch.zeros_like(loss)
            for line, row, length in zip(gradient, batch.rows, batch.lengths, strict=False):
                real = positions < length - 1
                line[real] = per_row[row][1:][positions[real]]
            weighted = loss * gradient
            if _reports():
                total.add_((loss.detach().double() * gradient).sum())
            return weighted.sum()

        length = self._padded(max(len(s) for s in sequences))
        group = gradient_groups.begin_step(-(-len(sequences) // self.layout.dp), self.layout.dp)
        rows = self._rows_in_order(sequences, length, math.gcd(micro_batch, group) if group else micro_batch)
        self._run(rows, _temperature(rollout), weigh)
        self._reduce_gradients()
        return float(tree.gather(total.view(1), dist.group.WORLD).sum())

    def complete_gradients(self) -> None:
        """A tied output projection's gradient joins its embedding's, once (contract section 4)."""
        from megatron.core import parallel_state

        from mindspeed_tpi.patches.megatron_core.tensor_parallel.layers import add_head_gradients

        if self._complete:
            return
        for chunk in self.chunks:
            add_head_gradients(chunk)
        if self.profile.tied and self.layout.pp > 1 and parallel_state.is_rank_in_embedding_group(ignore_virtual=True):
            group = parallel_state.get_embedding_group()  # the first stage holds the embedding, the last the projection
            for chunk in self.chunks:
                if chunk.pre_process or chunk.post_process:
                    gradient: Any = chunk.shared_embedding_or_output_weight()
                    gradient.main_grad.copy_(tree.tree_reduce(gradient.main_grad, group))
        self._complete = True

    def gradient_hashes(self) -> dict[str, str]:
        """Hugging Face name → SHA-256 of the whole f32 gradient of the last `backward`; on rank 0, elsewhere empty."""
        self.complete_gradients()
        return _hashes(weights.hf_tensors(self.chunks, lambda parameter: getattr(parameter, "main_grad", None)))

    def weight_hashes(self) -> dict[str, str]:
        """Hugging Face name → SHA-256 of the whole weight; on rank 0, elsewhere empty."""
        return _hashes(self.hf_tensors())

    def train_step(
        self, rollout: Rollout, advantages: Tensor | None = None, *, lr: float = 1e-3, micro_batch: int = 1
    ) -> float:
        """`backward`, then one AdamW step on f32 masters; the updated model is the next weight version. Returns the loss."""
        loss = self.backward(rollout, advantages, micro_batch=micro_batch)
        self.complete_gradients()
        parameters = self._parameters()
        if self._optimizer is None:
            self._masters = [p.detach().float().clone() for p in parameters]
            self._optimizer = torch.optim.AdamW(self._masters, lr=lr, weight_decay=0.0, foreach=False)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        with torch.no_grad():
            for master, parameter in zip(self._masters, parameters, strict=True):
                master.grad = parameter.main_grad
            self._optimizer.step()
            for master, parameter in zip(self._masters, parameters, strict=True):
                parameter.copy_(master)
        self.weight_version += 1
        return loss

    def _parameters(self) -> list[Any]:
        return [parameter for chunk in self.chunks for parameter in chunk.parameters()]

    def _zero_gradients(self) -> None:
        from mindspeed_tpi.patches.megatron_core.tensor_parallel.layers import HEAD_GRAD

        self._complete = False
        for parameter in self._parameters():
            if hasattr(parameter, "main_grad"):
                parameter.main_grad.zero_()
            else:
                parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
                parameter.register_post_accumulate_grad_hook(_join_main_grad)
            if hasattr(parameter, HEAD_GRAD):
                delattr(parameter, HEAD_GRAD)

    def _reduce_gradients(self) -> None:
        """Sum over the ranks that saw other rows or other parts of them, by the tree in rank order."""
        from megatron.core import parallel_state

        from mindspeed_tpi.patches.megatron_core.tensor_parallel.layers import HEAD_GRAD

        dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
        expert = parallel_state.get_expert_data_parallel_group()
        for chunk in self.chunks:
            for name, parameter in chunk.named_parameters():
                group = expert if ".mlp.experts." in name else dense
                for gradient in (parameter.main_grad, getattr(parameter, HEAD_GRAD, None)):
                    if gradient is None:
                        continue
                    gradient_groups.check_complete(gradient)
                    if tree.size(group) > 1:
                        gradient.copy_(tree.tree_reduce(gradient, group))

    def _run(self, batches: Iterable[Batch], temperature: float, consume: Consume) -> None:
        """Every micro-batch through the model, by Megatron-core's pipeline schedule where there is a pipeline.

        Forward only under `torch.no_grad`, else with a backward pass from what `consume` returns.
        """
        if self.layout.pp == 1:
            for batch in batches:
                loss = consume(batch, self._loss(batch, temperature), _positions(batch))
                if torch.is_grad_enabled():
                    loss.backward()  # type: ignore[no-untyped-call]
            return
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        todo = list(batches)
        lines, length = (max(batch.tokens.shape[i] for batch in todo) for i in (0, 1))
        todo = [batch.padded(lines, length) for batch in todo]  # stages expect activations of one shape
        if self.layout.vpp > 1:  # the interleaved schedule takes whole groups
            todo += [Batch.of([], [], length, lines)] * (-len(todo) % self.layout.pp)

        def step(iterator: Iterator[Batch], chunk: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            batch = next(iterator)
            output = self._loss(batch, temperature, chunk)
            return output, lambda loss: (consume(batch, loss, _positions(batch)), torch.zeros((), dtype=torch.int), {})

        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(todo) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(todo),
            seq_length=length,
            micro_batch_size=lines,
            forward_only=not torch.is_grad_enabled(),
        )

    def _loss(self, batch: Batch, temperature: float, chunk: Any = None) -> Tensor:
        """Cross entropy f32 [b, s of this rank] of one micro-batch at the sampling temperature; or what an earlier
        pipeline stage hands on."""
        from megatron.core.utils import get_batch_on_this_cp_rank

        chunk = self.model if chunk is None else chunk
        positions = torch.arange(batch.tokens.shape[1]).repeat(len(batch.tokens), 1)
        tokens, labels, positions = get_batch_on_this_cp_rank(
            {"tokens": batch.tokens, "labels": batch.labels, "positions": positions}
        ).values()
        if self.request.stock and temperature != 1:
            from megatron.core import tensor_parallel

            output = chunk(tokens, positions, None)
            if not chunk.post_process:
                return output  # type: ignore[no-any-return]
            logits = (output.float() / temperature).transpose(0, 1).contiguous()
            return tensor_parallel.vocab_parallel_cross_entropy(logits, labels.t().contiguous()).t()  # type: ignore[no-any-return]
        from mindspeed_tpi.patches.megatron_core.tensor_parallel import cross_entropy

        with nullcontext() if temperature == 1 else cross_entropy.temperature(torch.tensor([temperature])):
            return chunk(tokens, positions, None, labels=labels)  # type: ignore[no-any-return]

    def _by_version(self, rollout: Rollout) -> Iterator[tuple[int, list[int]]]:
        """(weight version, sequences it produced), in ascending order."""
        versions_of = rollout.weight_versions.split(rollout.offsets.diff().tolist())
        first = [int(v[-1]) for v in versions_of]
        mixed = [row for row, v in enumerate(versions_of) if bool((v != v[-1]).any())]
        if mixed:
            raise InputError(f"sequence {mixed[0]} mixes weight versions; recompute needs one version per sequence")
        for version in sorted(set(first)):
            yield version, [row for row, v in enumerate(first) if v == version]

    def _use_version(self, version: int) -> None:
        if version == self.weight_version:
            return
        if self._optimizer is not None or version >= len(self._sources):
            raise InputError(
                f"the rollout has tokens of weight version {version}, the trainer holds version {self.weight_version} and the "
                f"request names {len(self._sources)} checkpoints"
            )
        self.load(self._sources[version])
        self.weight_version = version

    def _sequences(self, rollout: Rollout) -> list[Tensor]:
        sequences = rollout.sequences
        longest, limit = max(map(len, sequences)), self.profile.rope.max_position
        if longest > limit:
            raise InputError(
                f"a sequence of {longest} tokens exceeds the model's {limit} positions (max_position_embeddings of the checkpoint)"
            )
        return sequences

    def _padded(self, length: int) -> int:
        """Row length; under gradient groups one that every layout can split, since it decides spans."""
        multiple = 2 * contract.current().max_tp ** 2 if gradient_groups.count() else self.layout.row_multiple
        return -(-length // multiple) * multiple

    def _batches(self, sequences: Sequence[Tensor], rows: list[int], micro_batch: int | None) -> Iterator[Batch]:
        """This rank's micro-batches of sequences of like length, longest first; as many and as large on every rank."""
        ranks, rank = self.layout.dp, _data_parallel_rank()
        budget = min(BATCH_TOKENS, LOGITS // self.profile.vocab)
        rows = sorted(rows, key=lambda row: -len(sequences[row]))
        while rows:
            length = self._padded(len(sequences[rows[0]]))
            count = ranks * (micro_batch or max(1, budget // length))
            step, rows = rows[:count], rows[count:]
            lines = -(-len(step) // ranks)
            yield Batch.of(sequences, step[rank * lines : (rank + 1) * lines], length, lines)

    def _rows_in_order(self, sequences: Sequence[Tensor], length: int, micro_batch: int) -> Iterator[Batch]:
        """This rank's contiguous run of rows in micro-batches; as many lines on every rank."""
        lines = -(-len(sequences) // self.layout.dp)
        start = _data_parallel_rank() * lines
        rows = range(start, min(start + lines, len(sequences)))
        for first in range(0, lines, micro_batch):
            last = min(first + micro_batch, lines)
            yield Batch.of(sequences, list(rows[first:last]), length, last - first)


def _check_mode(stock: bool) -> None:
    if (envs.MODE.get() == "0") != stock:
        raise InputError(
            f"stock={str(stock).lower()} in the request, but MINDSPEED_TPI={os.environ.get('MINDSPEED_TPI', '')!r}: a stock run "
            "needs MINDSPEED_TPI=0, any other run MINDSPEED_TPI=strict or 1"
        )


def _temperature(rollout: Rollout) -> float:
    """The temperature that the rollout's log-probabilities are at.

    Raises:
        InputError: sequences at different temperatures.
    """
    found = rollout.temperatures.unique().tolist()
    if len(found) > 1:
        raise InputError(f"the rollout's sequences are at temperatures {found}; recompute one temperature at a time")
    return float(found[0])


def _join_main_grad(parameter: Any) -> None:
    """What autograd left in `.grad` (stock operators) joins the f32 `main_grad`; ours is there already."""
    if not getattr(parameter, "grad_added_to_main_grad", False):
        parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


def _positions(batch: Batch) -> Tensor:
    """Position in its row of every token that this context-parallel rank holds, int64 [s of this rank]."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    whole = torch.arange(batch.tokens.shape[1]).unsqueeze(0)
    return get_batch_on_this_cp_rank({"positions": whole})["positions"][0]  # type: ignore[no-any-return]


def _data_parallel_rank() -> int:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_rank()  # type: ignore[no-any-return]


def _reports() -> bool:
    """Whether this rank's losses count: its tensor-parallel peers have the same."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_rank() == 0  # type: ignore[no-any-return]


def _leads() -> bool:
    """Whether this is the first of the ranks that see losses."""
    from megatron.core import parallel_state

    groups = parallel_state.get_data_parallel_rank(with_context_parallel=True), not _reports()
    return parallel_state.is_pipeline_last_stage(ignore_virtual=True) and not any(groups)


def _assemble(result: Tensor, seen: Tensor, starts: list[int]) -> Tensor:
    """Every rank's share of the log-probabilities, put together; NaN for the first token of each sequence.

    Args:
        result: f32 [N], +0 where `seen`, int32 [N], is 0: another rank has it.
    """
    if dist.get_world_size() > 1:
        result = tree.owned_sum(result, dist.group.WORLD)
        dist.all_reduce(seen)
    first = torch.zeros(len(seen), dtype=torch.bool)
    first[starts[:-1]] = True
    if not torch.equal(seen, (~first).int()):
        raise RuntimeError(f"{int((seen != (~first).int()).sum())} log-probabilities have no rank, or more than one")
    result[first] = math.nan
    return result


def _hashes(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    return {name: hashlib.sha256(t.contiguous().view(torch.uint8).numpy().data).hexdigest() for name, t in tensors}


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
    parser = argparse.ArgumentParser(prog="python -m mindspeed_tpi.parity.trainer", description=__doc__)
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
