"""Named ranges of a step for torch's profiler, and the durations of the phases of a start."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler
from torch.profiler import record_function

from aioengine.protocol.messages import Fact

_NOTHING = nullcontext()


def profiled(name: str) -> AbstractContextManager[object]:
    """Return a range named ``name`` for a torch profile. It does nothing without a profiler.

    The runner names two parts of a step: "prepare" (host work before the launch) and "sample".
    """
    return record_function(name) if profiler._is_profiler_enabled else _NOTHING


class StartTimes:
    """The durations of consecutive phases of a start, from the construction to the last call of ``end``."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._started_at = self._since = time.monotonic()

    def end(self, phase: str) -> None:
        """Record the time since the last call as the duration of ``phase``."""
        now = time.monotonic()
        self._seconds[phase] = now - self._since
        self._since = now

    def facts(self) -> dict[str, Fact]:
        """Return the seconds of the start as ``load_s``, and of each phase as ``start_<phase>_s``."""
        phases = {f"start_{phase}_s": round(seconds, 3) for phase, seconds in self._seconds.items()}
        return {"load_s": self._since - self._started_at, **phases}
