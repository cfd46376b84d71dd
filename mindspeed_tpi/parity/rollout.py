"""The rollout record: what an engine sampled and reported, exchanged by the parity driver, RL loops and diagnosis.

One safetensors file: flat tensors over all sequences, and a JSON document in the file's metadata.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mindspeed_tpi.contract import NumericsContract
from mindspeed_tpi.errors import ContractError, InputError

FORMAT = "mindspeed-tpi-rollout-1"
_DTYPES = {
    "token_ids": torch.int64,
    "offsets": torch.int64,
    "prompt_lengths": torch.int64,
    "positions": torch.int64,
    "logprobs": torch.float32,
    "weight_versions": torch.int64,
}


@dataclass(frozen=True)
class Rollout:
    """R sequences of N tokens in all, prompt and continuation, concatenated.

    Attributes:
        token_ids: int64 [N].
        offsets: int64 [R + 1]; sequence r is `token_ids[offsets[r]:offsets[r + 1]]`.
        prompt_lengths: int64 [R].
        positions: int64 [N], absolute position of each token in its own sequence.
        logprobs: f32 [N], log-probability of each token given those before it; NaN where none was reported (the
            first token; the prompt, unless prompt logprobs were asked for).
        weight_versions: int64 [N], number of weight updates the engine had received when it produced the token.
        meta: JSON-able: `model, dtype, layout, sampling, versions, backend, contract, fingerprint, counters, op_calls, seconds`.
            `contract` and `fingerprint` are None for a stock engine.
    """

    token_ids: Tensor
    offsets: Tensor
    prompt_lengths: Tensor
    positions: Tensor
    logprobs: Tensor
    weight_versions: Tensor
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
        for name in ("positions", "logprobs", "weight_versions"):
            if getattr(self, name).numel() != total:
                raise InputError(f"rollout field {name} has {getattr(self, name).numel()} entries for {total} tokens")

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

    def check_contract(self, contract: NumericsContract, source: str) -> None:
        """Refuse a rollout that another contract produced.

        Raises:
            ContractError: no contract recorded, or a field differs (named with both values).
        """
        recorded = self.meta.get("contract")
        if recorded is None:
            raise ContractError(
                f"{source} carries no numerics contract: it came from a stock engine; run it with MINDSPEED_TPI=strict"
            )
        contract.check_same(NumericsContract.from_json(json.dumps(recorded)), source)

    def save(self, path: str | Path) -> None:
        """Write the record; an existing file is replaced."""
        tensors = {name: getattr(self, name).contiguous() for name in _DTYPES}
        save_file(tensors, str(path), metadata={"format": FORMAT, "meta": json.dumps(self.meta, sort_keys=True)})

    @classmethod
    def load(cls, path: str | Path) -> Rollout:
        """Read a record.

        Raises:
            InputError: the file is missing, damaged, or no rollout record.
        """
        try:
            with safe_open(str(path), framework="pt") as file:
                metadata = file.metadata() or {}
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
        return cls(**tensors, meta=json.loads(metadata["meta"]))
