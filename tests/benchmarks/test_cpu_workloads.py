"""The table of ``benchmarks.cpu.workloads``, with several engines in one run."""

from __future__ import annotations

from typing import Any, cast

import pytest

from benchmarks.cpu.workloads import compare, line


class FixedPeer:
    """Takes this many seconds per call."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def generate(self, prompts: list[list[int]], num_new: int) -> float:
        return self.seconds

    def decode_rate(self, prompt: list[int], num_new: int) -> float:
        return num_new / self.seconds


@pytest.mark.parametrize(("row", "unit"), [("C1", "tok/s"), ("C2", "tok/s"), ("C4", "s")])
def test_every_engine_is_compared_with_transformers(row: str, unit: str) -> None:
    peers = {"transformers": FixedPeer(4.0), "aioengine": FixedPeer(2.0), "aioengine int8": FixedPeer(1.0)}
    result = cast("dict[str, Any]", compare(row, cast("Any", peers), 1000, repeat=1))
    assert result["unit"] == unit
    assert result["factors"] == {"transformers": 1.0, "aioengine": 2.0, "aioengine int8": 4.0}
    assert line(result, [*peers]).count(" x") == 3
