"""Prepare torch's vectorized functions on a CPU, so that results do not depend on a race between threads.

Where torch uses MKL (2024.2), each function chooses its code in its first call. If several threads make this call at
once, a thread can run code of lower accuracy. A part of a rotary table was then wrong by up to 1.5e-4, in 5 of 1,830
processes on busy machines. See https://github.com/pytorch/pytorch/issues/188792.
"""

from __future__ import annotations

from typing import Final

import torch

_FUNCTIONS: Final = (
    *(torch.acos, torch.asin, torch.atan, torch.cos, torch.sin, torch.tan, torch.tanh),
    *(torch.erf, torch.erfc, torch.erfinv, torch.exp, torch.log, torch.log10, torch.log2, torch.sqrt),
)
"""The functions for which torch calls MKL, except ``trunc``, which is always exact."""


def prepare_vector_functions() -> None:
    """Make the first call of each function, in one thread. Call it before tensors are computed on the CPU."""
    for dtype in (torch.float32, torch.float64):
        number = torch.full((1,), 0.5, dtype=dtype)
        for function in _FUNCTIONS:
            function(number)
