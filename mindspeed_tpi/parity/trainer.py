"""Drives the real Megatron-core: recomputes a rollout's log-probabilities, and trains a step on it.

    python -m mindspeed_tpi.parity.trainer REQUEST.json ROLLOUT.safetensors OUT.safetensors

OUT holds `logprobs` (f32 [N], aligned with the rollout's tokens, NaN for first tokens) and a JSON document `meta`.
Exit status: 0 done, 2 bad input, 3 the engine failed. A stock run is the same command with `MINDSPEED_TPI=0` and
`"stock": true` in the request.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from mindspeed_tpi import envs, ops, versions, weights
from mindspeed_tpi.contract import NumericsContract
from mindspeed_tpi.errors import InputError
from mindspeed_tpi.parallel.layout import Layout
from mindspeed_tpi.parity import process
from mindspeed_tpi.parity.request import Request
from mindspeed_tpi.parity.rollout import Rollout
from mindspeed_tpi.platform import cpu
from mindspeed_tpi.profiles import Profile

BATCH_TOKENS = 8192  # padded tokens of one micro-batch
LOGITS = 1 << 29  # f32 logits of one micro-batch: 2 GiB
SMALLEST_TEMPERATURE = 0.01  # vLLM raises smaller positive temperatures to this


@dataclass(frozen=True)
class Batch:
    """Sequences of a rollout, right-padded; padding follows every real token, so causal attention never sees it.

    Attributes:
        rows: indices of the sequences. lengths: their lengths.
        tokens, labels: int64 [b, s]; label t is token t + 1, and 0 where there is none.
    """

    rows: list[int]
    lengths: list[int]
    tokens: Tensor
    labels: Tensor

    @classmethod
    def of(cls, sequences: Sequence[Tensor], rows: list[int], length: int) -> Batch:
        tokens = torch.zeros(len(rows), length, dtype=torch.int64)
        for line, row in zip(tokens, rows, strict=True):
            line[: len(sequences[row])] = sequences[row]
        labels = torch.zeros_like(tokens)
        labels[:, :-1] = tokens[:, 1:]
        return cls(rows, [len(sequences[row]) for row in rows], tokens, labels)


class Trainer:
    """Megatron-core's GPTModel with a request's checkpoint, in this process.

    Attributes:
        profile: the model, with the request's dtype.
        model: the GPTModel.
        weight_version: updates received so far; 0 is the request's `model`.

    Raises:
        InputError: a model, dtype or mode that does not fit the request.
        LayoutError: a training layout that is not supported.
        ParityError: strict mode, and the model would run outside the numerics contract.
    """

    def __init__(self, request: Request) -> None:
        Layout.parse(request.train, "train")
        _check_mode(request.stock)
        self.request = request
        self.profile = replace(Profile.load(request.model), dtype=request.dtype)
        self._sources = (request.model, *request.weight_updates)
        self.weight_version = 0
        self._optimizer: torch.optim.Optimizer | None = None
        self._masters: list[Tensor] = []
        _start_megatron()
        self.model = build_model(self.profile, stock=request.stock)
        if not request.stock and envs.strict():
            from mindspeed_tpi.patches.megatron_core.support import check_covered

            check_covered(self.model)
        self.load(request.model)

    @property
    def contract(self) -> NumericsContract | None:
        """The contract with the model's rotary tables; None for stock."""
        return None if self.request.stock else self.profile.contract()

    def load(self, checkpoint: str | Path) -> None:
        """Replace the model's weights by those of a Hugging Face directory."""
        weights.load(self.model, checkpoint)

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The model's weights under their Hugging Face names, for the rollout engine's in-place update."""
        return weights.hf_tensors(self.model)

    def logprobs(self, rollout: Rollout, *, micro_batch: int | None = None, progress: bool = False) -> Tensor:
        """Log-probability of every token of a rollout by GPTModel's own forward pass, output layer and loss.

        Args:
            rollout: a record; its weight versions name the request's `model` and `weight_updates`, which are loaded in turn.
            micro_batch: sequences at a time; None: as many as fit a bound on tokens and logits. It does not change bits.
            progress: show a progress bar.

        Returns:
            f32 [N], NaN for the first token of each sequence.

        Raises:
            ContractError: the rollout was made under another numerics contract.
            InputError: a weight version that no checkpoint of the request holds, or a sequence longer than the model's positions.
        """
        if self.contract is not None:
            rollout.check_contract(self.contract, "the rollout")
        sequences = rollout.sequences
        result = torch.full((rollout.token_ids.numel(),), math.nan)
        starts = rollout.offsets.tolist()
        self.model.eval()
        with torch.no_grad(), tqdm(total=len(sequences), unit="seq", disable=not progress, desc="recompute") as bar:
            for version, rows in self._by_version(rollout):
                self._use_version(version)
                for batch in self._batches(sequences, rows, micro_batch):
                    loss = self._loss(batch, _temperature(rollout, self.request))
                    for row, length, line in zip(batch.rows, batch.lengths, loss, strict=True):
                        result[starts[row] + 1 : starts[row + 1]] = -line[: length - 1]
                    bar.update(len(batch.rows))
        return result

    def backward(self, rollout: Rollout, advantages: Tensor | None = None, *, micro_batch: int = 1) -> float:
        """Accumulate the gradient of the policy-gradient loss −Σ advantage · logprob / n over the n sampled tokens.

        Every row is padded to one length, a multiple of the contract's `max_tp`, so that `micro_batch` does not change bits.

        Args:
            advantages: f32 [N], aligned with the rollout; None: 1 everywhere, the mean negative log-likelihood.

        Returns:
            The loss, for reading only (summed in float64).
        """
        sequences = rollout.sequences
        generated = rollout.generated
        weight = torch.where(generated, torch.ones(()) if advantages is None else advantages, torch.zeros(()))
        weight = weight / int(generated.sum())
        multiple = self.profile.contract().max_tp
        length = -(-max(len(s) for s in sequences) // multiple) * multiple
        per_row = weight.split(rollout.offsets.diff().tolist())
        for parameter in self.model.parameters():
            if not hasattr(parameter, "main_grad"):
                parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
        self.model.train()
        total = 0.0
        for start in range(0, len(sequences), micro_batch):
            batch = Batch.of(sequences, list(range(start, min(start + micro_batch, len(sequences)))), length)
            loss = self._loss(batch, _temperature(rollout, self.request))
            gradient = torch.zeros_like(loss)
            for line, row, n in zip(gradient, batch.rows, batch.lengths, strict=True):
                line[: n - 1] = per_row[row][1:]
            total += float((loss.detach().double() * gradient).sum())
            loss.backward(gradient)
            _collect_gradients(self.model)
        return total

    def train_step(
        self, rollout: Rollout, advantages: Tensor | None = None, *, lr: float = 1e-3, micro_batch: int = 1
    ) -> float:
        """`backward`, then one AdamW step on f32 masters; the updated model is the next weight version. Returns the loss."""
        from mindspeed_tpi.patches.megatron_core.tensor_parallel.layers import add_head_gradients

        loss = self.backward(rollout, advantages, micro_batch=micro_batch)
        add_head_gradients(self.model)
        parameters: list[Any] = list(self.model.parameters())
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
                parameter.main_grad.zero_()
        self.weight_version += 1
        return loss

    def _loss(self, batch: Batch, temperature: float) -> Tensor:
        """Cross entropy f32 [b, s] of one micro-batch at the sampling temperature."""
        positions = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)
        if self.request.stock and temperature != 1:
            from megatron.core import tensor_parallel

            logits = self.model(batch.tokens, positions, None).float() / temperature
            loss = tensor_parallel.vocab_parallel_cross_entropy(logits.transpose(0, 1).contiguous(), batch.labels.t())
            return loss.t()  # type: ignore[no-any-return]
        from mindspeed_tpi.patches.megatron_core.tensor_parallel import cross_entropy

        with nullcontext() if temperature == 1 else cross_entropy.temperature(torch.tensor([temperature])):
            return self.model(batch.tokens, positions, None, labels=batch.labels)  # type: ignore[no-any-return]

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

    def _batches(self, sequences: Sequence[Tensor], rows: list[int], micro_batch: int | None) -> Iterator[Batch]:
        """Micro-batches of sequences of like length, longest first."""
        budget = min(BATCH_TOKENS, LOGITS // self.profile.vocab)
        rows = sorted(rows, key=lambda row: -len(sequences[row]))
        while rows:
            longest = len(sequences[rows[0]])
            count = micro_batch or max(1, budget // longest)
            yield Batch.of(sequences, rows[:count], longest)
            rows = rows[count:]


def build_model(profile: Profile, *, stock: bool = False) -> Any:
    """A GPTModel with the local layer spec for `profile`; weights are left uninitialised.

    Megatron-core must be started (`torch.distributed` and `parallel_state`).

    Raises:
        InputError: stock, and rotary constants that Megatron-core cannot express.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = profile.torch_dtype
    config = TransformerConfig(
        num_layers=profile.layers,
        hidden_size=profile.hidden,
        num_attention_heads=profile.heads,
        num_query_groups=profile.kv_heads,
        kv_channels=profile.head_dim,
        ffn_hidden_size=profile.ffn,
        layernorm_epsilon=profile.eps,
        normalization="RMSNorm",
        qk_layernorm=profile.qk_norm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=profile.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        window_size=(profile.window - 1, 0) if profile.window else None,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )
    rope = profile.rope
    numbers = dict(rope.parameters)
    if stock:
        _check_stock_rope(rope)
    if rope.scaling == "yarn":
        config.yarn_rotary_scaling_factor = numbers["factor"]
        config.yarn_original_max_position_embeddings = numbers["original_max_position_embeddings"]
        config.yarn_beta_fast = numbers.get("beta_fast", 32.0)
        config.yarn_beta_slow = numbers.get("beta_slow", 1.0)
        config.yarn_mscale = numbers.get("mscale")
        config.yarn_mscale_all_dim = numbers.get("mscale_all_dim")
        config.yarn_correction_range_round_to_int = bool(numbers.get("truncate", 1.0))
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=profile.qk_norm, normalization="RMSNorm"),
        vocab_size=profile.vocab,
        max_sequence_length=rope.max_position,
        share_embeddings_and_output_weights=profile.tied,
        position_embedding_type="yarn" if rope.scaling == "yarn" else "rope",
        rotary_percent=rope.rotary_dim / profile.head_dim,
        rotary_base=rope.theta,
        rope_scaling=rope.scaling == "llama3",
        rope_scaling_factor=numbers.get("factor", 1.0),
        seq_len_interpolation_factor=numbers["factor"] if rope.scaling == "linear" else None,
    )
    if not stock:
        model.rotary_pos_emb.rope_config = rope  # the checkpoint's own constants, also where Megatron-core has no field
    return model.to(dtype)


