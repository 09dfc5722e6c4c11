"""Profile: a torch trace of the steps of this process, for chrome://tracing or Perfetto.

In addition to torch's ranges, the trace has a range for each part of a step ("schedule", "collect", "apply"). It also
has a range for each launch, named by step and batch ("step 1234: 256 rows, 256 tokens"), with its GPU kernels.
"""

from __future__ import annotations

import gzip
import importlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from io import BufferedWriter
from pathlib import Path
from typing import Any

from msgspec import Struct

from aioengine.protocol.messages import Progress
from aioengine.scheduler.plan import StepPlan

_NOTHING = nullcontext()


class _Running(Struct):
    """A profile in progress. num_steps: None records until ``stop``. last_step: set at the first recorded step."""

    profiler: Any
    mark: Callable[[str], AbstractContextManager[object]]
    path: Path
    file: BufferedWriter
    num_steps: int | None
    last_step: int | None = None


class Profile:
    """Implements the control calls "start_profile" and "stop_profile", and the ``Trace`` of the scheduler core.

    The first start imports torch, because a process with a fake runner does not need it. ``running``: the profile in
    progress, or None.
    """

    def __init__(self, report: Callable[[Progress], None]) -> None:
        """report: called before a file is written, because that takes long."""
        self._report = report
        self.running: _Running | None = None
        self._written: Path | Exception | None = None
        self._num_started = 0

    def part(self, name: str) -> AbstractContextManager[object]:
        return _NOTHING if self.running is None else self.running.mark(name)

    def launch(self, number: int, plan: StepPlan) -> AbstractContextManager[object]:
        """Return a context manager for the launch. End the profile if its last step has been launched."""
        running = self.running
        if running is None:
            return _NOTHING
        if running.num_steps is not None:
            if running.last_step is None:
                running.last_step = number + running.num_steps - 1
            if number > running.last_step:
                self._write(running)
                return _NOTHING
        return running.mark(f"step {number}: {len(plan.rows)} rows, {plan.num_tokens} tokens")

    def start(
        self, *, folder: str, prefix: str, num_steps: int | None, activities: str, with_stack: bool, record_shapes: bool
    ) -> tuple[bool, str, str]:
        """Start a profile. activities: comma-separated CPU, GPU, MEM; GPU is ignored if there is none."""
        if self.running is not None:
            return False, f"a profile is being made already, to be written to {self.running.path}", ""
        torch = importlib.import_module("torch")
        kinds = activities.split(",")
        wanted = [torch.profiler.ProfilerActivity.CPU] if "CPU" in kinds else []
        if "GPU" in kinds and torch.cuda.is_available():
            wanted.append(torch.profiler.ProfilerActivity.CUDA)
        self._num_started += 1
        name = f"{prefix}{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{self._num_started}.trace.json.gz"
        path = Path(folder) / name
        try:
            with ExitStack() as undo:
                path.parent.mkdir(parents=True, exist_ok=True)
                file = undo.enter_context(path.open("xb"))  # does not follow a link that another user may have made
                undo.callback(path.unlink)
                profiler = torch.profiler.profile(
                    activities=wanted, with_stack=with_stack, record_shapes=record_shapes, profile_memory="MEM" in kinds
                )
                profiler.start()
                undo.pop_all()
        except (OSError, RuntimeError, ValueError) as error:
            return False, f"a profile could not be started: {type(error).__name__}: {error}", ""
        self._written = None
        self.running = _Running(profiler, torch.profiler.record_function, path, file, num_steps)
        return True, "", ""

    def stop(self) -> tuple[bool, str, str]:
        """End the profile and write its file. The message is the path of the file.

        If the profile has already ended after ``num_steps``, return the path of its file.
        """
        if self.running is not None:
            self._write(self.running)
        written, self._written = self._written, None
        if written is None:
            return False, "no profile is being made; start_profile begins one", ""
        if isinstance(written, Exception):
            return False, f"the profile could not be written: {type(written).__name__}: {written}", ""
        return True, str(written), ""

    def close(self) -> None:
        """End a profile in progress without writing it. A process crashes at exit if torch still records."""
        running, self.running = self.running, None
        if running is not None:
            running.file.close()
            running.profiler.stop()

    def _write(self, running: _Running) -> None:
        """Write the file. Keep the path or the exception for ``stop``, because the launch of a step must not fail."""
        self.running = None
        self._report(Progress("writing a profile", 0, 1, ""))
        try:
            running.profiler.stop()
            # torch requires a path and would follow a link at that path.
            with running.file, tempfile.TemporaryDirectory(dir=running.path.parent) as folder:
                trace = Path(folder) / "trace.json"
                running.profiler.export_chrome_trace(str(trace))
                with trace.open("rb") as uncompressed, gzip.open(running.file, "wb") as compressed:
                    shutil.copyfileobj(uncompressed, compressed)
        except Exception as error:
            self._written = error
        else:
            self._written = running.path
