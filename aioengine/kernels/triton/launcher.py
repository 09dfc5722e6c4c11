"""What the fast forms on a GPU share.

Triton compiles its kernels when they are first launched, without a C++ compiler; the runner launches each of them once
before it is ready. One form takes about a third of a second, of which most is not Python's: so at the start the forms
that will be needed are asked for first (``only_compiled``), and are compiled side by side (``compiled_in_threads``).
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

    class Form(Protocol):
        """What Triton compiled."""

        def __getitem__(self, grid: Grid, /) -> Callable[..., None]: ...

    class Kernel(Protocol):
        """A function that Triton can compile."""

        def __getitem__(self, grid: Grid, /) -> Callable[..., Form]: ...
        def warmup(self, *arguments: object, grid: Grid, **options: object) -> object: ...


MAX_COMPILERS = 16
"""Threads: Python's part of the work is done by one at a time."""

_asked: ContextVar[set[Hashable] | None] = ContextVar("_asked", default=None)
"""Forms that were asked for; None: kernels are launched."""


@lru_cache(maxsize=1)
def is_installed() -> bool:
    return find_spec("triton") is not None


def serves(x: Tensor) -> bool:
    """Whether Triton's kernels run on the device of x [...]."""
    return x.is_cuda and is_installed()


class Launcher:
    """A kernel with its compiled forms at hand: Triton's own search for them costs more than many a kernel runs.

    A form is found by ``key``, which must tell apart whatever Triton compiles differently: types of tensors, constants,
    and numbers and addresses that are multiples of 16 or not. ``arguments`` are all parameters in order, constants too.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._forms: dict[Hashable, Form] = {}

    def __call__(
        self, grid: tuple[int, int, int], key: Hashable, arguments: tuple[object, ...], options: Mapping[str, object]
    ) -> None:
        if (asked := _asked.get()) is not None:
            if (self, key) not in asked:
                asked.add((self, key))
                self._kernel.warmup(*arguments, grid=grid, **options)
            return
        form = self._forms.get(key)
        if form is None:
            self._forms[key] = self._kernel[grid](*arguments, **options)
        else:
            form[grid](*arguments)


@contextmanager
def only_compiled() -> Iterator[None]:
    """Launchers have compiled what they are called with, and launch nothing: their results mean nothing."""
    token = _asked.set(set())
    try:
        yield
    finally:
        _asked.reset(token)


@contextmanager
def compiled_in_threads(device: torch.device) -> Iterator[None]:
    """What is compiled inside is so side by side. Only a launch waits, and for its own form alone."""
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
def options(num_warps: int) -> dict[str, object]:
    """How to launch a kernel that waits for the one before it by itself."""
    return {"num_warps": num_warps, "launch_pdl": has_dependent_launch()}


@lru_cache(maxsize=64)
def next_power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
