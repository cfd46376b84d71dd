"""Packed sequences (THD): one row of tokens, each sequence with positions and visible keys of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed_tpi.errors import LayoutError, ParityError
from mindspeed_tpi.parity.trainer import Trainer
from tests.models import random_prompts
from tests.patches.megatron_core.conftest import VOCAB, rollout_for, same_bits

LENGTHS = [9, 24, 1, 14]


def packed(trainer: Trainer, sequences: list[Tensor], padded: int = 0, longest: int = 0) -> list[Tensor]:
    """Log-probabilities of each sequence from one packed forward pass; every sequence padded to a multiple of `padded`. The
    parameters say that the longest has `longest` tokens (0: the truth)."""
    from megatron.core.packed_seq_params import PackedSeqParams

    room = [len(s) if not padded else -(-len(s) // padded) * padded for s in sequences]
    total = sum(room)
    starts = torch.tensor([0, *room]).cumsum(0).int()
    tokens, labels = torch.zeros(1, total, dtype=torch.int64), torch.zeros(1, total, dtype=torch.int64)
    for start, s in zip(starts.tolist(), sequences, strict=False):
        tokens[0, start : start + len(s)] = s
        labels[0, start : start + len(s) - 1] = s[1:]
    real = torch.tensor([0, *(len(s) for s in sequences)]).cumsum(0).int()
    params: Any = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=real,
        cu_seqlens_kv=real,
        cu_seqlens_q_padded=starts if padded else None,
        cu_seqlens_kv_padded=starts if padded else None,
        max_seqlen_q=longest or max(room),
        max_seqlen_kv=longest or max(room),
    )
    positions = torch.arange(total).unsqueeze(0)
    loss = trainer.model(tokens, positions, None, labels=labels, packed_seq_params=params)[0]
    return [-loss[start : start + len(s) - 1] for start, s in zip(starts.tolist(), sequences, strict=False)]


@pytest.mark.parametrize("padded", [0, 8])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "qwen3-moe"])
def test_a_pack_equals_its_sequences(trainer: Callable[..., Trainer], family: str, padded: int) -> None:
    t = trainer(family, **({"experts": 8, "topk": 2, "moe_ffn": 32} if family == "qwen3-moe" else {}))
    rollout = rollout_for(t, LENGTHS)
    whole = t.logprobs(rollout).split(rollout.offsets.diff().tolist())
    t.model.eval()
    with torch.no_grad():
        for got, wanted in zip(packed(t, rollout.sequences, padded), whole, strict=True):
            assert same_bits(got, wanted[1:])


def test_a_longest_sequence_below_the_padded_tail_is_named(trainer: Callable[..., Trainer]) -> None:
    sequences = [torch.tensor(s) for s in random_prompts(LENGTHS, vocab=VOCAB, seed=2)]
    with pytest.raises(
        LayoutError, match="24 positions with its padding, PackedSeqParams.max_seqlen_q and max_seqlen_kv say 16"
    ):
        packed(trainer("qwen3"), sequences, 8, longest=16)


def test_gradients_repeat(trainer: Callable[..., Trainer]) -> None:
    t = trainer("qwen3")
    sequences = [torch.tensor(s) for s in random_prompts(LENGTHS, vocab=VOCAB, seed=2)]
    found = []
    for _ in range(2):
        for parameter in t.model.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        torch.cat(packed(t, sequences)).sum().backward()
        found.append([parameter.main_grad for parameter in t.model.parameters()])
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))
    assert all(bool(g.any()) for g in found[0])


def test_another_format_is_refused(trainer: Callable[..., Trainer]) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    t = trainer("llama")
    tokens = torch.ones(1, 4, dtype=torch.int64)
    params = PackedSeqParams(qkv_format="bshd", max_seqlen_q=4, max_seqlen_kv=4)
    with torch.no_grad(), pytest.raises(ParityError, match="packed sequences as bshd"):
        t.model(tokens, tokens, None, labels=tokens, packed_seq_params=params)
