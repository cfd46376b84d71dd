"""The further data-parallel ranks of an engine: one process each, which does what the first one is told to do.

vLLM's `LLM` drives one data-parallel rank; with experts spread over all ranks, they run every step together.
"""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, cast

from mindspeed_tpi.errors import InputError, ParityError

_GRACE_SECONDS = 10.0


def free_port() -> int:
    """A port of this machine that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Replicas:
    """Ranks 1 … size − 1, started at once.

    Args:
        make: picklable; makes the engine of a rank, a context manager, in that rank's process.
    """

    def __init__(self, size: int, make: Callable[[int], Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(1, size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, make, rank), name=f"data-parallel rank {rank}")
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def send(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        """Have each rank's engine run a method, with arguments of its own."""
        for pipe, own in zip(self._pipes, arguments, strict=True):
            pipe.send((method, own))

    def receive(self) -> list[Any]:
        """Each rank's answer.

        Raises:
            InputError, ParityError: what a rank raised.
        """
        answers: dict[Connection, Any] = {}
        processes = dict(zip(self._pipes, self._processes, strict=True))
        while waiting := [pipe for pipe in self._pipes if pipe not in answers]:
            for pipe in cast(
                list[Connection], wait(waiting)
            ):  # whoever comes first: the others may wait for a rank that died
                try:
                    answer = pipe.recv()
                except EOFError:
                    process = processes[pipe]
                    process.join(_GRACE_SECONDS)
                    raise ParityError(
                        f"{process.name} ended with status {process.exitcode}; see its log above"
                    ) from None
                if isinstance(answer, Exception):
                    raise answer
                answers[pipe] = answer
        return [answers[pipe] for pipe in self._pipes]

    def close(self) -> None:
        """End the ranks: each leaves when its pipe closes; one that hangs in a collective is ended."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(_GRACE_SECONDS)
            if process.is_alive():
                process.terminate()
                process.join()


def _serve(pipe: Connection, make: Callable[[int], Any], rank: int) -> None:
    """Body of a rank's process: answers calls until the pipe closes."""
    try:
        with make(rank) as engine:
            pipe.send(None)
            while True:
                try:
                    method, arguments = pipe.recv()
                except EOFError:
                    return
                pipe.send(getattr(engine, method)(*arguments))
    except Exception as error:
        known = isinstance(error, InputError | ParityError)
        with suppress(BrokenPipeError):  # the first rank has failed before this one, and left
            pipe.send(error if known else ParityError(f"data-parallel rank {rank}: {error!r}"))
