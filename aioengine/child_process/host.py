"""Settings of a child process in the operating system: its name, its end with its parent, threads and memory."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_MAX_NAME_BYTES = 15
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_FROM_HEAP = 32 << 20  # the most that glibc takes
_KEPT_BYTES = 256 << 20
_KEPT_KERNELS = 128
"""Of 0.5 to 1 MB each. A model has about five shapes of weights, and rows are rounded to 20 to 30 numbers."""


class AskedToEnd(SystemExit):
    """This process is to end quietly. Any other SystemExit is of code that gave up, as models and libraries may do."""


def name_process(name: str) -> None:
    """Show ``name`` (its first 15 bytes) where the system lists processes by their short name. Linux alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:_MAX_NAME_BYTES], 0, 0, 0)


def die_with_parent(parent_pid: int) -> None:
    """See to it that this process ends when its parent does, in whatever way and whatever runs here at that moment.

    A thread waits for the end of standard input, whose other end the parent alone holds. On Linux the kernel kills
    this process as well, which needs no turn of the interpreter. Both take what this process started along.

    Other code that reads standard input finds it empty from now on: a question to a user would never be answered.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        _end()  # the parent died before the call above
    watched, empty = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    threading.Thread(target=_wait_for_end, args=(watched,), name="parent-watch", daemon=True).start()


def handle_signals() -> int:
    """Leave Ctrl-C to the parent; end quietly on SIGTERM, through ``AskedToEnd`` in the main thread.

    Returns a descriptor that is readable once a signal has come, for waits that begin just then.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading


def limit_threads(num_threads: int) -> None:
    """Let libraries imported after this use ``num_threads`` threads. The parent's environment is not changed."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
        os.environ[variable] = str(num_threads)
    # A thread that waits for its team burns its core. Where others need that core, the one waited for may be the one
    # kept from running, and a step takes a hundred times as long; so waiting threads go to sleep soon.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def limit_kernel_cache() -> None:
    """Let torch and oneDNN, imported after this, keep only some of the code that they compile for each shape.

    Each has a cache of 1024 entries, together a GB. A capacity that the user has set stays.
    """
    for variable in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(variable, str(_KEPT_KERNELS))


def keep_freed_memory() -> None:
    """Let the allocator keep what is freed for the next step. Else it can give the same blocks back to the system in
    every operation, and half of a step goes into the zeroing of fresh pages. glibc alone.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def _wait_for_end(watched: int) -> None:
    while os.read(watched, 4096):
        pass
    _end()


def _end() -> NoReturn:
    """End now, with the whole process group where it is our own."""
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _leave(_number: int, _frame: object) -> NoReturn:
    raise AskedToEnd(0)
