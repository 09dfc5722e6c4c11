"""The command line: aioengine generate | chat | bench | info.

Standard output holds answers only. Errors are one line on stderr and a status that is not zero: 2 where the command
line is wrong, 1 where something failed. Ctrl-C and a closed pipe end the program without a message.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

INTERRUPTED = 130
"""The status of programs that ended by SIGINT."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its status."""
    try:
        from aioengine.cli.commands import run  # here: Ctrl-C may come during the imports

        return run(argv)
    except KeyboardInterrupt:
        _end_line()
        return INTERRUPTED


def _end_line() -> None:
    """After Ctrl-C: what the shell prints next stands on a line of its own."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # it is closed
            if stream is not None and stream.isatty():
                print(file=stream, flush=True)
                return
