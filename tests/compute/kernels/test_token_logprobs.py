"""The logprob kernels agree with torch, in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.compute.interpreted import run_interpreted

PROGRAM = """
import torch

from aioengine.kernels import token_logprobs
from aioengine.kernels.triton.token_logprobs import measure

torch.manual_seed(0)
for width, num_top, num_requested in ((5, 5, 0), (300, 3, 70), (4097, 9, 2), (4097, 0, 0)):
    for dtype in (torch.float32, torch.bfloat16):
        logits = (4 * torch.randn(5, width + 3)).to(dtype)[:, :width]
        logits[1] = logits[1].round()
        logits[2] = 0.0
        logits[2, ::3] = -0.0
        logits[3, : width // 2] = -torch.inf
        logits[4] = -logits[4].abs() - 1.0
        token_ids = torch.randint(width // 2, width, (5,))
        requested = torch.randint(width // 2, width, (5, num_requested)) if num_requested else None
        measured = measure(logits, token_ids, num_top, requested)
        expected = token_logprobs.measure(logits, token_ids, num_top, requested)
        num_values = 1 + num_top + num_requested
        assert torch.equal(measured[:, num_values:], expected[:, num_values:])
        values, exact = (x[:, :num_values].contiguous().view(torch.float32) for x in (measured, expected))
        torch.testing.assert_close(values, exact, atol=1e-5, rtol=1e-5)
        for invalid in (torch.nan, torch.inf):
            logits[1, width // 3] = invalid
            values = measure(logits, token_ids, 0, None)[:, 0].contiguous().view(torch.float32)
            assert values.isnan().tolist() == [False, True, False, False, False]  # such requests fail
"""


@pytest.mark.slow
def test_kernels_match_torch() -> None:
    run_interpreted(PROGRAM)
