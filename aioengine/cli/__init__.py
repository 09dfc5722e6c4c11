"""The command line: aioengine generate | chat | serve | batch | bench | info.

Standard output has answers only. An error is one line on stderr. Exit statuses: 1 if something failed, 2 if the command
line is wrong, 130 after Ctrl-C, and 141 if the reader of the output is gone; the last two print no message.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

INTERRUPTED = 130
"""The exit status of programs that SIGINT ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    try:
        from aioengine.cli.commands import run  # here, because Ctrl-C may interrupt the imports

        return run(argv)
    except KeyboardInterrupt:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # it is closed
                if stream is not None and stream.isatty():
                    print(file=stream, flush=True)  # so that the shell's prompt starts a new line
                    break
        return INTERRUPTED
