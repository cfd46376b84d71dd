"""Whether a trainer reproduces a rollout: the public `contract_of` and `check`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_tpi import contract as contracts
from mindspeed_tpi import envs
from mindspeed_tpi.contract import NumericsContract
from mindspeed_tpi.errors import ContractError, InputError, LayoutError, ParityError
from mindspeed_tpi.ops import RopeConfig, table_hash
from mindspeed_tpi.parity import identity
from mindspeed_tpi.parity.compare import Comparison, compare
from mindspeed_tpi.parity.logprobs import logprobs as logprobs_of
from mindspeed_tpi.parity.rollout import Rollout

logger = logging.getLogger("mindspeed_tpi")
_LOGITS = 1 << 27  # f32 logits of one batch: 512 MiB


def contract_of(model: Any) -> NumericsContract:
    """The numerics contract that a built model runs, its rotary tables included.

    Args:
        model: a Megatron-core GPTModel, also wrapped (DistributedDataParallel, Float16Module) or as the list of a pipeline
            rank's chunks; or a `vllm.LLM`.

    Raises:
        InputError: another kind of model.
        ParityError: it was built without this package's patches, or its rotary embedding is not the contract's.
    """
    if hasattr(model, "llm_engine"):
        document = identity.of_engine(model)["contract"]
        if document is None:
            raise ParityError("the engine runs vLLM's own numerics; start it with MINDSPEED_TPI=strict")
        return NumericsContract.from_document(document)
    return contracts.current().overridden({"rope_table": table_hash(_rope(model))})


def gpt_model(model: Any) -> Any:
    """The (first) GPTModel inside wrappers and lists.

    Raises:
        InputError: there is none.
    """
    inner = model
    while True:
        if isinstance(inner, list | tuple | torch.nn.ModuleList) and inner:
            inner = inner[0]
        elif isinstance(getattr(inner, "module", None), torch.nn.Module):
            inner = inner.module
        else:
            break
    if not hasattr(inner, "rotary_pos_emb") or not hasattr(inner, "parallel_output"):
        raise InputError(
            f"a {type(inner).__name__} is no Megatron-core GPTModel with rotary embeddings; pass the built model, or the "
            "contract that contract_of gave where the model is"
        )
    return inner


def _rope(model: Any) -> RopeConfig:
    """What the rotary tables that a GPTModel rotates by are made from."""
    rotary = gpt_model(model).rotary_pos_emb
    config = getattr(rotary, "rope_config", None)
    code = getattr(rotary.forward, "__func__", rotary.forward)
    if config is None or not code.__module__.startswith("mindspeed_tpi."):
        raise ParityError(
            f"the model's rotary embedding {type(rotary).__module__}.{type(rotary).__qualname__} runs outside the numerics "
            "contract: build the model after `import mindspeed_tpi`, with MINDSPEED_TPI=strict, and replace nothing in it"
        )
    return config  # type: ignore[no-any-return]


def check(
    rollout: Rollout,
    model: Any,
    logprobs: Tensor | Sequence[Tensor] | None = None,
    *,
    temperature: float | None = None,
    weight_version: int | None = None,
) -> Comparison:
    """Compare a trainer with a rollout, bit by bit, over the tokens that the engine sampled.

    In strict mode whatever a trainer cannot reproduce is refused before a number is looked at: another contract or rotary
    table, a stock engine or one not in strict mode, sampling parameters, temperature and weight version. Otherwise each is a
    warning. Numbers that differ are no error: see the result's `exact`.

    Args:
        rollout: the record.
        model: the trainer's built model; or its `contract_of`, in a process that holds only the numbers.
        logprobs: what the training loop computed: f32 [N], aligned with the record's tokens, or R tensors, one value per sampled
            token of each sequence. None: computed here by the model's own forward pass, on one pipeline and context-parallel
            rank; every tensor-parallel rank calls this together with the others.
        temperature: what `logprobs` were computed at; default 1.
        weight_version: the version of the model's weights; None: not compared.

    Raises:
        ContractError: strict mode; names every reason, both values and the way out.
        InputError: `logprobs` of another shape or dtype, or none and no model.
        LayoutError: a model this cannot run by itself.
    """
    problems = _problems(rollout, model, None if logprobs is None else temperature or 1.0, weight_version)
    if problems:
        message = f"the rollout cannot be reproduced: {'; '.join(problems)}"
        if envs.strict():
            raise ContractError(message)
        logger.warning("%s", message)
    if logprobs is None:
        if isinstance(model, NumericsContract):
            raise InputError(
                "a contract computes no log-probabilities: pass those of the training loop as the third argument"
            )
        logprobs = _recompute(rollout, model)
    elif not isinstance(logprobs, Tensor):
        logprobs = _aligned(rollout, logprobs)
    return compare(rollout, logprobs.detach(), int(rollout.generated.sum()))


def _problems(rollout: Rollout, model: Any, temperature: float | None, weight_version: int | None) -> list[str]:
    """Why the numbers cannot be the same; empty when they must be."""
    found = []
    if envs.MODE.get() == "0":
        return ["this process runs stock numerics (MINDSPEED_TPI=0); start it with MINDSPEED_TPI=strict"]
    mine = model if isinstance(model, NumericsContract) else contract_of(model)
    found += rollout.mismatches(mine)
    theirs = rollout.rope
    if theirs is not None and not isinstance(model, NumericsContract) and table_hash(theirs) != mine.rope_table:
        ours, there = _rope(model).document(), theirs.document()
        differing = [
            f"{name} (here {ours[name]!r}, there {there[name]!r})"
            for name in ours
            if name != "max_position" and ours[name] != there[name]
        ]
        found.append(f"other rotary tables: {', '.join(differing)}; theta is Megatron-core's rotary_base")
    versions = rollout.weight_versions[rollout.generated].unique().tolist()
    if len(versions) > 1:
        found.append(
            f"it was sampled by weights of versions {versions}; one model reproduces one: make a record of each"
        )
    elif weight_version is not None and versions not in ([], [weight_version]):
        found.append(
            f"weight version {weight_version} here, {versions[0]} there (recompute before the optimizer step, or update the "
            "engine's weights and set_weight_version)"
        )
    if temperature is not None:
        mine_t = torch.tensor(temperature, dtype=torch.float32)
        if bool((rollout.temperatures != mine_t).any()):
            there_t = [round(t, 6) for t in rollout.temperatures.unique().tolist()]
            found.append(
                f"temperature {temperature} here, {', '.join(map(str, there_t))} there (compute logprobs(..., temperature=) at "
                "the rollout's, and say so to check(..., temperature=))"
            )
    return found


def _aligned(rollout: Rollout, values: Sequence[Tensor]) -> Tensor:
    """f32 [N] from one value per sampled token of each sequence; NaN elsewhere."""
    wanted = (rollout.offsets.diff() - rollout.prompt_lengths).tolist()
    found = [tuple(value.shape) for value in values]
    if found != [(count,) for count in wanted]:
        raise InputError(
            f"log-probabilities of {len(found)} sequences with shapes {found[:4]}…, the rollout sampled {wanted[:4]}… tokens in "
            f"{len(wanted)} sequences"
        )
    whole = torch.full((rollout.token_ids.numel(),), torch.nan)
    whole[rollout.generated] = torch.cat([value.detach() for value in values])
    return whole


def _recompute(rollout: Rollout, model: Any) -> Tensor:
    """f32 [N] by the model's forward pass over right-padded batches; NaN for first tokens."""
    from megatron.core import parallel_state

    inner = gpt_model(model)
    for name, size in (
        ("pipeline", parallel_state.get_pipeline_model_parallel_world_size()),
        ("context", parallel_state.get_context_parallel_world_size()),
    ):
        if size > 1:
            raise LayoutError(f"check does not drive {size} {name}-parallel ranks; pass the logprobs of your own loop")
    multiple = contracts.current().max_tp
    longest = -(-int(rollout.offsets.diff().max()) // multiple) * multiple
    vocab = getattr(inner.config, "unpadded_vocab_size", None) or inner.vocab_size
    step = max(1, _LOGITS // (longest * vocab))
    result = torch.full((rollout.token_ids.numel(),), torch.nan)
    sequences, starts, training = rollout.sequences, rollout.offsets.tolist(), inner.training
    inner.eval()
    try:
        with torch.no_grad():
            for first in range(0, len(sequences), step):
                rows = sequences[first : first + step]
                tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
                labels = torch.full_like(tokens, -1)
                for line, (row, label) in zip(rows, zip(tokens, labels, strict=True), strict=True):
                    row[: len(line)], label[: len(line) - 1] = line, line[1:]
                device = next(inner.parameters()).device
                positions = torch.arange(longest).repeat(len(rows), 1)
                logits = inner(tokens.to(device), positions.to(device), None)
                temperature = rollout.temperatures[first : first + step].unsqueeze(1).to(device)
                values = logprobs_of(logits, labels.to(device), temperature=temperature, model=inner).cpu()
                for index, (line, value) in enumerate(zip(rows, values, strict=True), first):
                    result[starts[index] + 1 : starts[index + 1]] = value[: len(line) - 1]
    finally:
        inner.train(training)
    return result