def _check_stock_rope(rope: ops.RopeConfig) -> None:
    """Refuse rotary constants that stock Megatron-core would silently replace by its own."""
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192.0}
    numbers = dict(rope.parameters)
    wrong = [k for k, v in fixed.items() if numbers[k] != v] if rope.scaling == "llama3" else []
    if rope.scaling == "yarn" and "attention_factor" in numbers:
        wrong = ["attention_factor"]
    if wrong:
        raise InputError(
            f"stock Megatron-core cannot express {rope.scaling} rotary scaling with {', '.join(f'{k}={numbers[k]}' for k in wrong)}; "
            "run without stock"
        )


def _start_megatron() -> None:
    """One rank in this process: CPU shim, gloo, Megatron-core's process groups. Starting again is a no-op."""
    cpu.enable()
    import megatron.core.models.gpt.gpt_model  # noqa: F401
    from megatron.core import parallel_state

    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()


def _check_mode(stock: bool) -> None:
    if (envs.MODE.get() == "0") != stock:
        raise InputError(
            f"stock={str(stock).lower()} in the request, but MINDSPEED_TPI={os.environ.get('MINDSPEED_TPI', '')!r}: a stock run "
            "needs MINDSPEED_TPI=0, any other run MINDSPEED_TPI=strict or 1"
        )


