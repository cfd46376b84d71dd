"""The command `mindspeed-tpi`.

Exit status: 0 done (parity: every token's logdiff is 0), 1 not exact, 2 bad input, 3 an engine failed, 4 a difference without a cause.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from mindspeed_tpi import __version__
from mindspeed_tpi.cli import demo, demo_moe, doctor, logdiff, parity, verify
from mindspeed_tpi.errors import ContractError, InputError, LayoutError, ParityError

NOT_EXACT, BAD_INPUT, FAILED = 1, 2, 3


class _Parser(argparse.ArgumentParser):
    """Reports a bad option in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """All sub-commands with their options."""
    parser = _Parser(
        prog="mindspeed-tpi", description="Training-inference parity: logdiff exactly 0.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (parity, verify, doctor, logdiff, demo, demo_moe):
        name = module.__name__.rpartition(".")[2].replace("_", "-")
        summary = (module.__doc__ or "").strip().partition("\n")[0]
        command = commands.add_parser(name, help=summary, description=module.__doc__, allow_abbrev=False)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = build_parser().parse_args(arguments)
    terminate = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that children end, too
    try:
        status: int = options.run(options)
        return status
    except (InputError, LayoutError, ContractError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone: nothing more to say
        return 128 + signal.SIGPIPE
    except Exception as error:  # status 1 would read as "not exact"
        if not isinstance(error, ParityError):
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    finally:
        signal.signal(signal.SIGTERM, terminate)
