"""Programmatic dependent launch: a kernel starts while the previous kernel still runs.

A kernel must not read results of the previous kernel before it has waited. DEPENDENT: whether the kernel was launched
so (``launcher.has_dependent_launch``).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def start_next_and_wait(DEPENDENT: tl.constexpr) -> None:
    """Allow the next kernel to start, then wait for the previous kernel."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def wait_and_start_next(DEPENDENT: tl.constexpr) -> None:
    """Wait for the previous kernel, then allow the next kernel to start: it may read this kernel's inputs at once."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
