"""Page tables one after the other, as the kernels on a GPU read them. R rows, P pages of the longest, S page size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from aioengine.kernels.triton.heads import flatten_pages

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    Ints = npt.NDArray[np.int32]


def pinned(column: Ints) -> Tensor:
    """In memory that a GPU copies from while the host goes on: a copy from any other waits for the work before it."""
    return torch.from_numpy(column).pin_memory()


def starts_of(lengths: Ints) -> Tensor:
    """Where each of R runs begins and the last ends: [R + 1] int32 on the host."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    return pinned(starts)


def page_columns(kv_lengths: Ints, page_size: int) -> tuple[Tensor, Tensor]:
    """Where the pages of each row begin [R + 1], and how full the last one is [R]; int32 on the host."""
    num_pages = -(-kv_lengths // page_size)
    return starts_of(num_pages), pinned(kv_lengths - (num_pages - 1) * page_size)


def flat_pages(page_table: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """``starts`` [R + 1] and the page ids of [R, P] one row after the other, both on the device."""
    on_device = starts.to(page_table.device, non_blocking=True)
    indices = torch.empty(int(starts[-1]), dtype=torch.int32, device=page_table.device)
    flatten_pages(page_table, on_device, indices)
    return on_device, indices
