"""Compile FlashInfer's kernels at the start, with progress reports and a time limit.

FlashInfer itself compiles a kernel at its first use, without progress or a time limit, under a lock of the package
filelock in its cache folder. The lock uses ``flock``, which the system releases when the holder dies. (If the file
system has no ``flock``, filelock creates a file with the holder's process id and host, and takes it over when this
process is gone.) So only a live process can hold a lock; the start reports it and waits. This module runs the same
ninja build on the same files under the same locks, so FlashInfer then finds them up to date.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from filelock import FileLock, Timeout

from aioengine.attention._base import BackendUnavailableError
from aioengine.protocol.messages import Progress

kernels_ready = threading.Event()
"""Not set while the kernels are compiled in the background, and after this has failed."""
kernels_ready.set()

POLL_S = 0.2
_CUDA_FOLDER = Path("/usr/local/cuda")
_TERMINATE_S = 5.0
_LOWEST_PRIORITY = 19
_MAX_LINES = 15
_COMPILED = "compiled kernels (the package flashinfer-jit-cache of FlashInfer's own index)"
_ERROR_WORDS = ("error", "cannot find", "not found", "killed")


class CompilationTimeoutError(RuntimeError):
    """Compilation exceeded the time limit."""


class Source(Protocol):
    """A kernel that can be compiled: the interface of FlashInfer's ``JitSpec``.

    is_aot: a package contains it compiled. is_compiled: a compiled library exists, possibly out of date.
    """

    name: str
    is_aot: bool
    is_compiled: bool
    build_dir: Path
    ninja_path: Path
    lock_path: Path

    def write_ninja(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Compilation:
    """Compiles kernels until ``deadline`` (time.monotonic())."""

    deadline: float
    report: Callable[[Progress], None]

    def compile_missing(self, sources: Sequence[Source]) -> None:
        """Compile kernels that are not compiled or out of date.

        Raises:
            BackendUnavailableError: a tool is missing, or a kernel does not compile.
            CompilationTimeoutError: the deadline has passed.
        """
        to_build = [source for source in sources if not source.is_aot]
        check_tools(to_build)  # ninja also runs if all kernels are compiled, to find outdated ones
        for number, source in enumerate(to_build, 1):
            position = f"kernel {number} of {len(to_build)}, once for this machine"
            label = f"compiling FlashInfer's {title(source.name)} ({position})"
            with self._lock(source):
                source.write_ninja()
                self._run_ninja(source, label)

    @contextmanager
    def _lock(self, source: Source) -> Iterator[None]:
        """Hold FlashInfer's lock of this kernel."""
        lock = FileLock(source.lock_path, thread_local=False)
        label = ""
        while True:
            try:
                lock.acquire(timeout=POLL_S if label else 0, poll_interval=POLL_S / 4)
                break
            except Timeout:
                holder = lock_holder(source.lock_path)
            if not label:
                label = f"waiting for {holder}, which compiles FlashInfer's {title(source.name)}"
                self.report(Progress(label, 0, 1))
            if time.monotonic() > self.deadline:
                remedy = "End it if it hangs, or increase startup_timeout"
                raise CompilationTimeoutError(f"{holder} did not release {source.lock_path} in time. {remedy}")
        if label:
            self.report(Progress(label, 1, 1))
        try:
            yield
        finally:
            lock.release()

    def _run_ninja(self, source: Source, label: str) -> None:
        command = ["ninja", "-v", "-C", str(source.build_dir), "-f", str(source.ninja_path)]
        if os.environ.get("MAX_JOBS", "").isdigit():
            command += ["-j", os.environ["MAX_JOBS"]]
        if shutil.which("setpriv"):  # if this process is killed, ninja gets SIGTERM and stops its compilers
            command = ["setpriv", "--pdeathsig", "TERM", *command]
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
            os.setpriority(os.PRIO_PROCESS, process.pid, _LOWEST_PRIORITY)  # an engine may run meanwhile
            try:
                done = 0
                total = 0 if source.is_compiled else 1
                if total:
                    self.report(Progress(label, done, total, "files"))
                while not _has_ended(process):
                    if time.monotonic() > self.deadline:
                        raise CompilationTimeoutError(_timeout_message(source, done, total))
                    counts = _num_done(output)
                    if counts not in (None, (done, total)):
                        done, total = counts
                        self.report(Progress(label, done, total, "files"))
            finally:
                _terminate(process)
            if process.returncode:
                raise BackendUnavailableError(_failure_message(source, output))
            if done < total:
                self.report(Progress(label, total, total, "files"))


