"""Copy keys and values from pages to packed tensors of the queries' dtype, on a GPU.

C positions, K kv heads, E head size, N pages of the pool, S page size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.triton.launcher import KernelLauncher, alignments, next_power_of_2
from aioengine.kernels.triton.scores import scales_key


@triton.jit
def _convert_kernel(
    keys: tl.tensor, values: tl.tensor, slots: tl.tensor, scales: tl.tensor, out_keys: tl.tensor, out_values: tl.tensor,
    NUM_KV: tl.constexpr, PAGE_SIZE: tl.constexpr, SIZE: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    position = tl.program_id(0).to(tl.int64)
    head, columns = tl.arange(0, HEADS)[:, None], tl.arange(0, COLUMNS)[None, :]
    inside = (head < NUM_KV) & (columns < SIZE)
    slot = tl.load(slots + position).to(tl.int64)
    source = ((slot // PAGE_SIZE * NUM_KV + head) * PAGE_SIZE + slot % PAGE_SIZE) * SIZE + columns
    key = tl.load(keys + source, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(values + source, mask=inside, other=0.0).to(tl.float32)
    if scales is not None:
        key *= tl.load(scales)
        value *= tl.load(scales + 1)
    target = (position * NUM_KV + head) * SIZE + columns
    tl.store(out_keys + target, key.to(out_keys.dtype.element_ty), mask=inside)
    tl.store(out_values + target, value.to(out_values.dtype.element_ty), mask=inside)


_convert = KernelLauncher(_convert_kernel)


def convert(
    pool: tuple[Tensor, Tensor], slots: Tensor, dtype: torch.dtype, scales: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the keys and values [C, K, E] at slots [C] of keys and values [N, K, S, E]. scales: [2], their factors."""
    _, num_kv, page_size, size = pool[0].shape
    keys, values = torch.empty(2, len(slots), num_kv, size, dtype=dtype, device=slots.device)
    sizes = num_kv, page_size, size, next_power_of_2(num_kv), next_power_of_2(size)
    key = pool[0].dtype, dtype, slots.dtype, sizes, scales_key(scales), *alignments(*pool, slots, values)
    _convert((len(slots), 1, 1), key, (*pool, slots, scales, keys, values, *sizes), {"num_warps": 4})
    return keys, values
