"""What the engine and trainer processes share: waiting for their turn, exit statuses, and a job of several ranks.

    python -m mindspeed_tpi.parity.process RANKS MODULE ARGUMENT...

runs MODULE on RANKS ranks of this machine, as `torch.distributed.run --standalone --max-restarts 0` does: when one
ends badly, so do the others. Exit status: that of the ranks, 3 when a signal ended one.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from mindspeed_tpi.errors import InputError, LayoutError, ParityError


def wait_for(path: Path) -> None:
    """Return once `path` exists.

    Raises:
        ParityError: the process that should write it has gone.
    """
    parent = os.getppid()
    while not path.exists():
        if os.getppid() != parent:
            raise ParityError(f"the driver ended before it wrote {path}")
        time.sleep(0.02)


def status(work: Callable[[], None]) -> int:
    """Exit status of `work`: 0 done, 2 bad input, 3 the engine failed; the last line on stderr says what."""
    try:
        work()
    except (InputError, LayoutError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ParityError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    except Exception as error:
        traceback.print_exc()
        print(f"error: the engine failed: {error}", file=sys.stderr)
        return 3
    return 0


def run_ranks(ranks: int, command: Sequence[str]) -> int:
    """Exit status of a command line on `ranks` ranks, on a free port; what failed is the last line on stderr."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    logging.disable(logging.ERROR)  # the launcher's own account of what the ranks have said better
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        statuses = {rank: failure.exitcode for rank, failure in error.failures.items()}
        if 2 in statuses.values():
            return 2  # the rank has said why
        first = {
            rank: status for rank, status in statuses.items() if status != -signal.SIGTERM
        }  # not those ended by us
        failed = first or statuses
        print(f"error: {'; '.join(map(_ended, failed, failed.values()))}", file=sys.stderr)
        return 3
    return 0


def _end_with_parent(parent: int) -> None:
    """Ask this process to end its ranks when the driver has gone."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


def _ended(rank: int, status: int) -> str:
    return f"rank {rank} " + (f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}")


def main() -> int:
    """Process entry; returns the exit status."""
    return run_ranks(int(sys.argv[1]), [sys.executable, "-m", *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(main())