def check_tools(sources: Sequence[Source]) -> None:
    """Raise BackendUnavailableError if kernels are not compiled, and a tool to compile them is missing."""
    _add_scripts_to_path()
    missing = [title(source.name) for source in sources if not is_ready(source)]
    if missing and (tools := missing_tools()):
        reason = f"are not compiled, and {' and '.join(tools)} cannot be found to compile them"
        remedy = f"Install the CUDA toolkit (nvcc) and a C++ compiler, or {_COMPILED}"
        raise BackendUnavailableError(f"FlashInfer's kernels for this model ({', '.join(missing)}) {reason}. {remedy}")


def is_ready(source: Source) -> bool:
    """Return whether a kernel is compiled, possibly out of date."""
    return source.is_aot or source.is_compiled


def title(name: str) -> str:
    """Return the name of a kernel without dtypes and sizes."""
    return re.sub(r"_dtype_.*?(_sm90)?$", r"\1", name)


def missing_tools() -> list[str]:
    """Return the tools that cannot be found."""
    paths = {
        "nvcc": shutil.which(os.environ.get("FLASHINFER_NVCC", _nvcc())),
        "ninja": shutil.which("ninja"),
        "c++": shutil.which(os.environ.get("CXX", "c++")),
    }
    return [tool for tool, path in paths.items() if path is None]


def _add_scripts_to_path() -> None:
    """Add the folder of this Python's scripts to PATH, if ninja is only there. The environment may not be activated."""
    scripts = sysconfig.get_path("scripts")
    if shutil.which("ninja") is None and shutil.which("ninja", path=scripts) is not None:
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), scripts])


def _nvcc() -> str:
    """Return the path where FlashInfer looks for nvcc."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return f"{home}/bin/nvcc"
    return shutil.which("nvcc") or f"{_CUDA_FOLDER}/bin/nvcc"


def lock_holder(lock_path: Path, root: Path = Path("/proc")) -> str:
    """Describe the process that holds a lock: "process 123 (python train.py)", or "another process" if unknown."""
    try:
        inode = lock_path.stat().st_ino
        entries = [line.split() for line in (root / "locks").read_text().splitlines()]
    except OSError:
        return "another process"
    for entry in entries:  # number: FLOCK ADVISORY WRITE pid device:inode first last
        if len(entry) > 5 and entry[1] == "FLOCK" and entry[5].rpartition(":")[2] == str(inode) and entry[4] != "0":
            try:
                command = (root / entry[4] / "cmdline").read_bytes().replace(b"\0", b" ")
            except OSError:
                continue
            return f"process {entry[4]} ({command.decode(errors='replace').strip()[:200]})"
    return "another process, perhaps in another container or on another machine"


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _terminate(process: subprocess.Popen[bytes]) -> None:
    """Stop ninja. On SIGTERM it stops its compilers too."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_TERMINATE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _text(output: IO[bytes]) -> str:
    descriptor = output.fileno()  # use pread: ninja writes at the shared file position
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")


def _num_done(output: IO[bytes]) -> tuple[int, int] | None:
    """Parse the last line "[3/10] ..."; None: no file is done yet. ninja writes a line when a file is done."""
    lines = re.findall(r"^\[(\d+)/(\d+)\]", _text(output), re.MULTILINE)
    return (int(lines[-1][0]), int(lines[-1][1])) if lines else None


def _timeout_message(source: Source, done: int, total: int) -> str:
    progress = f"{done} of {total} files were done" if done else "no file was done"
    remedy = f"Increase startup_timeout, install {_COMPILED}, or use attention_backend='triton'"
    what = f"compiling FlashInfer's kernel {source.name} in {source.build_dir}"
    return f"{what} took too long: {progress}. The next start continues from there. {remedy}"


def _failure_message(source: Source, output: IO[bytes]) -> str:
    lines = [line[:400] for line in _text(output).splitlines() if line.strip()]
    errors = [line for line in lines if any(word in line.lower() for word in _ERROR_WORDS)] or lines[-_MAX_LINES:]
    excerpt = "\n  ".join(errors[:_MAX_LINES])
    return f"FlashInfer's kernel {source.name} does not compile in {source.build_dir}:\n  {excerpt}"
