"""The numerics contract as data: every constant that decides bits, its canonical JSON and its fingerprint.

Training and rollout run the same operators with the same contract. The fingerprint travels with every rollout; a
trainer that runs another contract refuses it and names the fields that differ.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from mindspeed_tpi import envs
from mindspeed_tpi.errors import ContractError, LayoutError

VERSION = 2
KERNEL_SEMANTICS = 4

Role = Literal["whole", "tensor", "expert"]
"""Who may cut a reduction: nobody, tensor-parallel ranks, or the ranks that share an expert."""

_CHOICES: dict[str, tuple[str, ...]] = {
    "family": ("cpu", "ascendc"),
    "isa": ("x86-64", "aarch64", "dav-2201"),
    "leaf_order": ("chain", "cube"),
    "attention_gradient": ("add", "chain"),
    "multiply_add": ("fma", "mul-add"),
    "transcendental": ("polynomial", "hardware"),
    "subnormals": ("flush", "keep"),
    "p_dtype": ("float32", "input"),
}
_POWERS_OF_TWO = ("max_tp", "max_etp", "max_cp", "kv_block", "segment_blocks", "lanes", "vocab_align")
_MACHINES = {"x86_64": "x86-64", "amd64": "x86-64", "aarch64": "aarch64", "arm64": "aarch64"}


@dataclass(frozen=True)
class Leaves:
    """How one reduction is cut: `count` (a power of two) chains of at most `size` elements, combined by a balanced tree."""

    size: int
    count: int

    def shard(self, ranks: int) -> Leaves:
        """The leaves of one of `ranks` equal, aligned shards.

        Raises:
            LayoutError: `ranks` is no power of two or exceeds the number of leaves, so a shard is not a subtree.
        """
        if ranks < 1 or ranks & (ranks - 1) or ranks > self.count:
            sizes = ", ".join(str(1 << i) for i in range(self.count.bit_length()))
            raise LayoutError(
                f"a reduction of {self.count} leaves cannot be split over {ranks} ranks with equal bits; sizes that work: {sizes}"
            )
        return Leaves(self.size, self.count // ranks)


@dataclass(frozen=True)
class NumericsContract:
    """Constants of the numerics contract, version 2 (`docs/numerics-contract.md`); the defaults are the CPU's column.

    Attributes:
        family: backend family; bits are promised within one family only.
        isa: on CPUs it decides whether tininess is detected before or after rounding, and with it bits at the underflow boundary.
        leaf: longest leaf of a linear reduction whose length has enough factors of two.
        leaf_order: order of a matrix product inside a leaf: one `chain`, or the `cube`'s fractals (section 2).
        max_tp, max_etp, max_cp: largest tensor-, expert-tensor- and context-parallel sizes for which equal bits are promised.
        multiply_add: `fma` or `mul-add`, outside matrix products.
        transcendental: the project's own exp and log, or the hardware's.
        subnormals: flushed to zero or kept.
        p_dtype: dtype of P before PV and of dS: `float32`, or `input` (that of the operands).
        attention_gradient: blocks of a segment are each summed from +0 and `add`ed, or continue one `chain` (section 3).
        kv_block: keys per online-softmax block, aligned at position 0.
        segment_blocks: blocks per segment; segments start fresh and merge left to right.
        lanes: accumulators of a lane tree.
        vocab_leaf, vocab_align, vocab_align_from: cut of the vocabulary (see `vocab_leaves`).
        rope_table: SHA-256 of the first 4,096 rows of the model's f32 cos/sin tables (`ops.table_hash`); empty when no model is bound.
    """

    version: int = VERSION
    kernel_semantics: int = KERNEL_SEMANTICS
    family: str = "cpu"
    isa: str = "x86-64"
    leaf: int = 128
    leaf_order: str = "chain"
    max_tp: int = 8
    max_etp: int = 8
    max_cp: int = 8
    multiply_add: str = "fma"
    transcendental: str = "polynomial"
    subnormals: str = "flush"
    p_dtype: str = "float32"
    attention_gradient: str = "add"
    kv_block: int = 128
    segment_blocks: int = 16
    lanes: int = 64
    vocab_leaf: int = 2048
    vocab_align: int = 16
    vocab_align_from: int = 16384
    rope_table: str = ""

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ContractError(f"contract field {name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")
        for name in ("leaf", "vocab_leaf", "vocab_align_from", *_POWERS_OF_TWO):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1 or (name in _POWERS_OF_TWO and value & (value - 1)):
                kind = "a power of two" if name in _POWERS_OF_TWO else "a positive integer"
                raise ContractError(f"contract field {name}={value!r} must be {kind}")
        if self.version != VERSION:
            raise ContractError(f"contract version {self.version} is not known here; this package implements {VERSION}")

    def leaves(self, length: int, role: Role) -> Leaves:
        """Leaves of a linear reduction over `length` elements: at most `leaf` long, and as many as the largest layout has
        ranks, as far as `length` can be halved exactly (contract section 1).

        Args:
            role: `whole` where no layout cuts the reduction (K = hidden of QKV, gate and up, head, router; N = hidden of a
                row-parallel dX); `tensor` for row-parallel K and column-parallel N; `expert` for the width of an expert.
        """
        if length < 1:
            raise ContractError(f"a reduction over {length} elements has no leaves; it needs at least 1")
        return _halved(length, self.leaf, {"whole": 1, "tensor": self.max_tp, "expert": self.max_etp}[role])

    def query_segments(self, length: int) -> Leaves:
        """Segments of a row of `length` positions over whose queries the gradients of K and V are a tree: the two chunks of
        every context-parallel rank are whole segments (contract section 3)."""
        return _halved(max(length, 1), self.kv_block * self.segment_blocks, 2 * self.max_cp)

    def vocab_leaves(self, vocab: int) -> Leaves:
        """Leaves of reductions over the vocabulary (contract section 6); the last ones may be short or empty."""
        d = 0
        while -(-vocab >> d) > self.vocab_leaf or 1 << d < self.max_tp:
            d += 1
        align = 1 if vocab < self.vocab_align_from else self.vocab_align
        return Leaves(-(-vocab // (align << d)) * align, 1 << d)

    def head_leaves(self, vocab: int) -> Leaves:
        """Leaves of the output projection's dX, over N = vocabulary: `max_tp` runs of whole vocabulary leaves."""
        cut = self.vocab_leaves(vocab)
        return Leaves(cut.size * (cut.count // self.max_tp), self.max_tp)

    def padded_vocab(self, vocab: int) -> int:
        """Rows of a vocabulary-parallel embedding or output projection: whole leaves, whatever the tensor-parallel size."""
        leaves = self.vocab_leaves(vocab)
        return leaves.size * leaves.count

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces, ASCII."""
        return _canonical(asdict(self))

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON, in hexadecimal."""
        return fingerprint_of(asdict(self))

    @classmethod
    def ascendc(cls) -> NumericsContract:
        """The column of Ascend C on Atlas A2 and A3 (docs/ascend.md says why each constant is what it is)."""
        return cls(
            family="ascendc",
            isa="dav-2201",
            leaf=16384,
            leaf_order="cube",
            max_etp=1,
            max_cp=4,
            multiply_add="mul-add",
            transcendental="hardware",
            subnormals="keep",
            p_dtype="input",
            attention_gradient="chain",
            kv_block=512,
            segment_blocks=4,
        )

    @classmethod
    def from_json(cls, text: str) -> NumericsContract:
        """Inverse of `to_json`.

        Raises:
            ContractError: not a JSON object with exactly the contract's fields, each of its type.
        """
        return cls.from_document(_parse(text))

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> NumericsContract:
        """A contract as a record or checkpoint carries it: the parsed `to_json`. Nothing takes a default.

        Raises:
            ContractError: a field is missing, unknown or of another type; names it.
        """
        missing = sorted({f.name for f in fields(cls)} - set(document))
        if missing:
            raise ContractError(f"the contract lacks {', '.join(missing)}; a record carries every field")
        for f in fields(cls):
            value = document[f.name]
            if f.type in ("int", "str") and type(value).__name__ != f.type:
                raise ContractError(f"contract field {f.name}={value!r} must be of type {f.type}")
        return cls().overridden(dict(document))

    def overridden(self, changes: dict[str, Any]) -> NumericsContract:
        """A copy with some fields changed.

        Raises:
            ContractError: a field that does not exist, or a value it cannot have.
        """
        known = {f.name for f in fields(self)}
        unknown = sorted(set(changes) - known)
        if unknown:
            raise ContractError(f"unknown contract field {', '.join(unknown)}; fields are {', '.join(sorted(known))}")
        return replace(self, **changes)

    def differences(self, other: NumericsContract) -> list[str]:
        """`field (here …, there …)` of every field that differs; empty for the same contract."""
        mine, yours = asdict(self), asdict(other)
        return [f"{k} (here {mine[k]!r}, there {yours[k]!r})" for k in mine if mine[k] != yours[k]]

    def check_same(self, other: NumericsContract, theirs: str) -> None:
        """Refuse another contract.

        Args:
            other: the contract of the other side.
            theirs: what carries it, for the message (for example `rollout run.safetensors`).

        Raises:
            ContractError: the two differ; names every field with both values.
        """
        if differing := self.differences(other):
            raise ContractError(
                f"{theirs} was made under another numerics contract: {'; '.join(differing)}. "
                "Run both sides with the same MINDSPEED_TPI_CONTRACT, model configuration and kernel version."
            )


def _canonical(document: Mapping[str, Any]) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def fingerprint_of(document: Mapping[str, Any]) -> str:
    """The fingerprint of a contract in parsed JSON, also of a version that this package does not implement."""
    return hashlib.sha256(_canonical(document).encode()).hexdigest()


def _halved(length: int, longest: int, fewest: int) -> Leaves:
    """`length` halved until no piece is longer than `longest` and there are `fewest`, or it is odd."""
    d = 0
    while length % (2 << d) == 0 and (length >> d > longest or 1 << d < fewest):
        d += 1
    return Leaves(length >> d, 1 << d)


def _parse(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ContractError(f"the contract is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ContractError(f"the contract must be a JSON object, not {type(data).__name__}")
    return data


def default() -> NumericsContract:
    """The CPU family's contract on this machine's instruction-set family."""
    machine = platform.machine().lower()
    if machine not in _MACHINES:
        raise ContractError(f"no contract for machine {machine!r}; kernels exist for x86-64 and aarch64")
    return NumericsContract(isa=_MACHINES[machine])


_current: NumericsContract | None = None


def current() -> NumericsContract:
    """The contract of this process: the default with the overrides of `MINDSPEED_TPI_CONTRACT` (JSON, or a path to it); an
    override `"family": "ascendc"` starts from that column."""
    global _current
    if _current is None:
        text = envs.CONTRACT.get()
        if text and not text.lstrip().startswith("{"):
            if not os.path.isfile(text):
                raise ContractError(f"MINDSPEED_TPI_CONTRACT={text!r} is neither JSON nor a file")
            with open(text, encoding="utf-8") as file:
                text = file.read()
        changes = _parse(text) if text else {}
        column = NumericsContract.ascendc() if changes.get("family") == "ascendc" else default()
        _current = column.overridden(changes)
    return _current


def set_current(contract: NumericsContract | None) -> None:
    """Replace this process's contract (None: read the environment again at the next use)."""
    global _current
    _current = contract
