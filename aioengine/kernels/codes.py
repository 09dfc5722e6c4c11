"""Weights of few bits: codes with a scale and a zero point per group. O outputs, D inputs, G groups of D / G inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from aioengine.model_files.quantization import FP8_BLOCK, WORD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

PACKED_COLUMNS: Final = 32
"""4-bit codes are packed in pieces of this many columns: byte i has column i in its low bits, then column i + 16."""


def unpack(words: Tensor, bits: int, dim: int, order: Sequence[int] = ()) -> Tensor:
    """Unpack words [..., N, ...] int32 -> codes [..., N * 32 / bits, ...] uint8 along ``dim``, low bits first.

    order: order[i] is the place, in each word, of code i; by default i.
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


class Codes(NamedTuple):
    """A weight [O, D]: numbers, or codes minus zero points, times scales.

    Attributes:
        packed: [O, D] of one byte each: uint8 codes, int8 or fp8. With 4 bits, [O, D / 2] uint8; see
            ``PACKED_COLUMNS``.
        scales: [O, G] fp32.
        zeros: [O, G] int16; None for int8 and fp8.
        bits: 4 or 8.
        order: [D] int64, the input of each column; None: columns are in the order of the inputs.
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    bits: int = 8
    order: Tensor | None = None

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor, zeros: Tensor, bits: int, order: Tensor | None = None) -> Codes:
        """Pack codes [O, D] uint8."""
        if bits == 4:
            low, high = codes.unflatten(1, (-1, 2, PACKED_COLUMNS // 2)).unbind(2)
            codes = (low | high << 4).flatten(1)
        return cls(codes.contiguous(), scales.contiguous(), zeros.contiguous(), bits, order)

    @property
    def shape(self) -> tuple[int, int]:
        """O and D."""
        return self.packed.shape[0], self.packed.shape[1] * 8 // self.bits

    @property
    def group(self) -> int:
        """Columns that share a scale and a zero point. Only the last group of fp8 blocks may be smaller."""
        size, num_groups = self.shape[1], self.scales.shape[1]
        return FP8_BLOCK if size % num_groups else size // num_groups

    def unpacked(self) -> Tensor:
        """Return the numbers or codes [O, D]."""
        if self.bits == 8:
            return self.packed
        pieces = self.packed.unflatten(1, (-1, PACKED_COLUMNS // 2))
        return torch.stack((pieces & 15, pieces >> 4), 2).flatten(1)

    def rows(self, indices: Tensor) -> Codes:
        """Return the rows ``indices`` [R] int64."""
        zeros = None if self.zeros is None else self.zeros.index_select(0, indices)
        packed, scales = self.packed.index_select(0, indices), self.scales.index_select(0, indices)
        return self._replace(packed=packed, scales=scales, zeros=zeros)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [O, D], with its columns in the order of the inputs."""
        weight = self.unpacked().float()
        if self.zeros is not None:
            weight -= self.expanded(self.zeros)
        return self.in_input_order((weight * self.expanded(self.scales)).to(dtype))

    def expanded(self, groups: Tensor) -> Tensor:
        """Expand values of groups [O, G] to columns [O, D]."""
        if groups.shape[1] == 1:
            return groups
        return groups.repeat_interleave(self.group, 1)[:, : self.shape[1]]

    def in_input_order(self, columns: Tensor) -> Tensor:
        """Reorder columns [X, D] from the order of the codes to the order of the inputs."""
        return columns if self.order is None else torch.empty_like(columns).index_copy_(1, self.order, columns)
