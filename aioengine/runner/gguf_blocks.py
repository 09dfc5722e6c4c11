"""Dequantize the blocks of tensors in GGUF files to fp32, bit-identical to ggml.

N blocks of a tensor. A byte has two 4-bit values: the lower bits belong to the first half of a group, the upper bits to
the second half.

``gguf.quants.dequantize`` runs in numpy, so not on a GPU, and takes 1.6 to 2 times the CPU time for K-quants and Q8_0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from aioengine.model_files.gguf_header import BLOCKS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def dequantized(content: Tensor, kind: str) -> Tensor:
    """Convert content [X], the bytes of blocks of type ``kind``, to fp32 values [Y]."""
    _, block_bytes = BLOCKS[kind]
    return _DEQUANTIZE[kind](content.view(-1, block_bytes)).reshape(-1)


def _half(blocks: Tensor, offset: int) -> Tensor:
    """Return the fp16 value at ``offset`` of blocks [N, bytes] as fp32 [N, 1]."""
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Unpack 4-bit values: [N, groups, B] -> [N, groups, 2 * B], the lower bits of each group, then the upper bits."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _q4_0(blocks: Tensor) -> Tensor:
    """[N, 18] -> [N, 32]."""
    values = _nibbles(blocks[:, None, 2:]).flatten(1).to(torch.int8) - 8
    return _half(blocks, 0) * values


def _q4_1(blocks: Tensor) -> Tensor:
    """[N, 20] -> [N, 32]: a scale and a minimum per block."""
    return _half(blocks, 0) * _nibbles(blocks[:, None, 4:]).flatten(1) + _half(blocks, 2)


def _fifth_bits(packed: Tensor) -> Tensor:
    """Return the fifth bit of 32 values, packed [N, 4] -> [N, 32]: 16 or 0."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, :, None] >> shifts) & 1).flatten(1) << 4


def _q5_0(blocks: Tensor) -> Tensor:
    """[N, 22] -> [N, 32]."""
    values = (_nibbles(blocks[:, None, 6:]).flatten(1) | _fifth_bits(blocks[:, 2:6])).to(torch.int8) - 16
    return _half(blocks, 0) * values


def _q5_1(blocks: Tensor) -> Tensor:
    """[N, 24] -> [N, 32]."""
    values = _nibbles(blocks[:, None, 8:]).flatten(1) | _fifth_bits(blocks[:, 4:8])
    return _half(blocks, 0) * values + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    """[N, 34] -> [N, 32]."""
    return _half(blocks, 0) * blocks[:, 2:].view(torch.int8)


def _q4_k(blocks: Tensor) -> Tensor:
    """[N, 144] -> [N, 8, 32]."""
    return _scale_groups(blocks, _nibbles(blocks[:, 16:].view(-1, 4, 32)).view(-1, 8, 32))


def _q5_k(blocks: Tensor) -> Tensor:
    """[N, 176] -> [N, 8, 32]. Bit g of 32 bytes is the fifth bit of the values of group g."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    upper = (blocks[:, None, 16:48] >> shifts[:, None]) & 1
    return _scale_groups(blocks, _nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32) | (upper << 4))


def _scale_groups(blocks: Tensor, values: Tensor) -> Tensor:
    """Apply the 6-bit scale and minimum of each of 8 groups of blocks [N, bytes] to values [N, 8, 32]."""
    low, mid, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], dim=1)
    minima = torch.cat([mid & 63, (high >> 4) | (mid >> 6 << 4)], dim=1)
    scale, minimum = _half(blocks, 0) * scales, _half(blocks, 2) * minima
    return scale[:, :, None] * values - minimum[:, :, None]


def _q6_k(blocks: Tensor) -> Tensor:
    """[N, 210] -> [N, 16, 16]: 4 lower bits of each value, then 2 upper bits. 16 values share an 8-bit scale."""
    lower = _nibbles(blocks[:, :128].view(-1, 2, 64))
    bits = blocks[:, 128:192].view(-1, 2, 32)
    upper = torch.cat([(bits >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1)
    values = (lower | (upper << 4)).to(torch.int8) - 32
    scale = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    return scale[:, :, None] * values.view(-1, 16, 16)


_DEQUANTIZE: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
