"""NaN and inf become 0 in the pages of failed rows, in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.compute.interpreted import run_interpreted

PROGRAM = """
import torch

from aioengine.kernels import clean_pages
from aioengine.kernels.triton.pages import clean

torch.manual_seed(0)
pool = torch.randn(3, 2, 9, 2, 16, 40)  # the page size is no multiple of the block size
pool[torch.rand(pool.shape) < 0.1] = torch.nan
pool[torch.rand(pool.shape) < 0.1] = -torch.inf
before, expected = pool.clone(), pool.clone()
token_ids = torch.tensor([5, -1, 0, -1])
rows = torch.tensor([[1, 0, 2], [2, 2, 1], [3, 3, 0], [0, 3, 2]], dtype=torch.int32)
page_ids = torch.tensor([4, 7, 1, 2, 3], dtype=torch.int32)
clean_pages.clean_pages(expected, token_ids, rows, page_ids)
clean(pool, token_ids, rows, page_ids)
assert torch.equal(pool.nan_to_num(nan=99.0), expected.nan_to_num(nan=99.0))
assert pool[:, :, [4, 7]].isfinite().all()
unchanged = [0, 1, 2, 3, 5, 6, 8]
assert torch.equal(pool[:, :, unchanged].nan_to_num(nan=99.0), before[:, :, unchanged].nan_to_num(nan=99.0))
"""


@pytest.mark.slow
def test_kernel_matches_torch() -> None:
    run_interpreted(PROGRAM)
