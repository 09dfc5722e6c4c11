"""Numbers of 4 bits in blocks of 32 with one scale (MXFP4, the OCP Microscaling formats): to bf16, fp16 or fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*_POSITIVE, *(-value for value in _POSITIVE))
"""By code: a sign, two bits of exponent, one of mantissa."""
BIAS = 127
"""Of the exponents that scales are stored as."""


def dequantize(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """blocks [..., G, 16] uint8, the first number of each byte in its low bits, scales [..., G] uint8 -> [..., 32 G].

    The results are exact in bf16 and fp32.
    """
    values = torch.tensor(VALUES, dtype=dtype, device=blocks.device)
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    numbers = values[codes.int()]
    return torch.ldexp(numbers, (scales.int() - BIAS).unsqueeze(-1)).to(dtype).flatten(-2)