def _temperature(rollout: Rollout, request: Request) -> float:
    """The temperature that the rollout's log-probabilities are at."""
    sampling = rollout.meta.get("sampling", {})
    default = 1.0 if request.temperature == 0 else max(request.temperature, SMALLEST_TEMPERATURE)
    return float(sampling.get("logprob_temperature", default))


def _collect_gradients(model: torch.nn.Module) -> None:
    """What autograd left in `.grad` (stock operators) joins the f32 `main_grad`; ours is there already."""
    for parameter in model.parameters():
        if parameter.grad is not None and not getattr(parameter, "grad_added_to_main_grad", False):
            parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None


def run(request: Request, rollout: Rollout, progress: bool = False) -> tuple[Tensor, dict[str, Any]]:
    """(log-probabilities f32 [N], report) of a rollout."""
    started = time.perf_counter()
    trainer = Trainer(request)
    ready = time.perf_counter()
    logprobs = trainer.logprobs(rollout, progress=progress)
    seconds = time.perf_counter() - ready
    contract = trainer.contract
    meta = {
        "seconds": {
            "start": ready - started,
            "recompute": seconds,
            "tokens_per_second": rollout.token_ids.numel() / seconds,
        },
        "op_calls": ops.backends.call_counts(),
        "versions": {name: found for name in versions.UPSTREAMS if (found := versions.installed(name))},
        "backend": None if contract is None else ops.backends.active().describe(),
        "fingerprint": None if contract is None else contract.fingerprint,
    }
    return logprobs, meta


def main(arguments: Sequence[str] | None = None) -> int:
    """Process entry; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m mindspeed_tpi.parity.trainer", description=__doc__)
    parser.add_argument("request", help="REQUEST.json")
    parser.add_argument("rollout", help="rollout record")
    parser.add_argument("out", help="safetensors file to write")
    parser.add_argument("--progress", action="store_true", help="show a progress bar")
    parser.add_argument("--wait", action="store_true", help="start up, then wait until the rollout record exists")
    options = parser.parse_args(arguments)

    def work() -> None:
        if options.wait:
            _start_megatron()
            process.wait_for(Path(options.rollout))
        logprobs, meta = run(Request.load(options.request), Rollout.load(options.rollout), options.progress)
        save_file({"logprobs": logprobs}, options.out, metadata={"meta": json.dumps(meta, sort_keys=True)})

    return process.status(work)


if __name__ == "__main__":
    sys.exit(main())
