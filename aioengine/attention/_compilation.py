"""Compiling FlashInfer's kernels at the start: named beforehand, with progress, and with an end.

By itself FlashInfer compiles a kernel at its first use, without progress or a time limit, under a lock of the package
filelock in its cache folder. That is ``flock``: the system releases it when its holder dies. (Where a file system has
no ``flock``, filelock makes a file with the holder's process id and host, and takes it over when that process is gone.)
So only a live process can hold a lock; the start waits for it and reports it. Here the same ninja builds the same files
under the same locks, so FlashInfer then finds them up to date.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

from filelock import FileLock, Timeout

from aioengine.attention._base import BackendUnavailableError
from aioengine.protocol.messages import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

POLL_S = 0.2
_CUDA_FOLDER = Path("/usr/local/cuda")
_END_S = 5.0
_MAX_LINES = 15
_TELLING = ("error", "cannot find", "not found", "killed")


class CompilationTimeoutError(RuntimeError):
    """Compiling took longer than it may."""


class Source(Protocol):
    """A kernel that can be compiled, as FlashInfer's ``JitSpec`` describes it.

    is_aot: it came compiled, with a package. is_compiled: there is a library of it, which may be out of date.
    """

    @property
    def name(self) -> str: ...
    @property
    def is_aot(self) -> bool: ...
    @property
    def is_compiled(self) -> bool: ...
    @property
    def build_dir(self) -> Path: ...
    @property
    def ninja_path(self) -> Path: ...
    @property
    def lock_path(self) -> Path: ...
    def write_ninja(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Compilation:
    """How kernels are compiled. ``deadline``: the time.monotonic() at which to give up."""

    deadline: float
    report: Callable[[Progress], None]

    def bring_up_to_date(self, sources: Sequence[Source]) -> None:
        """Compile those that are not compiled, or whose sources have changed since.

        Raises:
            BackendUnavailableError: a tool is missing, or one does not compile.
            CompilationTimeoutError: the deadline came first.
        """
        own = [source for source in sources if not source.is_aot]
        missing = [source for source in own if not source.is_compiled]
        if missing and (tools := missing_tools()):
            message = (
                f"FlashInfer's kernels for this model ({_titles(missing)}) are not compiled, and {' and '.join(tools)} "
                "cannot be found to compile them. Install the CUDA toolkit (nvcc) and a C++ compiler, or compiled "
                "kernels: the package flashinfer-jit-cache of FlashInfer's own index"
            )
            raise BackendUnavailableError(message)
        for number, source in enumerate(own, 1):
            label = (
                f"compiling FlashInfer's {title(source.name)} (kernel {number} of {len(own)}, once for this machine)"
            )
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
                lock.acquire(timeout=0 if not label else POLL_S, poll_interval=POLL_S / 4)
                break
            except Timeout:
                who = holder(source.lock_path)
            if not label:
                label = f"waiting for {who}, which compiles FlashInfer's {title(source.name)}"
                self.report(Progress(label, 0, 1))
            if time.monotonic() > self.deadline:
                message = (
                    f"{who} holds the lock of FlashInfer's kernel {source.name} ({source.lock_path}) and has not given "
                    "it back in time. End it if it hangs, or give it more time with startup_timeout"
                )
                raise CompilationTimeoutError(message)
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
        if shutil.which("setpriv"):  # should this process be killed, ninja is asked to end, and ends its compilers
            command = ["setpriv", "--pdeathsig", "TERM", *command]
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
            try:
                done, total = 0, 0 if source.is_compiled else 1
                if total:
                    self.report(Progress(label, done, total, "files"))
                while not _has_ended(process):
                    if time.monotonic() > self.deadline:
                        raise CompilationTimeoutError(_too_slow(source, done, total))
                    found = _num_done(output)
                    if found not in (None, (done, total)):
                        done, total = found
                        self.report(Progress(label, done, total, "files"))
            finally:
                _end(process)
            if process.returncode:
                raise BackendUnavailableError(_broken(source, output))
            if done < total:
                self.report(Progress(label, total, total, "files"))


def title(name: str) -> str:
    """The name of a kernel without the types and sizes that it is made for."""
    return re.sub(r"_dtype_.*?(_sm90)?$", r"\1", name)


def missing_tools() -> list[str]:
    """Which of the tools cannot be found. A ninja that stands beside this Python is put on this process's PATH."""
    if shutil.which("ninja") is None:
        scripts = sysconfig.get_path("scripts")
        if shutil.which("ninja", path=scripts) is not None:
            os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), scripts])
    found = {
        "nvcc": shutil.which(os.environ.get("FLASHINFER_NVCC", _nvcc())),
        "ninja": shutil.which("ninja"),
        "c++": shutil.which(os.environ.get("CXX", "c++")),
    }
    return [tool for tool, path in found.items() if path is None]


def _nvcc() -> str:
    """Where FlashInfer looks for it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return f"{home}/bin/nvcc"
    return shutil.which("nvcc") or f"{_CUDA_FOLDER}/bin/nvcc"


def holder(lock_path: Path, root: Path = Path("/proc")) -> str:
    """Who holds a lock, as far as this machine can tell: "process 123 (python train.py)"."""
    try:
        inode = lock_path.stat().st_ino
        entries = [line.split() for line in (root / "locks").read_text().splitlines()]
    except OSError:
        return "another process"
    for entry in entries:  # number: FLOCK ADVISORY WRITE pid device:inode first last
        if len(entry) > 5 and entry[1] == "FLOCK" and entry[5].rpartition(":")[2] == str(inode) and entry[4] != "0":
            try:
                words = (root / entry[4] / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            return f"process {entry[4]} ({b' '.join(words).decode(errors='replace').strip()[:200]})"
    return "another process, perhaps of another container or machine"


def _titles(sources: Sequence[Source]) -> str:
    return ", ".join(title(source.name) for source in sources)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """ninja ends its compilers when it is asked to end."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _text(output: IO[bytes]) -> str:
    descriptor = output.fileno()  # whose position is also that at which ninja writes
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")


def _num_done(output: IO[bytes]) -> tuple[int, int] | None:
    """What the last line "[3/10] ..." says; None before the first. A line is written when its file is done."""
    found = re.findall(r"^\[(\d+)/(\d+)\]", _text(output), re.MULTILINE)
    return (int(found[-1][0]), int(found[-1][1])) if found else None


def _too_slow(source: Source, done: int, total: int) -> str:
    progress = f"{done} of {total} files were done" if done else "no file was done"
    return (
        f"compiling FlashInfer's kernel {source.name} in {source.build_dir} took too long: {progress}. It goes on from "
        "there at the next start; give it more time with startup_timeout, or install compiled kernels (the package "
        "flashinfer-jit-cache of FlashInfer's own index), or take attention_backend='torch'"
    )


def _broken(source: Source, output: IO[bytes]) -> str:
    lines = [line[:400] for line in _text(output).splitlines() if line.strip()]
    telling = [line for line in lines if any(word in line.lower() for word in _TELLING)] or lines[-_MAX_LINES:]
    words = "\n  ".join(telling[:_MAX_LINES])
    return f"FlashInfer's kernel {source.name} does not compile in {source.build_dir}:\n  {words}"
