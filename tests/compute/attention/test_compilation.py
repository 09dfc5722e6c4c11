"""Compilation of FlashInfer kernels: progress, time limit, error messages; locks of dead processes do not block."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

from aioengine.attention import _compilation
from aioengine.attention._base import BackendUnavailableError
from aioengine.attention._compilation import Compilation, CompilationTimeoutError, lock_holder, missing_tools, title
from aioengine.protocol.messages import Progress

NAME = "batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_head_dim_qk_128_f16qk_False_sm90"


@dataclass
class Kernel:
    folder: Path
    name: str = NAME
    is_aot: bool = False

    @property
    def build_dir(self) -> Path:
        return self.folder / self.name

    @property
    def shared_object(self) -> Path:
        return self.build_dir / "library.so"

    @property
    def is_compiled(self) -> bool:
        return self.shared_object.exists()

    @property
    def ninja_path(self) -> Path:
        return self.build_dir / "build.ninja"

    @property
    def lock_path(self) -> Path:
        return self.folder / f"{self.name}.lock"

    def write_ninja(self) -> None:
        self.build_dir.mkdir(exist_ok=True)
        self.ninja_path.touch()


@dataclass
class Machine:
    """A machine with fake tools, and the reports."""

    bin: Path
    kernel: Kernel
    reports: list[Progress]

    def tool(self, name: str, script: str) -> None:
        (self.bin / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.bin / name).chmod(0o755)

    def compile(self, *kernels: Kernel, seconds: float = 20.0) -> None:
        Compilation(time.monotonic() + seconds, self.reports.append).compile_missing(kernels or (self.kernel,))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    tools = tmp_path / "bin"
    tools.mkdir()
    here = Machine(tools, Kernel(tmp_path), [])
    for name in ("nvcc", "c++"):
        here.tool(name, "exit 0")
    here.tool("ninja", 'echo "[1/2] first"; sleep 0.3; echo "[2/2] second"; touch "$3/library.so"')
    for variable in ("CUDA_HOME", "CUDA_PATH", "FLASHINFER_NVCC", "CXX", "MAX_JOBS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setattr(_compilation, "_CUDA_FOLDER", tmp_path / "nowhere")
    return here


def test_progress_names_the_kernel_and_counts_its_files(machine: Machine) -> None:
    machine.compile(Kernel(machine.kernel.folder, "precompiled", is_aot=True), machine.kernel)
    assert machine.kernel.is_compiled
    first, last = machine.reports[0], machine.reports[-1]
    assert (
        first.label == "compiling FlashInfer's batch_prefill_with_kv_cache_sm90 (kernel 1 of 1, once for this machine)"
    )
    assert (1, 2) in {(report.done, report.total) for report in machine.reports}
    assert ((first.done, first.total, first.unit), (last.done, last.total)) == ((0, 1, "files"), (2, 2))


def test_no_reports_if_everything_is_up_to_date(machine: Machine) -> None:
    machine.tool("ninja", 'echo "ninja: no work to do."')
    machine.kernel.write_ninja()
    machine.kernel.shared_object.touch()
    machine.compile()
    machine.compile(Kernel(machine.kernel.folder, is_aot=True))
    assert machine.reports == []


@pytest.mark.parametrize("tool", ["nvcc", "ninja", "c++"])
def test_missing_tool_is_reported_before_compiling(
    machine: Machine, tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine.bin / tool).unlink()
    monkeypatch.setenv("PATH", str(machine.bin))
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(machine.bin))
    with pytest.raises(BackendUnavailableError) as caught:
        machine.compile()
    assert f"(batch_prefill_with_kv_cache_sm90) are not compiled, and {tool} cannot be found" in str(caught.value)
    assert "flashinfer-jit-cache" in str(caught.value)
    assert not machine.kernel.build_dir.exists()


@pytest.mark.parametrize("is_compiled", [False, True])
def test_ninja_in_the_folder_of_python_is_used(
    machine: Machine, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_compiled:
        machine.kernel.write_ninja()
        machine.kernel.shared_object.touch()
    scripts = machine.kernel.folder / "scripts"
    scripts.mkdir()
    machine.tool("ninja", f"echo done > {scripts}/ran")
    (machine.bin / "ninja").rename(scripts / "ninja")
    monkeypatch.setenv("PATH", str(machine.bin))
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(scripts))
    machine.compile()
    assert (scripts / "ran").exists()


def test_nvcc_of_cuda_home_is_used(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(machine.kernel.folder))  # its bin has the fake nvcc
    assert missing_tools() == []
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    assert missing_tools() == ["nvcc"]


def test_compiler_errors_are_reported(machine: Machine) -> None:
    machine.tool("ninja", 'echo "[1/2] nvcc x.cu"; echo "x.cu(7): error: no such thing"; exit 1')
    with pytest.raises(BackendUnavailableError, match=r"does not compile in .*\n  x.cu\(7\): error: no such thing$"):
        machine.compile()


def test_compilation_is_stopped_at_the_deadline(machine: Machine) -> None:
    machine.tool("ninja", f'echo "[1/9] first"; echo $$ > {machine.bin}/pid; exec sleep 600')
    with pytest.raises(CompilationTimeoutError, match=r"1 of 9 files were done.*startup_timeout"):
        machine.compile(seconds=0.5)
    assert not Path(f"/proc/{(machine.bin / 'pid').read_text().strip()}").exists()


@pytest.mark.process
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
def test_compilers_stop_when_the_process_is_killed(machine: Machine) -> None:
    machine.tool("ninja", f"echo $$ > {machine.bin}/pid; exec sleep 60")
    program = f"""
