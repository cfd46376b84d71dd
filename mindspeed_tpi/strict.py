"""What lies outside the numerics contract in this process: refused in strict mode, and counted in every other.

Three questions are asked of a running process: are the patches still in force (`check_patches`, a few comparisons at every
step), is every module of the model one that is served (each upstream's own `_coverage`), and does anything that adds up run
outside the contract (`Checked`, a dispatch mode around a step; eager operators only, as in `mindspeed_tpi.audit`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from mindspeed_tpi import audit, envs
from mindspeed_tpi.errors import InputError, ParityError, PatchError
from mindspeed_tpi.patching import active

logger = logging.getLogger("mindspeed_tpi")

_outside: Counter[str] = Counter()
_checked: Counter[str] = Counter()

# Sums that are read and decide no number: (end of the caller's file, function).
_READ_ONLY = (("megatron/core/distributed/param_and_grad_buffer.py", "check_grads"),)
_MODULE = "mindspeed_tpi.module"


def outside(what: str, error: type[ParityError] = ParityError) -> None:
    """Report something that lies outside the contract and is about to run as upstream wrote it.

    Raises:
        ParityError: strict mode, as `error`. Otherwise one warning per message, and a count in `coverage`.
    """
    if envs.strict():
        raise error(f"outside the numerics contract: {what}")
    _outside[what] += 1
    if _outside[what] == 1:
        logger.warning("outside the numerics contract, runs as upstream wrote it: %s", what)


def check_patches() -> None:
    """Refuse to go on when somebody replaced what this package had put in place; microseconds when nobody did.

    Raises:
        PatchError: strict mode; names each target and who holds it now.
    """
    for registry in active.values():
        if registry.intact():
            continue
        lines = "; ".join(registry.disturbed())
        way_out = "call mindspeed_tpi.enable() after whatever did this, and it goes back on top"
        if envs.strict():
            raise PatchError(f"overwritten after mindspeed_tpi: {lines}. {way_out[0].upper()}{way_out[1:]}")
        outside(f"overwritten after mindspeed_tpi: {lines} ({way_out})")


def check_aliases() -> None:
    """Refuse names under which an original that was replaced can still be reached; looks at every loaded module.

    Raises:
        ParityError: strict mode; names them.
    """
    strays = [stray for registry in active.values() for stray in registry.stray_aliases()]
    if strays:
        outside(f"{'; '.join(strays)} (import mindspeed_tpi before what bound these names)")


def coverage() -> dict[str, Any]:
    """What ran outside the contract in this process so far, JSON-able.

    Returns:
        `mode`; `outside`: message → how often; `overwritten`: targets that somebody replaced, and who holds them;
        `operators`: under mode `audit`, every accumulating operator outside the contract with its caller and count;
        `checked`: passes and steps that ran under the dispatch mode.
    """
    return {
        "mode": envs.MODE.get(),
        "outside": dict(sorted(_outside.items())),
        "overwritten": [line for registry in active.values() for line in registry.disturbed()],
        "operators": audit.outside(),
        "checked": dict(sorted(_checked.items())),
    }


def lines() -> list[str]:
    """`coverage` for a rollout record: one line per thing that ran outside the contract."""
    found = coverage()
    operators = [f"{call['operator']} called at {call['caller']}" for call in found["operators"]]
    return [*found["outside"], *found["overwritten"], *operators]


def due(step: int) -> bool:
    """Whether the pass or step of this number, from 0, is one to check: the first, and every `MINDSPEED_TPI_CHECK_EVERY`-th.

    Raises:
        InputError: the flag is not a number.
    """
    text = envs.CHECK_EVERY.get()
    if not text.isdecimal():
        raise InputError(f"{envs.CHECK_EVERY.name}={text!r} is not a number of steps; 0 checks only the first")
    return step == 0 or (int(text) > 0 and step % int(text) == 0)


class Checked(TorchDispatchMode):
    """Fails on the first operator that adds up floating-point numbers outside the contract, naming module, operator and caller.

    `run` calls a model under it. Where the result is then differentiated, the mode stays until the end of that backward pass,
    and between the two it watches what is computed from logits, until an operator of the contract takes them.

    Args:
        kind: what is counted in `coverage`'s `checked`.
        names: identity of each module → its name.
        way_out: the last sentence of a refusal.
        inner: operators of the upstream's own that are only a way to call a Python function → the function, which is looked into.
    """

    def __init__(
        self,
        kind: str,
        names: Mapping[int, str],
        way_out: str,
        inner: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        super().__init__()
        self._kind, self._names, self._way_out, self._inner = kind, names, way_out, inner or {}
        self._stack: list[tuple[str, int]] = []
        self._logits: Any = WeakTensorKeyDictionary()
        self._phase = "forward"  # → "loss" → "backward" → "done"

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._phase == "done":
            return func(*args, **kwargs)
        if self._phase != "loss":
            function = self._inner.get(str(func))
            if function is not None:
                with self:
                    return function(*args, **kwargs)
            self._check(func, args, kwargs)
            return func(*args, **kwargs)
        tainted = any(isinstance(x, Tensor) and x in self._logits for x in tree_leaves((args, kwargs)))
        if tainted:
            self._check(func, args, kwargs)
        result = func(*args, **kwargs)
        if tainted and audit.kind(func) != "contract":
            self._taint(result)
        return result

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if audit.kind(func) not in ("outside", "extension") or not audit.accumulates(func, args, kwargs):
            return
        caller = audit.caller(False)
        if any(f"{file}:" in caller and f" {function}" in caller for file, function in _READ_ONLY):
            return
        self._phase, phase = "done", self._phase
        raise ParityError(
            f"outside the numerics contract: {self._where(phase)} ran {func}, called at {caller}, which may add up in an order "
            f"of its own. {self._way_out}, or set MINDSPEED_TPI=1 to run it all the same"
        )

    def _where(self, phase: str) -> str:
        if phase == "loss":
            return "what follows the model's logits"
        if phase == "backward":
            node = torch._C._current_autograd_node()
            signed: Any = node.metadata if node is not None else {}
            module = signed.get(_MODULE, "the model")
            return f"the backward pass of {module}"
        return self._stack[-1][0] if self._stack else "the model"

    def _taint(self, result: Any) -> None:
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.is_floating_point():
                self._logits[x] = True

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Keeps the name of the module that runs, and leaves it with the autograd nodes that the module made."""

        def enter(module: Any, inputs: Any) -> None:
            name = self._names.get(id(module)) or type(module).__qualname__
            self._stack.append((name, torch._C._autograd._get_sequence_nr()))

        def leave(module: Any, inputs: Any, output: Any) -> None:
            name, first = self._stack.pop()
            _sign([x.grad_fn for x in tree_leaves(output) if isinstance(x, Tensor)], name, first)

        handles = (
            nn_module.register_module_forward_pre_hook(enter),
            nn_module.register_module_forward_hook(leave, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def run(self, model: Callable[[], Any], logits: bool = False) -> Any:
        """Call a model under this mode.

        Args:
            model: the call. logits: its result is logits, from which a loss is yet to be computed.

        Raises:
            ParityError: an operator outside the contract ran; in the backward pass it is raised there.
        """
        leave_finished()
        below = _get_current_dispatch_mode()
        alone = below is None or isinstance(below, Checked)  # else a mode of somebody's could end before this one
        self.__enter__()
        try:
            with self._named():
                result = model()
        except BaseException:
            self.close()
            raise
        _checked[self._kind] += 1
        tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        differentiated = [x for x in tensors if x.requires_grad]
        self._phase = "loss"
        if logits:
            self._taint(result)
        if not alone or not (logits or differentiated):
            self.close()
        for x in differentiated if alone else ():
            x.register_hook(self._backward)
        return result

    def _backward(self, gradient: Tensor) -> None:
        """Autograd has reached the model's result; called in the thread of that backward pass."""
        if self._phase == "loss":
            self._phase = "backward"
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)  # type: ignore[attr-defined]

    def _finish(self) -> None:
        self._phase = "done"  # the mode itself is left at the next pass: autograd restores the modes of its caller

    def close(self) -> None:
        """Check nothing more."""
        self._phase = "done"
        leave_finished()

    @property
    def finished(self) -> bool:
        return self._phase == "done"


def leave_finished() -> None:
    """Leave the modes of finished checks, down to one that is not ours or still at work."""
    while isinstance(mode := _get_current_dispatch_mode(), Checked) and mode.finished:
        mode.__exit__(None, None, None)


def _sign(nodes: list[Any], name: str, first: int) -> None:
    """Note a module's name on the autograd nodes, from number `first` on, that lead to its result and none of its children signed."""
    seen = {None}
    while nodes:
        node = nodes.pop()
        if node not in seen and node._sequence_nr() >= first:
            seen.add(node)
            node.metadata.setdefault(_MODULE, name)
            nodes += [other for other, _ in node.next_functions]
