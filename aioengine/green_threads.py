"""Find out whether a library has replaced Python's threads and sockets by its own, with which no engine can work."""

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
    """Nothing but a look at five names; neither library is imported.

    Raises:
        EngineStartupError: one of them is replaced. An engine would wait for ever, without a word.
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
