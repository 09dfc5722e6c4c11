"""Device-side tests: torch on the CPU, with the same number of threads on every machine.

Tests of models have one thread, because a second one costs a quarter of the CPU time with tiny tensors. All other
tests, and the tests of independent rows, have two. OMP_NUM_THREADS changes both numbers.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

from aioengine.kernels.vector_functions import prepare_vector_functions

if TYPE_CHECKING:
    from collections.abc import Iterator

prepare_vector_functions()


@pytest.fixture(autouse=True)
def few_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    has_one = request.path.parent.name == "models" and request.path.stem != "test_independence"
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1 if has_one else 2)))
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)
