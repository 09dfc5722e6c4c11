"""A decode step on a CPU needs few operator calls, and not more for more rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode

from aioengine.attention import _cpu_kernels
from tests.compute.runner_world import World, make_settings, save_model
from tests.kit.tiny_sizes import SIZES

if TYPE_CHECKING:
    from pathlib import Path

HEAD_SIZE = SIZES["hidden_size"] // SIZES["num_attention_heads"]  # type: ignore[operator]


class Calls(TorchDispatchMode):
    """Counts operator calls."""

    num_calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.num_calls += 1
        return func(*args, **(kwargs or {}))


def calls_of_decode_step(world: World, num_rows: int) -> int:
    for row in range(num_rows):
        world.submit([row, 1, 2, 3], max_new_tokens=8)
    for _ in range(4):
        world.step()
    with Calls() as calls:
        world.step()
    world.run()
    return calls.num_calls


@pytest.mark.skipif(
    _cpu_kernels.find_limits(HEAD_SIZE, torch.float32, torch.get_num_threads()) is None,
    reason="another attention is used",
)
@pytest.mark.parametrize(("family", "most"), [("llama", 50), ("qwen3", 60)])
def test_decode_step_needs_few_operator_calls(family: str, most: int, tmp_path: Path) -> None:
    calls: list[dict[int, int]] = []
    for num_layers in (2, 4):
        folder = tmp_path / str(num_layers)
        save_model(family, folder, num_hidden_layers=num_layers)
        settings = make_settings(folder)
        world = World(replace(settings, runner=replace(settings.runner, attention_backend="fused")))
        calls.append({num_rows: calls_of_decode_step(world, num_rows) for num_rows in (1, 8, 24)})
        world.runner.close()
    two, four = calls
    assert all(four[num_rows] - two[num_rows] <= 2 * most for num_rows in two)
    assert two[24] <= two[8] + 10
    assert two[1] <= 2 * most + 60
