"""Parallel layouts as users write them: `tp=2,sp=1,ep=2`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from mindspeed_tpi.errors import InputError, LayoutError

Side = Literal["train", "rollout"]

_WORDS = {"cp_type": ("p2p", "allgather", "a2a"), "dispatcher": ("alltoall", "allgather")}
_ROLLOUT_LACKS = ("sp", "etp", "cp", "pp", "vpp", "cp_type", "dispatcher")
_SUPPORTED: dict[Side, dict[str, tuple[int | str, ...]]] = {"train": {}, "rollout": {"tp": (2, 4, 8), "ep": (2, 4, 8)}}
"""Values beyond the default one that each side can run."""


@dataclass(frozen=True)
class Layout:
    """How one side is spread over ranks.

    Attributes:
        tp: tensor-parallel size.
        sp: 1 for sequence parallelism over the tensor-parallel ranks.
        ep: expert-parallel size.
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
            LayoutError: a key the side cannot have, or one that is not supported yet.
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
            supported = (defaults[key], *_SUPPORTED[side].get(key, ()))
            if values[key] not in supported:
                raise LayoutError(
                    f"{where}: {item} is not supported yet; {key} can be {' or '.join(map(str, supported))} in this version"
                )
        return cls(**values)  # type: ignore[arg-type]


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
