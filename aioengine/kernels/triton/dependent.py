"""How kernels wait for each other (programmatic dependent launch), and which program of a tile finishes last.

With programmatic dependent launch, a kernel starts while the previous kernel still runs.

A kernel must not read results of the previous kernel before it has waited. The functions below differ in when the next
kernel starts:

- ``start_next_and_wait``: at once. Before its own wait, the next kernel may only read weights.
- ``wait_and_start_next``: when the previous kernel has ended. Then it may also read the inputs of this kernel.
- ``wait_between_products``: one of the two, by the number of rows.

On GPUs without this feature, they do nothing.
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
    """Start the next kernel at once, and wait for the previous kernel."""
    start_next()
    wait()


@triton.jit
def wait_and_start_next() -> None:
    """Wait for the previous kernel, and start the next kernel only then."""
    wait()
    start_next()


@triton.jit
def wait_between_products() -> None:
    """Start the next kernel, a product, at once for one row, and after the wait for more rows.

    The first axis of programs is rows. A product of one row loads weights while it waits. Products with 8 rows of an 8B
    model in int4 take a quarter longer if they start while the previous product still runs.
    """
    if tl.num_programs(0) == 1:
        start_next()
    wait()
    if tl.num_programs(0) > 1:
        start_next()


@triton.jit
def is_last(num_done: tl.tensor, num_programs: tl.tensor) -> tl.tensor:
    """Count this program, and return whether all ``num_programs`` are counted now.

    The last one may read what the others have stored before, with loads that bypass L1 (cache modifier ".cg"). It must
    set the counter ``num_done`` to 0 again.
    """
    tl.debug_barrier()  # all threads must have stored before one increments the counter
    return tl.atomic_add(num_done, 1, sem="acq_rel", scope="gpu") == num_programs - 1
