"""Launch Triton kernels, and compile them before the first launch.

Triton compiles a specialization at its first launch, without a C++ compiler. This takes about a third of a second,
mostly outside Python. So at the start the runner requests all specializations that it will need (``compile_only``), and
compiles them in parallel (``compiled_in_threads``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from aioengine.settings.machine import num_threads

Grid = tuple[int, int, int]

MAX_COMPILERS = 16
"""Maximum number of compiler threads. The Python part of a compilation holds the GIL."""
PROCESSORS = 132
"""Multiprocessors of an H200, for which the shapes of programs are chosen."""

_requested: ContextVar[set[Hashable] | None] = ContextVar("_requested", default=None)
"""Specializations requested inside ``compile_only``. None outside of it: kernels are launched."""


def supports(x: Tensor) -> bool:
    """Return whether Triton kernels run on the device of x [...]. ``runner.build`` checks that Triton is installed."""
    return x.is_cuda


class KernelLauncher:
    """Launches a kernel. Looks up its specializations in a table, because Triton's lookup is slower than many kernels.

    The ``key`` of a specialization must differ whenever Triton compiles another one: it contains dtypes, constants, and
    whether numbers and addresses are multiples of 16. It may leave out the address of a tensor that has its own
    allocation, such as the output, because torch aligns allocations. ``arguments`` are all parameters in order,
    including constants: a compiled kernel takes no keywords. Constants with names (a NamedTuple, as in ``decode``)
    take about a microsecond longer than a tuple, so most kernels take them one by one.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel  # a ``triton.JITFunction``
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, grid: Grid, key: Hashable, arguments: tuple[object, ...], options: Mapping[str, object]) -> None:
        if (requested := _requested.get()) is not None:
            if (self, key) not in requested:
                requested.add((self, key))
                self._kernel.warmup(*arguments, grid=grid, **options)
            return
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = self._kernel[grid](*arguments, **options)
        else:
            compiled[grid](*arguments)


def kernel(**jit_options: object) -> Callable[[Callable[..., None]], KernelLauncher]:
    """Return a decorator: ``triton.jit`` with these options, launched by a ``KernelLauncher``."""
    jit = importlib.import_module("triton").jit(**jit_options)
    return lambda function: KernelLauncher(jit(function))


@contextmanager
def compile_only() -> Iterator[None]:
    """Inside, launchers compile kernels but do not launch them. Results are undefined."""
    token = _requested.set(set())
    try:
        yield
    finally:
        _requested.reset(token)


@contextmanager
def compiled_in_threads(device: torch.device) -> Iterator[None]:
    """Inside, compile in several threads. A launch waits only for its own specialization."""
    if device.type == "cpu":
        yield
        return
    mode = importlib.import_module("triton").AsyncCompileMode
    with ThreadPoolExecutor(min(num_threads(), MAX_COMPILERS)) as executor, mode(executor, ignore_errors=True):
        yield


@cache
def has_dependent_launch() -> bool:
    """Return whether the GPU supports programmatic dependent launch (Hopper and newer).

    A kernel then starts while the previous kernel still runs, and waits for it inside.
    """
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@lru_cache(maxsize=32)
def options(num_warps: int, *, fuses: bool = True) -> dict[str, object]:
    """Return the launch options of a kernel that uses programmatic dependent launch.

    fuses: allow fused multiply-add. It skips the rounding of the product, even an explicit rounding to 16 bits.
    """
    base: dict[str, object] = {"num_warps": num_warps, "launch_pdl": has_dependent_launch()}
    return base if fuses else base | {"enable_fp_fusion": False}


def alignments(*tensors: Tensor | None) -> tuple[int | None, ...]:
    """Return the part of a ``KernelLauncher`` key that depends on the addresses of tensors [...]."""
    return tuple([None if tensor is None else tensor.data_ptr() % 16 for tensor in tensors])


def dtypes(*tensors: Tensor | None) -> tuple[torch.dtype | None, ...]:
    """Return the part of a ``KernelLauncher`` key that depends on the dtypes of tensors [...]."""
    return tuple([None if tensor is None else tensor.dtype for tensor in tensors])


@lru_cache(maxsize=64)
def next_power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
