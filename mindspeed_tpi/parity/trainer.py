"""The real Megatron-core on a request's model: recomputes a rollout's log-probabilities, and trains steps on it."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from mindspeed_tpi import __version__, envs, ops, versions, weights
from mindspeed_tpi.contract import NumericsContract
from mindspeed_tpi.errors import InputError
from mindspeed_tpi.ops import gradient_groups
from mindspeed_tpi.parallel import tree
from mindspeed_tpi.parallel.layout import Layout
from mindspeed_tpi.parity import batches, schedule
from mindspeed_tpi.parity.batches import Batch
from mindspeed_tpi.parity.check import contract_of
from mindspeed_tpi.parity.megatron import build_model, start_megatron
from mindspeed_tpi.parity.request import Request
from mindspeed_tpi.parity.rollout import Rollout
from mindspeed_tpi.parity.training import Training
from mindspeed_tpi.profiles import Profile


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
        self._training: Training | None = None
        start_megatron(self.layout, self._identity())
        stages = range(self.layout.vpp) if self.layout.vpp > 1 else [None]
        self.chunks = [build_model(self.profile, self.layout, stock=request.stock, vp_stage=s) for s in stages]
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
                todo = batches.longest_first(
                    sequences, rows, self.layout, _data_parallel_rank(), self.profile.vocab, micro_batch
                )
                schedule.run(self.chunks, self.layout, todo, temperature, keep, stock=self.request.stock)
        return _assemble(result, seen, starts)

    def backward(self, rollout: Rollout, advantages: Tensor | None = None, *, micro_batch: int = 1) -> float:
        """The gradient of the policy-gradient loss −Σ advantage · logprob / n over the n sampled tokens, by Megatron-core's
        DistributedDataParallel, schedule and `finalize_model_grads`.

        It replaces what the f32 gradient buffers held; of the sum over data- and context-parallel ranks each rank then has
        its shard, as the distributed optimizer takes it. Data-parallel rank r takes the r-th contiguous run of rows. Every
        row is padded to one length, a multiple of the contract's `max_tp`, so that `micro_batch` does not change bits.

        Args:
            advantages: f32 [N], aligned with the rollout; None: 1 everywhere, the mean negative log-likelihood.

        Returns:
            The loss, for reading only (a sequence summed in float64, sequences exactly).
        """
        sequences = self._sequences(rollout)
        generated = rollout.generated
        weight = torch.where(generated, torch.ones(()) if advantages is None else advantages, torch.zeros(()))
        weight = weight / int(generated.sum())
        per_row = weight.split(rollout.offsets.diff().tolist())
        training = self._training = self._training or Training(self.chunks)
        training.zero_gradients()
        for chunk in self.chunks:
            chunk.train()
        losses: list[float] = []

        def weigh(batch: Batch, loss: Tensor, positions: Tensor) -> Tensor:
            gradient = torch.zeros_like(loss)
            for line, row, length in zip(gradient, batch.rows, batch.lengths, strict=False):
                real = positions < length - 1
                line[real] = per_row[row][1:][positions[real]]
            weighted = loss * gradient
            if _reports():
                losses.extend(float((line.double() * g).sum()) for line, g in zip(loss.detach(), gradient, strict=True))
            return weighted.sum()

        length = batches.row_length(self.layout, max(len(s) for s in sequences))
        group = gradient_groups.begin_step(-(-len(sequences) // self.layout.dp), self.layout.dp)
        size = math.gcd(micro_batch, group) if group else micro_batch
        todo = batches.in_order(sequences, self.layout.dp, _data_parallel_rank(), length, size)
        schedule.run(training.chunks, self.layout, todo, _temperature(rollout), weigh, stock=self.request.stock)
        total = torch.tensor([math.fsum(losses)], dtype=torch.float64)
        return math.fsum(tree.gather(total, dist.group.WORLD).flatten().tolist())

    @property
    def grad_norm(self) -> float:
        """The gradient norm of the last step, before clipping."""
        return math.nan if self._training is None else self._training.grad_norm

    def gradient_hashes(self) -> dict[str, str]:
        """Hugging Face name → SHA-256 of the whole f32 gradient of the last `backward`, or of `train_step`, then clipped; on
        rank 0, elsewhere empty."""
        if self._training is not None:
            self._training.gather_gradients()
        return _hashes(weights.hf_tensors(self.chunks, lambda parameter: getattr(parameter, "main_grad", None)))

    def weight_hashes(self) -> dict[str, str]:
        """Hugging Face name → SHA-256 of the whole weight; on rank 0, elsewhere empty."""
        return _hashes(self.hf_tensors())

    def train_step(
        self, rollout: Rollout, advantages: Tensor | None = None, *, lr: float = 1e-3, micro_batch: int = 1
    ) -> float:
        """`backward`, then one step of Megatron-core's distributed AdamW with the gradient clipped; the updated model is the
        next weight version. Returns the loss."""
        loss = self.backward(rollout, advantages, micro_batch=micro_batch)
        assert self._training is not None  # backward has made it
        self._training.step(lr)
        self.weight_version += 1
        return loss

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
        if (self._training is not None and self._training.has_stepped) or version >= len(self._sources):
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
