"""Dequantize the blocks of tensors in GGUF files to fp32. The results have the same bits as ggml's.

A quantized tensor is N blocks of bytes. A block has 32 or 256 integers, and their scales. 4-bit integers are packed in
groups, two per byte: the lower bits are an integer of the first half of the group, the upper bits are an integer of the
second half. Integers with 5 or 6 bits have their upper bits in separate bytes.

``gguf.quants.dequantize`` does the same in numpy. It cannot run on a GPU, and takes 1.6 to 2 times the CPU time for
K-quants and Q8_0.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from aioengine.model_files.gguf_header import BLOCKS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def dequantized(content: Tensor, kind: str) -> Tensor:
    """Convert ``content`` [num_bytes], all blocks of a tensor, to fp32 [num_values]. kind: a type in ``BLOCKS``."""
    _, block_bytes = BLOCKS[kind]
    return _DEQUANTIZE[kind](content.view(-1, block_bytes)).reshape(-1)


def _half(blocks: Tensor, offset: int) -> Tensor:
    """Return the fp16 number at byte ``offset`` of each block [N, bytes] as fp32 [N, 1]."""
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Unpack 4-bit values: bytes [N, groups, B] -> [N, groups, 2 * B], first all lower bits, then all upper bits."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """Unpack the fifth bits of 32 integers: bytes [N, 4] -> [N, 32], each 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, :, None] >> shifts) & 1).flatten(1) << 4


def _q4_or_q5(blocks: Tensor, *, bits: int, has_minimum: bool) -> Tensor:
    """[N, bytes] -> [N, 32]: an fp16 scale, an fp16 minimum, fifth bits [N, 4], then lower bits [N, 16].

    Q4 has no fifth bits. Without a minimum, half of the range of the integers is subtracted.
    """
    first = 4 if has_minimum else 2
    integers = _nibbles(blocks[:, None, -16:]).flatten(1)
    if bits == 5:
        integers |= _fifth_bits(blocks[:, first : first + 4])
    if has_minimum:
        return _half(blocks, 0) * integers + _half(blocks, 2)
    return _half(blocks, 0) * (integers.to(torch.int8) - (1 << (bits - 1)))


def _q8_0(blocks: Tensor) -> Tensor:
    """[N, 34] -> [N, 32]: an fp16 scale, then int8 integers."""
    return _half(blocks, 0) * blocks[:, 2:].view(torch.int8)


def _q4_k(blocks: Tensor) -> Tensor:
    """[N, 144] -> [N, 8, 32]: scales and minima of 8 groups (``_scale_groups``), then 4-bit integers."""
    return _scale_groups(blocks, _nibbles(blocks[:, 16:].view(-1, 4, 32)).view(-1, 8, 32))


def _q5_k(blocks: Tensor) -> Tensor:
    """[N, 176] -> [N, 8, 32]: as Q4_K, with 32 bytes of fifth bits before the 4-bit integers.

    Bit g of byte i is the fifth bit of integer i in group g.
    """
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    upper = (blocks[:, None, 16:48] >> shifts[:, None]) & 1
    return _scale_groups(blocks, _nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32) | (upper << 4))


def _scale_groups(blocks: Tensor, values: Tensor) -> Tensor:
    """Multiply the integers [N, 8, 32] of blocks [N, bytes] by the scale of their group, and subtract its minimum.

    A block begins with an fp16 factor for all scales and an fp16 factor for all minima. The next 12 bytes have a 6-bit
    scale and a 6-bit minimum for each of 8 groups.
    """
    low, mid, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], dim=1)
    minima = torch.cat([mid & 63, (high >> 4) | (mid >> 6 << 4)], dim=1)
    scale, minimum = _half(blocks, 0) * scales, _half(blocks, 2) * minima
    return scale[:, :, None] * values - minimum[:, :, None]


def _q6_k(blocks: Tensor) -> Tensor:
    """[N, 210] -> [N, 16, 16]: 4 lower bits of each integer, then 2 upper bits; 32 is subtracted.

    16 integers share an int8 scale. The last two bytes are an fp16 factor for all scales.
    """
    lower = _nibbles(blocks[:, :128].view(-1, 2, 64))
    bits = blocks[:, 128:192].view(-1, 2, 32)
    upper = torch.cat([(bits >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1)
    values = (lower | (upper << 4)).to(torch.int8) - 32
    scale = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    return scale[:, :, None] * values.view(-1, 16, 16)


_DEQUANTIZE: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "Q4_0": partial(_q4_or_q5, bits=4, has_minimum=False),
    "Q4_1": partial(_q4_or_q5, bits=4, has_minimum=True),
    "Q5_0": partial(_q4_or_q5, bits=5, has_minimum=False),
    "Q5_1": partial(_q4_or_q5, bits=5, has_minimum=True),
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
