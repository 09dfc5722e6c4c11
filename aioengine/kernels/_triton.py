"""What the fast forms on a GPU share.

Triton compiles its kernels when they are first launched, without a C++ compiler; the runner launches each of them once
before it is ready.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@lru_cache(maxsize=1)
def is_installed() -> bool:
    return find_spec("triton") is not None


def serves(x: Tensor) -> bool:
    """Whether the fast forms run on the device of this tensor."""
    return x.is_cuda and is_installed()


@lru_cache(maxsize=1)
def has_dependent_launch() -> bool:
    """Whether a kernel may begin while the one before it still runs, and wait for it inside (Hopper and newer)."""
    return torch.cuda.get_device_capability() >= (9, 0)


def next_power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
