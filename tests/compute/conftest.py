"""Device-side tests: torch on the CPU, with two threads on every machine unless OMP_NUM_THREADS says otherwise."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_THREADS = int(os.environ.get("OMP_NUM_THREADS", "2"))


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)
