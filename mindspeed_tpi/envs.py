"""Every environment flag, in one place: name, type, default and meaning. `docs/env-flags.md` is generated from this."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mindspeed_tpi.errors import InputError


@dataclass(frozen=True)
class Flag:
    """One environment variable; read anew at every `get`.

    Attributes:
        name: the variable.
        default: value when unset or empty.
        doc: one sentence for the docs.
        choices: allowed values; empty means free text.
    """

    name: str
    default: str
    doc: str
    choices: tuple[str, ...] = ()

    @property
    def is_set(self) -> bool:
        return bool(os.environ.get(self.name))

    def get(self) -> str:
        """The value in force.

        Raises:
            InputError: a value outside `choices`.
        """
        value = os.environ.get(self.name) or self.default
        if self.choices and value not in self.choices:
            raise InputError(f"{self.name}={value!r} is not one of {', '.join(self.choices)}")
        return value


MODE = Flag(
    "MINDSPEED_TPI",
    "1",
    "`0`: importing the package changes nothing. `1`: patches apply; what lies outside the contract runs as upstream wrote it, with one "
    "warning. `strict`: what lies outside the contract raises `ParityError`. `audit`: as `1`, and records every accumulating operator "
    "that ran eagerly and who called it, for `mindspeed-tpi doctor --audit`. Unset: an explicit import acts as `1`, entry points (vLLM) do nothing.",
    ("0", "1", "strict", "audit"),
)
BACKEND = Flag(
    "MINDSPEED_TPI_BACKEND",
    "auto",
    "Operator backend: `auto` takes the native one of the device; `reference` is the slow oracle.",
)
CONTRACT = Flag(
    "MINDSPEED_TPI_CONTRACT",
    "",
    "Overrides of contract constants: a JSON object, or the path of a file that holds one.",
)
AUDIT = Flag(
    "MINDSPEED_TPI_AUDIT",
    "mindspeed_tpi_audit",
    "Directory in which each process of mode `audit` leaves its record, `<process id>.json`, when it ends.",
)
CHECK_EVERY = Flag(
    "MINDSPEED_TPI_CHECK_EVERY",
    "0",
    "Mode `strict`: N checks every N-th forward pass of a model in training and its backward pass, and every N-th step of an engine, "
    "for operators that add up outside the contract. `0`: only the first.",
)
VERIFIED = Flag(
    "MINDSPEED_TPI_VERIFIED",
    "~/.cache/mindspeed_tpi/verified",
    "Directory of the records that `mindspeed-tpi verify` leaves, one a backend; mode `strict` asks for them where a backend is not ours.",
)
LOG = Flag(
    "MINDSPEED_TPI_LOG", "warning", "Log level of the `mindspeed_tpi` logger.", ("debug", "info", "warning", "error")
)

GRADIENT_GROUPS = Flag(
    "MINDSPEED_TPI_GRADIENT_GROUPS",
    "0",
    "A power of two G, at least the largest data-parallel size in use: gradients become equal also for every data-, context-, expert- "
    "and expert-data-parallel size (docs/invariance.md states what it asks and costs). `0`: off.",
)

FLAGS = (MODE, BACKEND, CONTRACT, AUDIT, CHECK_EVERY, VERIFIED, LOG, GRADIENT_GROUPS)


def strict() -> bool:
    """Whether anything outside the contract must raise."""
    return MODE.get() == "strict"
