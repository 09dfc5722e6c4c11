"""Operating system settings of a child process: name, end with its parent, signals, threads and memory."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
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
_LARGEST_FROM_HEAP = 32 << 20  # the maximum that glibc accepts
_KEPT_BYTES = 256 << 20
_KEPT_KERNELS = 128
"""A kernel takes 0.5 to 1 MB. A model has about 5 weight shapes, and the number of rows has 20 to 30 rounded values."""


class AskedToEnd(SystemExit):
    """This process was asked to end. Any other SystemExit was raised by a model or a library, and is a failure."""


def name_process(name: str) -> None:
    """Set the short name of this process to the first 15 bytes of ``name``. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:_MAX_NAME_BYTES], 0, 0, 0)


def die_with_parent(parent_pid: int) -> None:
    """End this process and its process group when the parent ends, for any reason.

    A thread waits for the end of standard input. Only the parent holds the other end. On Linux the kernel also kills
    this process, even if the interpreter is blocked.

    Afterwards standard input is empty for all other code, because a question to the user could never be answered.
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
    """Ignore Ctrl-C, because the parent handles it. On SIGTERM, raise ``AskedToEnd`` in the main thread.

    Return a descriptor that is readable after a signal. A wait that polls it cannot miss a signal.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading


def read_orders() -> bytes:
    """Read the last line of standard input. If the parent has died, end this process."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 65536)
        if not part:
            os._exit(1)
        line += part
    return line


def limit_threads(num_threads: int) -> None:
    """Set the number of threads of libraries that are imported later. Does not change the parent's environment."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
        os.environ[variable] = str(num_threads)
    # A waiting OpenMP thread spins on its core. If another process needs the core, spinning may block the very thread
    # that the others wait for, and a step takes 100 times as long. So waiting threads sleep soon.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def use_share_of_cores(number: int, num_shares: int) -> None:
    """Restrict this process to one of ``num_shares`` equal parts of its cores, if there are enough. Linux only."""
    if sys.platform == "linux":
        cores = sorted(os.sched_getaffinity(0))
        size = len(cores) // num_shares
        if size:
            os.sched_setaffinity(0, cores[number * size : (number + 1) * size])


def limit_kernel_cache() -> None:
    """Limit the kernel caches of torch, oneDNN and Triton, which are imported later. Values set by the user are kept.

    Those of torch and oneDNN have 1024 entries by default, about 1 GB together. Triton's folder gets no intermediate
    code, which a start would read.
    """
    for variable in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(variable, str(_KEPT_KERNELS))
    os.environ.setdefault("TRITON_STORE_BINARY_ONLY", "1")


def show_one_gpu(index: int) -> None:
    """Hide all GPUs from this process except one that it may use. Must be called before CUDA is initialized."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(index)
    elif index < len(names := visible.split(",")):
        os.environ["CUDA_VISIBLE_DEVICES"] = names[index].strip()


def open_gpu() -> None:
    """Create the CUDA context of the first GPU and load Triton in threads, while torch is imported."""
    for work in (_create_context, _hash_triton):
        threading.Thread(target=work, name="open-gpu", daemon=True).start()


def _hash_triton() -> None:
    """Let Triton compute the hash of its 400 MB for the keys of compiled kernels. It keeps the hash."""
    with contextlib.suppress(ImportError, AttributeError):  # not installed, or another version
        importlib.import_module("triton.runtime.cache").triton_key()


def _create_context() -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # torch will report it
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(device), 0):
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def keep_freed_memory() -> None:
    """Let the allocator keep freed memory for the next step. glibc only.

    Otherwise it may return the same blocks to the system in every operation, and zeroing of new pages takes half of a
    step.
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
    """Kill this process, and its process group if this process leads it."""
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _leave(_number: int, _frame: object) -> NoReturn:
    raise AskedToEnd(0)
