"""oneDNN's cache of compiled code for each row count is limited."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aioengine import Engine
from aioengine.kernels.linear import has_matrix_unit
from tests.compute.runner_world import save_model

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_GROWTH = 100_000_000
"""Bytes. Without AMX, oneDNN takes at most 140 MB in these tests, even with an unlimited cache, so they are skipped."""
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.skipif(not has_matrix_unit(), reason="no AMX"),
]
MANY_COUNTS = """
import sys
from pathlib import Path
from aioengine.child_process.host import limit_kernel_cache, limit_threads
limit_threads(1)
limit_kernel_cache()
import torch
from aioengine.kernels import linear

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

dtype = getattr(torch, sys.argv[1])
weights = [torch.randn(shape).to(dtype) for shape in ((64, 64), (192, 64), (64, 96), (800, 700))]
before = resident()
matmuls = [(weight.shape[1], linear.prepare(weight, None)) for weight in weights]
with torch.inference_mode():
    for num_rows in range(1, 300):
        for size, matmul in matmuls:
            matmul(torch.ones(num_rows, size, dtype=dtype))
    print(resident() - before)
    for num_rows in range(1, 300):
        torch.ones(num_rows, 2, 64, dtype=dtype) @ torch.ones(num_rows, 64, 8, dtype=dtype)
    print(resident() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_many_row_counts_take_little_memory(dtype: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MANY_COUNTS, dtype], capture_output=True, text=True, check=True, cwd=Path.cwd()
    )
    after_linear, after_batches = map(int, done.stdout.split())
    assert after_linear < 1.5 * MAX_GROWTH
    assert after_batches < 2.5 * MAX_GROWTH


@pytest.fixture
def tiny_engine(tmp_path: Path) -> Iterator[Engine]:
    save_model("qwen3", tmp_path, num_hidden_layers=1)
    with Engine(str(tmp_path), skip_tokenizer_init=True, dtype="float32", max_total_tokens=20_000) as engine:
        yield engine


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(1800)
def test_scheduler_process_does_not_grow_with_short_requests(tiny_engine: Engine) -> None:
    def resident() -> int:
        pid = next(process["pid"] for process in tiny_engine.health()["processes"] if process["role"] == "scheduler")
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def run(count: int) -> None:
        prompts = [[1 + (start * 7 + index) % 250 for index in range(1 + start % 90)] for start in range(count)]
        params = [{"max_new_tokens": 1 + start % 13, "temperature": 0} for start in range(count)]
        tiny_engine.generate(input_ids=prompts, sampling_params=params)

    run(200)
    before = resident()
    for size in range(60_000 // 1000):
        run(900 + size)
    assert resident() - before < MAX_GROWTH
