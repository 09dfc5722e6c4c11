"""What Triton's kernels share: launching, and compilation before the first launch.

Triton compiles a specialization of a kernel when it is first launched, without a C++ compiler; the runner launches each
once before it is ready. One takes about a third of a second, most of it outside Python: so the start first requests all
that will be needed (``compile_only``), and these are compiled in parallel (``compiled_in_threads``).
"""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import torch

from aioengine.machine import num_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping

    from torch import Tensor

    Grid = tuple[int, int, int]

    class Compiled(Protocol):
        """What Triton compiled."""

        def __getitem__(self, grid: Grid, /) -> Callable[..., None]: ...

    class Kernel(Protocol):
        """A function that Triton can compile."""

        def __getitem__(self, grid: Grid, /) -> Callable[..., Compiled]: ...
        def warmup(self, *arguments: object, grid: Grid, **options: object) -> object: ...


MAX_COMPILERS = 16
"""Threads; Python's part of the work runs in one at a time."""

_requested: ContextVar[set[Hashable] | None] = ContextVar("_requested", default=None)
"""Specializations requested inside ``compile_only``; None outside: kernels are launched."""


@lru_cache(maxsize=1)
def is_installed() -> bool:
    return find_spec("triton") is not None


def serves(x: Tensor) -> bool:
    """Whether Triton's kernels run on the device of x [...]."""
    return x.is_cuda and is_installed()


class Launcher:
    """A kernel with a table of its compiled specializations: Triton's own lookup takes longer than many kernels run.

    The table is indexed by ``key``, which must differ wherever Triton compiles another specialization: in dtypes,
    constants, and in whether numbers and addresses are multiples of 16. ``arguments`` are all parameters in order,
    constants too.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._compiled: dict[Hashable, Compiled] = {}

    def __call__(
        self, grid: tuple[int, int, int], key: Hashable, arguments: tuple[object, ...], options: Mapping[str, object]
    ) -> None:
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


@contextmanager
def compile_only() -> Iterator[None]:
    """Inside, launchers compile what they are called with and launch nothing: results are undefined."""
    token = _requested.set(set())
    try:
        yield
    finally:
        _requested.reset(token)


@contextmanager
def compiled_in_threads(device: torch.device) -> Iterator[None]:
    """Compile in several threads inside. A launch waits for its own specialization alone."""
    if device.type == "cpu" or not is_installed():
        yield
        return
    mode = importlib.import_module("triton").AsyncCompileMode
    with ThreadPoolExecutor(min(num_threads(), MAX_COMPILERS)) as executor, mode(executor, ignore_errors=True):
        yield


@lru_cache(maxsize=1)
def has_dependent_launch() -> bool:
    """Whether a kernel may begin while the one before it still runs, and wait for it inside (Hopper and newer)."""
    return torch.cuda.get_device_capability() >= (9, 0)


@lru_cache(maxsize=32)
def options(num_warps: int, *, fuses: bool = True) -> dict[str, object]:
    """Launch options of a kernel that itself waits for the one before it.

    fuses: a sum may be computed in one instruction with a product in it, which is not rounded then: not even where the
    kernel asks for that, if the product is one of 16-bit numbers.
    """
    found: dict[str, object] = {"num_warps": num_warps, "launch_pdl": has_dependent_launch()}
    return found if fuses else found | {"enable_fp_fusion": False}


@lru_cache(maxsize=64)
def next_power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
