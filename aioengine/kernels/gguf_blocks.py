"""Reads the blocks of quantized tensors in GGUF files. S numbers of a group, G groups of a block.

A quantized tensor is N blocks of bytes. A block has 32 or 256 integers in groups, and a scale for each group. Some
types also have an offset for each group. 4-bit integers are packed in pieces, two per byte: the lower bits are an
integer of the first half of the piece, the upper bits are an integer of the second half. Integers with 5 or 6 bits have
their upper bits in separate bytes.

``gguf.quants.dequantize`` gives the same numbers in numpy. It cannot run on a GPU, and takes 1.6 to 2 times the CPU
time for K-quants and Q8_0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from aioengine.model_files.gguf_header import BLOCKS

_MIDDLE: Final = {"Q4_0": 8, "Q5_0": 16}
"""This is subtracted from the integers of types without stored offsets."""


class GroupedNumbers(NamedTuple):
    """Numbers with a scale and an offset per group. The scaled numbers are exact in fp32.

    Attributes:
        numbers: [N, G, S] uint8 or int8.
        scales: [N, G] fp32.
        offsets: [N, G] fp32; None: 0.
    """

    numbers: Tensor
    scales: Tensor
    offsets: Tensor | None = None


def groups(content: Tensor, kind: str) -> GroupedNumbers:
    """Read ``content`` [num_bytes], whole blocks. kind: a type in ``BLOCKS``."""
    return _READERS[kind](content.view(-1, BLOCKS[kind][1]))


def dequantized(content: Tensor, kind: str) -> Tensor:
    """Convert ``content`` [num_bytes], all blocks of a tensor, to fp32 [num_values], with the same bits as ggml."""
    numbers, scales, offsets = groups(content, kind)
    values = scales.unsqueeze(-1) * numbers
    if offsets is not None:
        values += offsets.unsqueeze(-1)
    return values.reshape(-1)


def _half(blocks: Tensor, offset: int) -> Tensor:
    """Return the fp16 number at byte ``offset`` of each block [N, bytes] as fp32 [N, 1]."""
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Unpack 4-bit values: bytes [N, pieces, B] -> [N, pieces, 2 * B], first all lower bits, then all upper bits."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """Unpack the fifth bits of 32 integers: bytes [N, 4] -> [N, 32], each 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, :, None] >> shifts) & 1).flatten(1) << 4


def _of_32(kind: str) -> Callable[[Tensor], GroupedNumbers]:
    """Return the reader of Q4_0, Q4_1, Q5_0 and Q5_1.

    [N, bytes] is an fp16 scale, an fp16 offset, fifth bits [N, 4], then lower bits [N, 16]. Q4 has no fifth bits. Types
    with 0 have no offset: half of the range of the integers is subtracted.
    """

    def read(blocks: Tensor) -> GroupedNumbers:
        """[N, bytes] -> one group of 32 per block."""
        integers, scales = _nibbles(blocks[:, None, -16:]), _half(blocks, 0)
        if kind.startswith("Q5"):
            integers |= _fifth_bits(blocks[:, -20:-16]).unsqueeze(1)
        return GroupedNumbers(integers, scales, -_MIDDLE[kind] * scales if kind in _MIDDLE else _half(blocks, 2))

    return read


def _q8_0(blocks: Tensor) -> GroupedNumbers:
    """[N, 34], an fp16 scale, then int8 integers -> one group of 32 per block."""
    return GroupedNumbers(blocks[:, None, 2:].view(torch.int8), _half(blocks, 0))


def _q4_k(blocks: Tensor) -> GroupedNumbers:
    """[N, 144], scales and minima (``_scaled``), then 4-bit integers -> 8 groups of 32 per block."""
    return _scaled(blocks, _nibbles(blocks[:, 16:].view(-1, 4, 32)).view(-1, 8, 32))


def _q5_k(blocks: Tensor) -> GroupedNumbers:
    """[N, 176] -> 8 groups of 32 per block: as Q4_K, with 32 bytes of fifth bits before the 4-bit integers.

    Bit g of byte i is the fifth bit of integer i in group g.
    """
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    upper = (blocks[:, None, 16:48] >> shifts[:, None]) & 1
    return _scaled(blocks, _nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32) | (upper << 4))


def _scaled(blocks: Tensor, integers: Tensor) -> GroupedNumbers:
    """Add the scales and minima of blocks [N, bytes] to their integers [N, 8, 32]. Minima are subtracted.

    A block begins with an fp16 factor for all scales and an fp16 factor for all minima. The next 12 bytes have a 6-bit
    scale and a 6-bit minimum for each of 8 groups.
    """
    low, mid, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], dim=1)
    minima = torch.cat([mid & 63, (high >> 4) | (mid >> 6 << 4)], dim=1)
    return GroupedNumbers(integers, _half(blocks, 0) * scales, -_half(blocks, 2) * minima)


def _q6_k(blocks: Tensor) -> GroupedNumbers:
    """[N, 210] -> 16 groups of 16 per block: 4 lower bits of each integer, then 2 upper bits; 32 is subtracted.

    Each group has an int8 scale. The last two bytes are an fp16 factor for all scales.
    """
    lower = _nibbles(blocks[:, :128].view(-1, 2, 64))
    bits = blocks[:, 128:192].view(-1, 2, 32)
    upper = torch.cat([(bits >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1)
    integers = (lower | (upper << 4)).to(torch.int8) - 32
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    return GroupedNumbers(integers.view(-1, 16, 16), scales)


_READERS: Final[dict[str, Callable[[Tensor], GroupedNumbers]]] = {
    **{kind: _of_32(kind) for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1")},
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
