"""What the engine and trainer processes share: waiting for their turn, and exit statuses."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
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
