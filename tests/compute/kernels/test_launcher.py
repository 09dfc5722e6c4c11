"""Kernels of a GPU that are asked for before they are launched, with the compiler made up."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from aioengine.kernels.triton import launcher
from aioengine.kernels.triton.launcher import Launcher, compile_only, compiled_in_threads

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from aioengine.kernels.triton.launcher import Compiled, Grid


class Kernel:
    """Notes what it is asked for; ``compiled`` are its forms."""

    def __init__(self) -> None:
        self.launched: list[object] = []
        self.compiled: list[object] = []

    def __getitem__(self, grid: Grid) -> Callable[..., Compiled]:
        def launch(*arguments: object, **options: object) -> Compiled:
            self.launched.append((grid, arguments, options))
            return {grid: lambda *again: self.launched.append((grid, again))}  # type: ignore[return-value]

        return launch

    def warmup(self, *arguments: object, grid: Grid, **options: object) -> None:
        self.compiled.append((grid, arguments, options))


def test_inside_compile_only_nothing_is_launched_and_each_specialization_is_requested_once() -> None:
    kernel = Kernel()
    launcher, other = Launcher(kernel), Launcher(kernel)
    grid = 2, 1, 1
    with compile_only():
        for number in range(3):
            launcher(grid, "a", (number,), {"num_warps": 4})
        launcher(grid, "b", (7,), {})
        other(grid, "a", (8,), {})
    assert kernel.launched == []
    assert kernel.compiled == [(grid, (0,), {"num_warps": 4}), (grid, (7,), {}), (grid, (8,), {})]
    launcher(grid, "a", (1,), {"num_warps": 4})
    launcher(grid, "a", (2,), {"num_warps": 4})
    assert kernel.launched == [(grid, (1,), {"num_warps": 4}), (grid, (2,))]
    with compile_only():
        launcher(grid, "a", (3,), {})
    assert len(kernel.launched) == 2, "not even where the form is there: what it would read means nothing"


@pytest.mark.parametrize(("device", "installed", "expected"), [("cpu", True, 0), ("cuda", False, 0), ("cuda", True, 1)])
def test_threads_compile_where_there_is_a_compiler(
    device: str, installed: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[Executor] = []

    class Mode:
        def __init__(self, executor: Executor, *, ignore_errors: bool) -> None:
            assert ignore_errors, "one that nobody launches may fail; one that is launched raises there"
            self.executor = executor

        def __enter__(self) -> None:
            entered.append(self.executor)

        def __exit__(self, *_: object) -> None:
            assert self.executor.submit(lambda: 5).result() == 5

    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(AsyncCompileMode=Mode))  # type: ignore[arg-type]
    monkeypatch.setattr(launcher, "is_installed", lambda: installed)
    with compiled_in_threads(torch.device(device)):
        assert len(entered) == expected