import time
from pathlib import Path
from aioengine.attention._compilation import Compilation
from tests.compute.attention.test_compilation import Kernel
Compilation(time.monotonic() + 60, print).compile_missing([Kernel(Path({str(machine.kernel.folder)!r}))])
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    pid = machine.bin / "pid"
    assert eventually(lambda: pid.exists() and pid.read_text().endswith("\n"), 30)
    process.kill()
    process.wait()
    assert eventually(lambda: not Path(f"/proc/{pid.read_text().strip()}").exists(), 30)


def eventually(is_true: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_true()


HOLD = """
import sys, time, filelock
lock = filelock.FileLock(sys.argv[1])
lock.acquire()
print(flush=True)
time.sleep(60)
"""


@pytest.fixture
def rival(machine: Machine) -> subprocess.Popen[bytes]:
    """Another process that holds the kernel's lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, machine.kernel.lock_path], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as output:
        output.readline()
    return process


@pytest.mark.process
def test_lock_of_a_dead_process_does_not_block(machine: Machine, rival: subprocess.Popen[bytes]) -> None:
    rival.send_signal(signal.SIGKILL)
    rival.wait()
    machine.compile(seconds=5)
    assert machine.kernel.is_compiled
    assert not any("waiting" in report.label for report in machine.reports)


@pytest.mark.process
def test_live_lock_holder_is_reported_and_waited_for(machine: Machine, rival: subprocess.Popen[bytes]) -> None:
    try:
        with pytest.raises(CompilationTimeoutError) as caught:
            machine.compile(seconds=0.5)
    finally:
        rival.kill()
        rival.wait()
    holder = f"process {rival.pid} ({sys.executable} -c" if Path("/proc/locks").exists() else "another process"
    assert holder in str(caught.value)
    assert str(machine.kernel.lock_path) in str(caught.value)
    assert [(report.done, report.total) for report in machine.reports] == [(0, 1)]
    assert machine.reports[0].label.startswith(f"waiting for {holder}")
    machine.compile()
    assert machine.kernel.is_compiled


def test_unknown_lock_holder_is_described(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    assert lock_holder(lock) == "another process"
    with FileLock(lock):
        (tmp_path / "locks").write_text(f"1: FLOCK  ADVISORY  WRITE 0 00:2f:{lock.stat().st_ino} 0 EOF\n")
        assert lock_holder(lock, tmp_path) == "another process, perhaps in another container or on another machine"


def test_titles_omit_dtypes_and_sizes() -> None:
    assert title("cascade") == "cascade"
    assert title(NAME.removesuffix("_sm90")) == "batch_prefill_with_kv_cache"
