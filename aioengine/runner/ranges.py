"""Ranges inside a launch, for a profile that is being made."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler
from torch.profiler import record_function

_NOTHING = nullcontext()


def part(name: str) -> AbstractContextManager[object]:
    """A range named ``name``; next to nothing while torch's profiler does not run."""
    return record_function(name) if profiler._is_profiler_enabled else _NOTHING
