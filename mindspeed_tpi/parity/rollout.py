"""The rollout record: what an engine sampled and reported, exchanged by the parity driver, RL loops and diagnosis.

One safetensors file: flat tensors over all sequences, and a JSON document in the file's metadata.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mindspeed_tpi import envs
from mindspeed_tpi.contract import NumericsContract
from mindspeed_tpi.errors import ContractError, InputError
from mindspeed_tpi.ops import RopeConfig
from mindspeed_tpi.parity import identity
from mindspeed_tpi.patches.vllm.v1.engine.output_processor import SAMPLING
from mindspeed_tpi.sampling import document, irreproducible, logprob_temperature

FORMAT = "mindspeed-tpi-rollout-2"
_OLDER = ("mindspeed-tpi-rollout-1",)
_DTYPES = {
    "token_ids": torch.int64,
    "offsets": torch.int64,
    "prompt_lengths": torch.int64,
    "positions": torch.int64,
    "logprobs": torch.float32,
    "weight_versions": torch.int64,
    "temperatures": torch.float32,
}
_FIELDS: dict[str, tuple[type, ...]] = {  # of meta; None stands in those of a stock engine
    "mode": (str,),
    "model": (str, type(None)),
    "dtype": (str, type(None)),
    "layout": (str,),
    "logprobs_mode": (str, type(None)),
    "backend": (str, type(None)),
    "contract": (dict, type(None)),
    "fingerprint": (str, type(None)),
    "rope": (dict, type(None)),
    "coverage": (list, type(None)),
    "versions": (dict,),
    "sampling": (list,),
}


@dataclass(frozen=True)
class Rollout:
    """R sequences of N tokens in all, prompt and continuation, concatenated.

    Make one with `from_vllm` or `from_tokens`.

    Attributes:
        token_ids: int64 [N].
        offsets: int64 [R + 1]; sequence r is `token_ids[offsets[r]:offsets[r + 1]]`.
        prompt_lengths: int64 [R].
        positions: int64 [N], absolute position of each token in its own sequence.
        logprobs: f32 [N], log-probability of each token given those before it; NaN where none was reported (the
            first token; the prompt, unless prompt logprobs were asked for).
        weight_versions: int64 [N], version of the weights that produced the token (0: those the engine started with).
        temperatures: f32 [R], the temperature that each sequence's log-probabilities are at.
        meta: JSON-able. Of the engine: `mode`, `model`, `dtype`, `layout`, `logprobs_mode`, `backend`, `versions`,
            `contract`, its `fingerprint`, `rope` (what its rotary tables are made from), `coverage` (what ran outside the
            contract), `workers`; `contract`, `fingerprint`, `rope` and `coverage` are None for a stock engine. `sampling`: the
            distinct sampling parameters. The parity driver adds `engine`, `counters`, `op_calls` and `seconds`.
    """

    token_ids: Tensor
    offsets: Tensor
    prompt_lengths: Tensor
    positions: Tensor
    logprobs: Tensor
    weight_versions: Tensor
    temperatures: Tensor
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, dtype in _DTYPES.items():
            tensor = getattr(self, name)
            if tensor.dtype != dtype or tensor.dim() != 1:
                raise InputError(
                    f"rollout field {name} must be a 1-D {dtype} tensor, got {tensor.dtype} {tuple(tensor.shape)}"
                )
        total, sequences = self.token_ids.numel(), self.prompt_lengths.numel()
        if self.offsets.numel() != sequences + 1 or int(self.offsets[0]) != 0 or int(self.offsets[-1]) != total:
            raise InputError(f"rollout offsets must run from 0 to {total} over {sequences} sequences")
        lengths = self.offsets.diff()
        if (
            bool((lengths < 1).any())
            or bool((self.prompt_lengths < 1).any())
            or bool((self.prompt_lengths > lengths).any())
        ):
            raise InputError("every rollout sequence needs at least one prompt token and no more prompt than tokens")
        for name, wanted in (
            ("positions", total),
            ("logprobs", total),
            ("weight_versions", total),
            ("temperatures", sequences),
        ):
            if getattr(self, name).numel() != wanted:
                raise InputError(
                    f"rollout field {name} has {getattr(self, name).numel()} entries for {total} tokens in {sequences} sequences"
                )
        if not bool((self.temperatures > 0).all()):
            raise InputError(
                "rollout field temperatures must be positive; greedy sampling is reported at temperature 1"
            )

    @classmethod
    def from_vllm(
        cls,
        outputs: Sequence[Any],
        engine: Any,
        *,
        sampling: Any = None,
        weight_version: int | None = None,
    ) -> Rollout:
        """The record of what vLLM generated: one sequence per completion, so n per request.

        Args:
            outputs: finished `vllm.RequestOutput`s, generated with `SamplingParams(logprobs=0)` or more, with or without
                prompt logprobs.
            engine: the `vllm.LLM`, or what `collective_rpc("tpi_report")` of an AsyncLLM or server returned; None for a
                stock engine that is out of reach.
            sampling: the `SamplingParams` of all outputs, or one per output; None: those the patched engine noted on each.
            weight_version: of all tokens; None: as vLLM counts it, 0 at first, then what its `set_weight_version` was given.

        Raises:
            InputError: an output that is unfinished or has no log-probabilities, an engine that is none, unknown sampling
                parameters, or a weight version that is no number.
            ParityError: the engine's workers differ.
        """
        given = list(sampling) if isinstance(sampling, list | tuple) else [sampling] * len(outputs)
        if len(given) != len(outputs):
            raise InputError(f"{len(given)} sampling parameters for {len(outputs)} outputs")
        samples = [
            sample
            for output, own in zip(outputs, given, strict=True)
            for sample in Sample.of(output, own, weight_version)
        ]
        return cls.from_samples(samples, identity.of_engine(engine))

    @classmethod
    def from_tokens(
        cls,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[float]],
        engine: Any,
        *,
        sampling: Any,
        weight_versions: int | Sequence[int | Sequence[int]] = 0,
    ) -> Rollout:
        """The record of R sequences whose tokens and numbers came over a wire, as from verl's servers.

        Args:
            prompts, completions: token ids of each sequence.
            logprobs: one float per completion token, as the engine reported it (f32; JSON's decimal form keeps every bit).
            engine: the workers' reports, as for `from_vllm`; None for a stock engine.
            sampling: the `SamplingParams`, or a mapping of its fields, of all sequences or one per sequence.
            weight_versions: of all tokens, or one per sequence, or one per completion token.

        Raises:
            InputError, ParityError: as `from_vllm`.
        """
        given = list(sampling) if isinstance(sampling, list | tuple) else [sampling] * len(prompts)
        versions = [weight_versions] * len(prompts) if isinstance(weight_versions, int) else list(weight_versions)
        counts = {"completions": completions, "logprobs": logprobs, "sampling": given, "weight_versions": versions}
        for name, values in counts.items():
            if len(values) != len(prompts):
                raise InputError(f"{len(values)} {name} for {len(prompts)} prompts")
        samples = []
        for index, (prompt, tokens, numbers, own, version) in enumerate(
            zip(prompts, completions, logprobs, given, versions, strict=True)
        ):
            each = [version] * len(tokens) if isinstance(version, int) else list(version)
            if len(numbers) != len(tokens) or len(each) != len(tokens):
                raise InputError(
                    f"sequence {index} has {len(tokens)} completion tokens, {len(numbers)} logprobs and {len(each)} weight versions"
                )
            first = each[0] if each else 0
            samples.append(
                Sample(
                    list(prompt),
                    [*prompt, *tokens],
                    [math.nan] * len(prompt) + list(numbers),
                    [first] * len(prompt) + each,
                    document(own),
                )
            )
        return cls.from_samples(samples, identity.of_engine(engine))

    @classmethod
    def from_samples(cls, samples: Sequence[Sample], engine: Mapping[str, Any]) -> Rollout:
        """The record of samples of one engine, of that `identity`."""
        mode = engine["logprobs_mode"] or "processed_logprobs"
        lengths = [len(sample.tokens) for sample in samples]
        temperatures = []
        distinct: dict[str, dict[str, Any]] = {}
        for index, sample in enumerate(samples):
            distinct.setdefault(json.dumps({**sample.sampling, "seed": None}, sort_keys=True), sample.sampling)
            temperatures.append(logprob_temperature(sample.sampling, mode))
            if temperatures[-1] != 1 and not all(map(math.isnan, sample.logprobs[: len(sample.prompt)])):
                raise InputError(
                    f"sequence {index} has prompt logprobs, which vLLM reports at temperature 1 only, and sampled ones at "
                    f"{temperatures[-1]}; ask for no prompt logprobs"
                )

        def flat(values: list[Any], dtype: torch.dtype) -> Tensor:
            return torch.tensor([value for part in values for value in part], dtype=dtype)

        return cls(
            token_ids=flat([sample.tokens for sample in samples], torch.int64),
            offsets=torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0),
            prompt_lengths=torch.tensor([len(sample.prompt) for sample in samples], dtype=torch.int64),
            positions=flat([range(n) for n in lengths], torch.int64),
            logprobs=flat([sample.logprobs for sample in samples], torch.float32),
            weight_versions=flat([sample.versions for sample in samples], torch.int64),
            temperatures=torch.tensor(temperatures, dtype=torch.float32),
            meta={**engine, "sampling": list(distinct.values())},
        )

    @property
    def sequences(self) -> list[Tensor]:
        """Token ids of each sequence."""
        return list(self.token_ids.split(self.offsets.diff().tolist()))

    @property
    def generated(self) -> Tensor:
        """bool [N]: tokens the engine sampled."""
        starts = self.offsets[:-1].repeat_interleave(self.offsets.diff())
        return torch.arange(self.token_ids.numel()) - starts >= self.prompt_lengths.repeat_interleave(
            self.offsets.diff()
        )

    @property
    def contract(self) -> NumericsContract | None:
        """The contract that the engine ran; None for a stock engine.

        Raises:
            ContractError: the recorded contract lacks a field or has a malformed one, or its fingerprint is not the record's.
        """
        recorded, fingerprint = self.meta.get("contract"), self.meta.get("fingerprint")
        if recorded is None and fingerprint is None:
            return None
        if not isinstance(recorded, dict):
            raise ContractError(f"the rollout has the fingerprint {fingerprint!r} but no contract: it is damaged")
        contract = NumericsContract.from_document(recorded)
        if contract.fingerprint != fingerprint:
            raise ContractError(
                f"the rollout's fingerprint {fingerprint!r} is not that of its contract, {contract.fingerprint!r}: it was "
                "changed or damaged after the engine wrote it; make the rollout again"
            )
        return contract

    @property
    def rope(self) -> RopeConfig | None:
        """What the engine's rotary tables are made from; None for a stock engine."""
        return None if self.meta.get("rope") is None else RopeConfig.from_document(self.meta["rope"])

    def mismatches(self, contract: NumericsContract) -> list[str]:
        """Why a trainer under `contract` cannot reproduce the record; empty when it can. One clause each, with the way out."""
        found = []
        recorded = self.contract
        if recorded is None:
            return ["it carries no numerics contract: it came from a stock engine (run it with MINDSPEED_TPI=strict)"]
        if differing := contract.differences(recorded):
            found.append(
                f"it was made under another numerics contract: {'; '.join(differing)} (run both sides with the same "
                "MINDSPEED_TPI_CONTRACT, model configuration and kernel version)"
            )
        if self.meta["mode"] != "strict":
            found.append(
                f"its engine ran in mode {self.meta['mode']!r}, in which anything outside the contract may run as vLLM wrote it "
                "(run it with MINDSPEED_TPI=strict)"
            )
        if self.meta["coverage"]:
            found.append(f"its engine ran outside the contract: {', '.join(self.meta['coverage'])}")
        clauses = [c for s in self.meta["sampling"] for c in irreproducible(s, self.meta["logprobs_mode"])]
        if clauses:
            found.append(f"sampling parameters that no trainer reproduces: {', '.join(dict.fromkeys(clauses))}")
        return found

    def check_contract(self, contract: NumericsContract, source: str) -> None:
        """Refuse a rollout that a trainer under `contract` cannot reproduce (outside strict mode: one that another contract
        produced).

        Raises:
            ContractError: names every reason, with both values.
        """
        recorded = self.contract
        problems = self.mismatches(contract)
        if envs.strict() and problems:
            raise ContractError(f"{source} cannot be reproduced: {'; '.join(problems)}")
        if recorded is None:
            raise ContractError(f"{source}: {problems[0]}")
        contract.check_same(recorded, source)

    def save(self, path: str | Path) -> None:
        """Write the record; an existing file is replaced."""
        tensors = {name: getattr(self, name).contiguous() for name in _DTYPES}
        save_file(tensors, str(path), metadata={"format": FORMAT, "meta": json.dumps(self.meta, sort_keys=True)})

    @classmethod
    def load(cls, path: str | Path) -> Rollout:
        """Read a record.

        Raises:
            InputError: the file is missing, damaged, no rollout record, or one of an older format.
            ContractError: its contract is malformed, or the fingerprint is not that of the contract.
        """
        try:
            with safe_open(str(path), framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") in _OLDER:
                    raise InputError(
                        f"{path} is a rollout record of format {metadata['format']!r}, which lacks mode, coverage and sampling "
                        f"parameters (expected {FORMAT!r}): make the rollout again with this version of mindspeed_tpi"
                    )
                if metadata.get("format") != FORMAT:
                    raise InputError(
                        f"{path} is no rollout record (format {metadata.get('format')!r}, expected {FORMAT!r})"
                    )
                missing = sorted(set(_DTYPES) - set(file.keys()))
                if missing:
                    raise InputError(
                        f"{path} lacks the tensors {', '.join(missing)}; it is damaged: make the rollout again"
                    )
                tensors = {name: file.get_tensor(name) for name in _DTYPES}
        except (OSError, SafetensorError) as error:
            raise InputError(f"cannot read the rollout {path}: {error}") from None
        rollout = cls(**tensors, meta=_meta(str(path), metadata.get("meta", "")))
        _ = rollout.contract
        return rollout


def _meta(path: str, text: str) -> dict[str, Any]:
    """The record's JSON document, every field there and of its type."""
    try:
        meta = json.loads(text)
    except ValueError as error:
        raise InputError(f"{path} is damaged: its document is not JSON ({error}); make the rollout again") from None
    wrong = [
        name
        for name, types in _FIELDS.items()
        if not isinstance(meta, dict) or not isinstance(meta.get(name, ...), types)
    ]
    if wrong:
        raise InputError(
            f"{path} lacks {', '.join(wrong)} in its document, or they have another type; it is damaged: make the rollout again"
        )
    return meta  # type: ignore[no-any-return]


class Sample(NamedTuple):
    """One completion: token ids of the prompt, of prompt and completion, one logprob each (NaN where none was reported), the
    weight version of each, and the sampling parameters (`sampling.document`)."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    sampling: dict[str, Any]

    @classmethod
    def of(cls, output: Any, sampling: Any = None, weight_version: int | None = None) -> list[Sample]:
        """From one of vLLM's request outputs; every logprob is the one the engine reported.

        Raises:
            InputError: as `Rollout.from_vllm`.
        """
        if sampling is None:
            sampling = getattr(output, SAMPLING, None)
        name = f"request {output.request_id}"
        if sampling is None:
            raise InputError(
                f"{name} carries no sampling parameters: its engine ran vLLM's own numerics (start it with "
                "MINDSPEED_TPI=strict), or it was made in another process: pass sampling="
            )
        if not output.finished or output.prompt_token_ids is None:
            raise InputError(f"{name} is not finished, or has no prompt token ids; wait for its last output")
        prompt = list(output.prompt_token_ids)
        prompt_logprobs = output.prompt_logprobs or [None] * len(prompt)
        samples = []
        for completion in output.outputs:
            if completion.logprobs is None:
                raise InputError(f"{name} has no log-probabilities; sample with SamplingParams(logprobs=0)")
            tokens = [*prompt, *completion.token_ids]
            if len(completion.logprobs) != len(completion.token_ids):
                raise InputError(
                    f"{name} has {len(completion.logprobs)} log-probabilities for {len(completion.token_ids)} tokens; sample "
                    "with output_kind=RequestOutputKind.FINAL_ONLY or CUMULATIVE"
                )
            reported = [*prompt_logprobs, *completion.logprobs]
            logprobs = [
                math.nan if entry is None else entry[token].logprob
                for entry, token in zip(reported, tokens, strict=True)
            ]
            versions = _versions(name, completion, weight_version)
            first = versions[0] if versions else weight_version or 0
            samples.append(cls(prompt, tokens, logprobs, [first] * len(prompt) + versions, document(sampling)))
        return samples


def _versions(name: str, completion: Any, weight_version: int | None) -> list[int]:
    """Weight version of each token of a completion."""
    count = len(completion.token_ids)
    spans = getattr(completion, "weight_versions", None)
    if weight_version is not None or not spans:
        return [weight_version or 0] * count
    versions = [0] * count
    for span in spans:
        label = "0" if span.version == "default" else str(span.version)
        if not label.isdecimal():
            raise InputError(
                f"{name} was sampled by weights of version {span.version!r}, which is no number; name them so in "
                "set_weight_version, or pass weight_version="
            )
        versions[span.start : span.end] = [int(label)] * (span.end - span.start)
    return versions
