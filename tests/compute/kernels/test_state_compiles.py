"""The gated delta rule kernels compile for Hopper, with the sizes of Qwen3-Next, in bf16 and fp32."""

from __future__ import annotations

import pytest

from tests.compute.interpreted import run_compiled

PROGRAM = """
import torch

from aioengine.kernels.state_types import DeltaGates
from aioengine.kernels.state_types import StateRows
from aioengine.kernels.triton import gated_delta


ints = torch.zeros(1, dtype=torch.int64)
rows = StateRows(ints, ints, ints, torch.zeros(4, 2, dtype=torch.int32))
numbers = torch.zeros(32)
for dtype in (torch.bfloat16, torch.float32):
    scores = torch.zeros(200, 32, dtype=dtype)
    gates = DeltaGates(steps=scores, scores=scores, log_rate=numbers, bias=numbers)
    channels, out = torch.zeros(200, 8192, dtype=dtype), torch.zeros(200, 32, 128, dtype=dtype)
    gated_delta.compute_blocks(channels, gates, torch.zeros(2, 32, 128, 128), rows, out=out, key=())
"""


@pytest.mark.slow
def test_block_kernels_compile_for_hopper() -> None:
    run_compiled(PROGRAM)
