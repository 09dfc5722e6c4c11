"""Dequantization of MXFP4 (OCP Microscaling formats): blocks of 32 4-bit numbers with one scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*_POSITIVE, *(-value for value in _POSITIVE))
"""The value of each code: sign, two exponent bits, one mantissa bit."""
BIAS = 127  # scales are stored as biased exponents


def dequantize(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize blocks [..., G, 16] uint8 with scales [..., G] uint8 -> [..., 32 G], exact in bf16 and fp32.

    The first number of each byte is in its low bits.
    """
    values = torch.tensor(VALUES, dtype=dtype, device=blocks.device)
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    return torch.ldexp(values[codes.int()], (scales.int() - BIAS).unsqueeze(-1)).to(dtype).flatten(-2)
