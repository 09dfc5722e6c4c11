"""KernelLauncher and compilation before the first launch, with a fake compiler."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from aioengine.kernels.state_types import SpaceWeights, StateRows
from aioengine.kernels.triton.launcher import KernelLauncher, compile_only, compiled_in_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from concurrent.futures import Executor

    from aioengine.kernels.triton.launcher import Grid


class Kernel:
    """Records launches and compilations."""

    def __init__(self) -> None:
        self.launched: list[object] = []
        self.compiled: list[object] = []

    def __getitem__(self, grid: Grid) -> Callable[..., object]:
        def launch(*arguments: object, **options: object) -> object:
            self.launched.append((grid, arguments, options))
            return {grid: lambda *arguments: self.launched.append((grid, arguments))}

        return launch

    def warmup(self, *arguments: object, grid: Grid, **options: object) -> None:
        self.compiled.append((grid, arguments, options))


def test_compile_only_requests_each_specialization_once_and_launches_nothing() -> None:
    kernel = Kernel()
    launcher, other = KernelLauncher(kernel), KernelLauncher(kernel)
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
    assert len(kernel.launched) == 2, "launched nothing, although the specialization exists"


def test_norm_of_a_misaligned_tensor_has_another_specialization(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from aioengine.kernels.triton import norms

    keys: list[Hashable] = []
    monkeypatch.setattr(KernelLauncher, "__call__", lambda _self, _grid, key, *_: keys.append(key))
    aligned, misaligned = torch.zeros(2, 3), torch.zeros(7)[1:].view(2, 3)
    weight, epsilon = torch.ones(3), torch.tensor(1e-6)
    for delta, residual in ((aligned, aligned), (misaligned, aligned), (aligned, misaligned), (None, misaligned)):
        norms.add_rms_norm(delta, residual, weight, epsilon)
    assert len(set(keys)) == 4


def test_misaligned_state_has_another_specialization(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from aioengine.kernels.triton.state_space import state_space

    keys: list[Hashable] = []
    monkeypatch.setattr(KernelLauncher, "__call__", lambda _self, _grid, key, *_: keys.append(key))
    channels, steps, ints = torch.zeros(1, 5), torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64)
    weights = SpaceWeights(log_rate=steps[0], bias=steps[0], skip=steps[0], limits=(0.0, 1.0))
    for state in (torch.zeros(2, 1, 1, 3), torch.zeros(7)[1:].view(2, 1, 1, 3)):
        state_space(channels, steps, weights, state, rows=StateRows(ints, ints, ints, None), in_blocks=False)
    assert len(set(keys)) == 2


@pytest.mark.parametrize(("device", "expected"), [("cpu", 0), ("cuda", 1)])
def test_threads_compile_on_a_gpu(device: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Executor] = []

    class Mode:
        def __init__(self, executor: Executor, *, ignore_errors: bool) -> None:
            assert ignore_errors, "errors are raised at the launch of the kernel"
            self.executor = executor

        def __enter__(self) -> None:
            entered.append(self.executor)

        def __exit__(self, *_: object) -> None:
            assert self.executor.submit(lambda: 5).result() == 5

    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(AsyncCompileMode=Mode))  # type: ignore[arg-type]
    with compiled_in_threads(torch.device(device)):
        assert len(entered) == expected
