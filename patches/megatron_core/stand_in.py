"""What stands for an extension that Megatron-core's constructors ask for and the contract's operators do without."""

from __future__ import annotations

import sys
from typing import Any, Literal

from mindspeed_tpi.errors import ParityError
from mindspeed_tpi.patches.megatron_core.support import VERSIONS
from mindspeed_tpi.patching import Patch


class StandIn:
    """Lets a constructor pass where the extension is absent; refuses to be used.

    Args:
        extension: its name. setting: of TransformerConfig, which makes upstream use it.
    """

    def __init__(self, extension: str, setting: str) -> None:
        self._extension, self._setting = extension, setting

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise ParityError(
            f"{self._extension} is not installed, and this model runs as upstream wrote it (an earlier message says why): install it, "
            f"or leave {self._setting} off"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


def stand_in(
    target: str,
    value: Any,
    *,
    extension: str,
    instead: str,
    kind: Literal["replace", "add"] = "replace",
) -> Patch:
    """A patch that puts `value` where upstream's import of an extension failed; not needed where it succeeded.

    Args:
        target: None or False where the import failed; kind "add": missing there.
        instead: what computes in the extension's place.
    """
    module, _, name = target.partition(":")

    def installed() -> str | None:
        return f"{extension} is installed" if getattr(sys.modules.get(module), name, None) else None

    return Patch(
        target=target,
        factory=lambda original: value,
        reason=f"stand-in: a constructor asks for {extension}; {instead}",
        versions=VERSIONS,
        parameters=None,
        until=f"Megatron-core's constructors do without {extension}",
        kind=kind,
        applies=installed,
        optional=kind == "replace",
    )
