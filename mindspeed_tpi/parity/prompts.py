"""Prompts of a parity run: read from a JSON-lines file, or random tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from mindspeed_tpi import versions
from mindspeed_tpi.errors import InputError
from mindspeed_tpi.profiles import Profile

Prompt = tuple[int, ...]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def read(path: str | Path, model: str | Path) -> list[Prompt]:
    """Prompts of a file with one JSON object a line: `{"prompt": text}` or `{"prompt_token_ids": [...]}`.

    Text is encoded with the model directory's tokenizer, with the special tokens it adds by itself.

    Raises:
        InputError: an unreadable file or line, or text without a tokenizer; names the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")  # JSON strings may hold other line separators
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read --prompts {path}: {error}") from None
    encode: Callable[[str], list[int]] | None = None
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            item = json.loads(line)
        except ValueError as error:
            raise InputError(f"{where}: not JSON: {error}") from None
        ids = item.get("prompt_token_ids") if isinstance(item, dict) else None
        text = item.get("prompt") if isinstance(item, dict) else None
        if (ids is None) == (text is None):
            raise InputError(f'{where}: write {{"prompt": text}} or {{"prompt_token_ids": [...]}}')
        if text is not None:
            if not isinstance(text, str):
                raise InputError(f"{where}: prompt must be a string, not {type(text).__name__}")
            encode = encode or _tokenizer(model, where)
            ids = encode(text)
        if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise InputError(f"{where}: a prompt needs at least one token, and token ids must be integers")
        prompts.append(tuple(ids))
    if not prompts:
        raise InputError(f"{path} holds no prompt; write at least one line")
    return prompts


def _tokenizer(model: str | Path, where: str) -> Callable[[str], list[int]]:
    if not any((Path(model) / name).is_file() for name in _TOKENIZER_FILES):
        raise InputError(
            f'{where}: {model} has no tokenizer to read text with; write {{"prompt_token_ids": [...]}} instead'
        )
    if versions.installed("transformers") is None:
        raise InputError(
            f'{where}: reading text needs transformers; install it, or write {{"prompt_token_ids": [...]}}'
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot load the tokenizer of {model}: {error}") from None
    return lambda text: list(tokenizer(text)["input_ids"])


def random_prompts(count: int, lengths: tuple[int, int], vocab: int, seed: int) -> list[Prompt]:
    """`count` prompts of uniformly random tokens and lengths in `lengths` (both ends included)."""
    chooser = random.Random(seed)
    return [tuple(chooser.randrange(vocab) for _ in range(chooser.randint(*lengths))) for _ in range(count)]


def check(prompts: Sequence[Prompt], profile: Profile, max_new_tokens: int) -> None:
    """Refuse prompts that the model cannot take.

    Raises:
        InputError: a token id outside the vocabulary, or a sequence longer than the model's positions.
    """
    vocab, positions = profile.vocab, profile.rope.max_position
    for number, prompt in enumerate(prompts, 1):
        wrong = [token for token in prompt if not 0 <= token < vocab]
        if wrong:
            raise InputError(
                f"prompt {number}: token id {wrong[0]} lies outside the model's vocabulary of {vocab}; check the tokenizer"
            )
        if len(prompt) + max_new_tokens > positions:
            raise InputError(
                f"prompt {number}: {len(prompt)} tokens and {max_new_tokens} new ones exceed the model's {positions} positions; "
                "shorten it, lower --max-new-tokens, or raise max_position_embeddings in config.json if the model is made for it"
            )
