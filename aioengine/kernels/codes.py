"""Weights of few bits: numbers with a scale per group. O outputs, I inputs, G groups of I / G inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from aioengine.model_files.quantization import FP8_BLOCK, WORD

PIECES: Final = (128, 64, 32)
"""4-bit codes are packed in pieces of P columns: the largest of these sizes that divides I. A piece has P / 4 words of
16 bits. Bits 4 i to 4 i + 3 of word j are the code of column i * P / 4 + j.
"""

FP8: Final = torch.float8_e4m3fn
FP8_MAX: Final = torch.finfo(FP8).max
MAX_INT8: Final = 127
MIDDLE: Final = 8
"""The 4-bit code of 0 in symmetric formats."""
EXPONENT_BIAS: Final = 127
"""Bias of scales that are stored as exponents."""


def unpack(words: Tensor, bits: int, dim: int, order: Sequence[int] = ()) -> Tensor:
    """Unpack words [..., N, ...] int32 -> codes [..., N * 32 / bits, ...] uint8 along ``dim``, low bits first.

    order: order[i] is the position of code i in each word; by default i.
    """
    shifts = torch.arange(0, WORD, bits, device=words.device, dtype=torch.int32)
    if order:
        shifts = shifts[list(order)]
    codes = words.movedim(dim, -1).unsqueeze(-1) >> shifts & (1 << bits) - 1
    return codes.to(torch.uint8).flatten(-2).movedim(-1, dim)


def pack(codes: Tensor, bits: int, dim: int, order: Sequence[int] = ()) -> Tensor:
    """Undo ``unpack``: codes [..., N * 32 / bits, ...] -> words [..., N, ...]."""
    shifts = torch.arange(0, WORD, bits, device=codes.device)
    if order:
        shifts = shifts[list(order)]
    parts = (codes.movedim(dim, -1).long() & (1 << bits) - 1).unflatten(-1, (-1, WORD // bits))
    words = (parts << shifts).sum(-1)
    return words.to(torch.int32).movedim(-1, dim)  # the conversion keeps the low 32 bits


def piece_of(size: int) -> int:
    """Return P for I = size; see ``PIECES``."""
    return next((piece for piece in PIECES if size % piece == 0), 0)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack 4-bit codes [..., I] uint8 -> [..., I / 2]; see ``PIECES``."""
    parts = codes.unflatten(-1, (-1, 4, piece_of(codes.shape[-1]) // 4))
    return torch.stack(
        (parts[..., 0, :] | parts[..., 1, :] << 4, parts[..., 2, :] | parts[..., 3, :] << 4), -1
    ).flatten(-3)


def copy_in_place(old: Sequence[object], new: Sequence[object]) -> None:
    """Copy new tensors to the addresses of old ones, which CUDA graphs contain. Other values must be equal."""
    for own, other in zip(old, new, strict=True):
        if isinstance(own, torch.Tensor) and isinstance(other, torch.Tensor):
            if own is not other:
                own.copy_(other)
        else:
            assert own == other, "the weights are stored in another way than before"


class Codes(NamedTuple):
    """A weight [O, I]: each number is multiplied by the scale of its group, and the offset of its group is added.

    Attributes:
        packed: [O, I] int8 or fp8. With 4 bits, unsigned codes [O, I / 2] uint8; see ``PIECES``.
        scales: [O, G] fp32. uint8: the number e stands for 2 ** (e - 127), and codes for the numbers of MXFP4.
        offsets: [O, G] fp32; None: 0.
        bits: 4 or 8.
        order: [I] int64, the input of each column; None: columns are in the order of the inputs.
        table: [16] fp32, the number of each 4-bit code; None: the code itself.
    """

    packed: Tensor
    scales: Tensor
    offsets: Tensor | None = None
    bits: int = 8
    order: Tensor | None = None
    table: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """O and I."""
        return self.packed.shape[0], self.packed.shape[1] * 8 // self.bits

    @property
    def group(self) -> int:
        """Columns that share a scale. Only the last group of fp8 blocks may be smaller."""
        size, num_groups = self.shape[1], self.scales.shape[1]
        return FP8_BLOCK if num_groups > 1 and self.packed.is_floating_point() else size // num_groups

    def split(self, sizes: Sequence[int]) -> list[Codes]:
        """Divide the outputs into parts of these sizes."""
        offsets = [None] * len(sizes) if self.offsets is None else self.offsets.split(sizes)
        tensors = zip(self.packed.split(sizes), self.scales.split(sizes), offsets, strict=True)
        return [self._replace(packed=packed, scales=scales, offsets=offsets) for packed, scales, offsets in tensors]

    @classmethod
    def joined(cls, parts: Sequence[Codes]) -> Codes:
        """Undo ``split``."""
        offsets = [part.offsets for part in parts if part.offsets is not None]
        return parts[0]._replace(
            packed=torch.cat([part.packed for part in parts]),
            scales=torch.cat([part.scales for part in parts]),
            offsets=torch.cat(offsets) if offsets else None,
        )

    def with_outputs(self, indices: Tensor) -> Codes:
        """Return the outputs with the ``indices`` [N] int64, in this order."""
        offsets = None if self.offsets is None else self.offsets.index_select(0, indices)
        packed, scales = self.packed.index_select(0, indices), self.scales.index_select(0, indices)
        return self._replace(packed=packed, scales=scales, offsets=offsets)

    def unpacked(self) -> Tensor:
        """Return the numbers or codes [O, I]."""
        if self.bits == 8:
            return self.packed
        low, high = self.packed.unflatten(1, (-1, piece_of(self.shape[1]) // 4, 2)).unbind(-1)
        return torch.stack((low & 15, low >> 4, high & 15, high >> 4), 2).flatten(1)

    @property
    def wide_scales(self) -> Tensor:
        """The scales [O, G] in fp32."""
        if self.scales.dtype != torch.uint8:
            return self.scales
        return torch.ldexp(torch.ones_like(self.scales, dtype=torch.float32), self.scales.int() - EXPONENT_BIAS)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [O, I], with its columns in the order of the inputs."""
        codes = self.unpacked()
        weight = codes.float() if self.table is None else self.table[codes.int()]
        weight *= self.expanded(self.wide_scales)
        if self.offsets is not None:
            weight += self.expanded(self.offsets)
        return self.in_input_order(weight.to(dtype))

    def expanded(self, groups: Tensor) -> Tensor:
        """Expand values of groups [O, G] to columns [O, I]."""
        if groups.shape[1] == 1:
            return groups
        return groups.repeat_interleave(self.group, 1)[:, : self.shape[1]]

    def in_input_order(self, columns: Tensor) -> Tensor:
        """Reorder columns [X, I] from the order of the codes to the order of the inputs."""
        return columns if self.order is None else torch.empty_like(columns).index_copy_(1, self.order, columns)
