"""A pool of four gloo ranks that run functions of the tests: started once, because importing torch takes seconds."""

from __future__ import annotations

import io
import os
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 4
_SETS = ((0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3))


@dataclass
class Mesh:
    """The groups a test function may use; `size` ranks take part.

    Attributes:
        rank: of this process. size: ranks that take part.
    """

    rank: int
    size: int
    _groups: dict[tuple[int, ...], Any] = field(repr=False, default_factory=dict)

    def group(self, size: int | None = None) -> Any:
        """Neighbouring ranks in groups of `size` (default: all that take part)."""
        size = size or self.size
        first = self.rank // size * size
        return self._groups.get(tuple(range(first, first + size)))

    def across(self) -> Any:
        """Ranks with the same place in neighbouring pairs: (0, 2) and (1, 3)."""
        return self._groups[(self.rank % 2, self.rank % 2 + 2)]


def _worker(rank: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    groups = {ranks: dist.new_group(list(ranks)) for ranks in _SETS}
    while (job := pipe.recv()) is not None:
        function, size, arguments = job
        buffer = io.BytesIO()
        try:
            torch.save((True, function(Mesh(rank, size, groups), *arguments)), buffer)
        except Exception:
            torch.save((False, traceback.format_exc()), buffer)
        pipe.send_bytes(buffer.getvalue())
    dist.destroy_process_group()


class Ranks:
    """`ranks(size, function, *arguments)` runs `function(mesh, *arguments)` on `size` ranks and returns their results."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        context = mp.get_context("spawn")
        store = os.path.join(self._directory.name, "store")
        pairs = [context.Pipe() for _ in range(WORLD)]
        self._pipes = [mine for mine, _ in pairs]
        self._processes = [
            context.Process(target=_worker, args=(rank, store, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()

    def __call__(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        for pipe in self._pipes[:size]:
            pipe.send((function, size, arguments))
        answers = [torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False) for pipe in self._pipes[:size]]
        failed = [(rank, text) for rank, (good, text) in enumerate(answers) if not good]
        if failed:
            raise RuntimeError("\n".join(f"rank {rank}:\n{text}" for rank, text in failed))
        return [result for _, result in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
            process.kill()
        self._directory.cleanup()
