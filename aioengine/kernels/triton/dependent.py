"""Programmatic dependent launch: a kernel starts while the previous kernel still runs.

A kernel must not read results of the previous kernel before it has waited. On GPUs without this feature, the functions
do nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aioengine.kernels.triton.launcher import has_dependent_launch

DEPENDENT = tl.constexpr(has_dependent_launch())


@triton.jit
def start_next() -> None:
    """Allow the next kernel to start."""
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def wait() -> None:
    """Wait for the end of the previous kernel."""
    if DEPENDENT:
        gdc_wait()


@triton.jit
def start_next_and_wait() -> None:
    """Allow the next kernel to start, then wait for the previous kernel."""
    start_next()
    wait()


@triton.jit
def wait_and_start_next() -> None:
    """Wait for the previous kernel, then allow the next kernel to start: it may read this kernel's inputs at once."""
    wait()
    start_next()


@triton.jit
def wait_between_products() -> None:
    """Wait for the previous kernel, and allow the next kernel to start. The first axis of programs is rows.

    A product of one row loads weights while it waits, so it starts early. With more rows the next kernel starts after
    the wait: products with 8 rows of an 8B model in int4 take a quarter longer if they start while the previous product
    still runs.
    """
    if tl.num_programs(0) == 1:
        start_next()
    wait()
    if tl.num_programs(0) > 1:
        start_next()
