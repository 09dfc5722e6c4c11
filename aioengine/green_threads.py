"""Detect libraries that replace Python's threads and sockets by their own, with which an engine would wait for ever."""

from __future__ import annotations

import _thread
import queue
import select
import socket
import subprocess
from typing import Final

from aioengine.errors import EngineStartupError

_LIBRARIES: Final = {"gevent": "gevent.monkey.patch_all", "eventlet": "eventlet.monkey_patch"}


def require_real_threads() -> None:
    """Check that nothing is replaced; neither library is imported.

    Raises:
        EngineStartupError: threads, queues, select, sockets or subprocesses are replaced.
    """
    replaced = {
        "threads": _thread.start_new_thread,
        "queues": queue.SimpleQueue,
        "select": select.select,
        "sockets": socket.socket,
        "subprocesses": subprocess.Popen,
    }
    homes = {name: value.__module__.partition(".")[0] for name, value in replaced.items()}
    for library, function in _LIBRARIES.items():
        if names := [name for name, home in homes.items() if home == library]:
            raise EngineStartupError(
                f"{library} has replaced Python's {', '.join(names)} in this program ({function}), and an engine needs "
                "the real ones; run it in a process that is not patched (for example a server of its own, started by "
                f"uvicorn), or leave these out of the call of {function}"
            )
