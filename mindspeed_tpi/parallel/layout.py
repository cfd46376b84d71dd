"""Parallel layouts as users write them: `tp=2,sp=1,ep=2`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from mindspeed_tpi import contract
from mindspeed_tpi.errors import InputError, LayoutError

Side = Literal["train", "rollout"]

_WORDS = {"cp_type": ("p2p", "allgather", "a2a"), "dispatcher": ("alltoall", "allgather")}
_ROLLOUT_LACKS = ("sp", "etp", "cp", "pp", "vpp", "cp_type", "dispatcher")
_SUMMED = (
    "tp",
    "ep",
    "etp",
    "cp",
    "dp",
)  # sums cross these ranks as a balanced tree; pipeline stages only pass tensors on


@dataclass(frozen=True)
class Layout:
    """How one side is spread over ranks.

    Attributes:
        tp: tensor-parallel size.
        sp: 1 for sequence parallelism over the tensor-parallel ranks.
        ep: expert-parallel size; in the rollout 1 or all of its ranks.
        etp: tensor-parallel size inside an expert.
        cp: context-parallel size.
        pp: pipeline-parallel size.
        vpp: model chunks per pipeline rank.
        dp: data-parallel size.
        cp_type: how context-parallel ranks exchange keys and values.
        dispatcher: how tokens travel to their experts.
    """

    tp: int = 1
    sp: int = 0
    ep: int = 1
    etp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    cp_type: str = "p2p"
    dispatcher: str = "alltoall"

    @property
    def ranks(self) -> int:
        """Processes the side needs; expert parallelism re-uses those of the other dimensions."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def row_multiple(self) -> int:
        """What the padded length of a row is a multiple of (contract section 9): spans of every context-parallel part."""
        return contract.current().max_tp * (2 * self.cp if self.cp > 1 else 1)

    def __str__(self) -> str:
        """The shortest string that parses to this layout, `tp` always named."""
        return ",".join(
            f"{f.name}={getattr(self, f.name)}"
            for f in fields(self)
            if f.name == "tp" or getattr(self, f.name) != f.default
        )

    @classmethod
    def parse(cls, text: str, side: Side) -> Layout:
        """Read `key=value,key=value`; an empty string is one rank.

        Raises:
            InputError: not of this form, an unknown key, a key twice, or a value that is no positive integer or known word.
            LayoutError: a key the side cannot have, or sizes that do not go together.
        """
        defaults = {f.name: f.default for f in fields(cls)}
        values: dict[str, int | str] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            key, equals, value = (part.strip() for part in item.partition("="))
            where = f"{side} layout {text!r}"
            if not equals:
                raise InputError(f"{where}: {item!r} is not key=value; write for example tp=1")
            if key not in defaults:
                raise InputError(f"{where}: unknown key {key!r}; keys are {', '.join(defaults)}")
            if key in values:
                raise InputError(f"{where}: {key} is given twice; keep one")
            if side == "rollout" and key in _ROLLOUT_LACKS:
                raise LayoutError(f"{where}: the rollout engine has no {key}; leave it out")
            values[key] = _value(key, value, where)
        layout = cls(**values)  # type: ignore[arg-type]
        layout._check(side, f"{side} layout {text!r}")
        return layout

    def _check(self, side: Side, where: str) -> None:
        for name in _SUMMED:
            size = getattr(self, name)
            if size & (size - 1):
                below = 1 << (size.bit_length() - 1)
                raise LayoutError(
                    f"{where}: {name}={size} is no power of two, so sums over ranks are no balanced tree; "
                    f"use {name}={below} or {name}={2 * below}"
                )
        for name in ("tp", "etp"):
            size, largest = getattr(self, name), getattr(contract.current(), f"max_{name}")
            if size > largest:
                raise LayoutError(
                    f"{where}: {name}={size}: the numerics contract promises equal bits up to {largest}; "
                    f"use {largest} or less, or raise max_{name} in MINDSPEED_TPI_CONTRACT on both sides"
                )
        if side == "rollout":
            if self.ep not in (1, self.ranks):
                raise LayoutError(
                    f"{where}: ep={self.ep}, but vLLM spreads experts over all tp*dp={self.ranks} ranks or none; "
                    f"use ep=1 or ep={self.ranks}"
                )
            return
        if self.sp and self.tp == 1:
            raise LayoutError(f"{where}: sp=1 shards sequences over tensor-parallel ranks; use tp=2 or more, or sp=0")
        if self.vpp > 1 and self.pp == 1:
            raise LayoutError(f"{where}: vpp={self.vpp} needs pipeline stages; use pp=2 or more, or vpp=1")
        stage = self.tp * self.cp * self.dp
        if stage % (self.ep * self.etp):
            works = ", ".join(f"{1 << i}" for i in range((stage // self.etp).bit_length())) or "none"
            raise LayoutError(
                f"{where}: ep*etp={self.ep * self.etp} must divide the tp*cp*dp={stage} ranks of a pipeline stage; "
                f"with etp={self.etp}, sizes of ep that work: {works}"
            )


def _value(key: str, text: str, where: str) -> int | str:
    if key in _WORDS:
        if text not in _WORDS[key]:
            raise InputError(f"{where}: {key}={text} is not one of {', '.join(_WORDS[key])}")
        return text
    if key == "sp":
        if text not in ("0", "1"):
            raise InputError(f"{where}: sp={text} must be 0 or 1")
    elif not (text.isascii() and text.isdigit() and int(text)):
        raise InputError(f"{where}: {key}={text} must be a positive integer")
    return int(text)
