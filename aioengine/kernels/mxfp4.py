"""MXFP4 (OCP Microscaling formats): blocks of 32 4-bit numbers with one scale. O outputs, G blocks of an output."""

from __future__ import annotations

import torch
from torch import Tensor

from aioengine.kernels.codes import EXPONENT_BIAS, Codes, pack_nibbles

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*_POSITIVE, *(-value for value in _POSITIVE))
"""The number of each code: sign, two exponent bits, one mantissa bit."""

SPREAD = 2.9
"""Standard deviation of the numbers of random codes."""
MAX_SCALE = 128
"""The exponent of 2.0, with its bias."""


def to_codes(blocks: Tensor, scales: Tensor) -> Codes:
    """Return the weight [O, 32 G] of blocks [O, G, 16] with scales [O, G], both uint8.

    The first number of each byte is in its low bits. Scales are exponents.

    Raises:
        ValueError: a scale is above 2, which the kernels do not support.
    """
    if (scales > MAX_SCALE).any():
        raise ValueError(f"a weight in MXFP4 has a scale of {int(scales.max())}; allowed: up to {MAX_SCALE} (2.0)")
    numbers = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)
    table = torch.tensor(VALUES, device=blocks.device)
    return Codes(pack_nibbles(numbers), scales, bits=4, table=table)


def to_blocks(codes: Codes) -> Tensor:
    """Return the blocks [O, G, 16] of ``to_codes``."""
    return _packed(codes.unpacked())


def encode(weight: Tensor, scales: Tensor) -> Tensor:
    """Return the blocks [O, G, 16] of a weight [O, 32 G] that was dequantized with ``scales`` [O, G]."""
    exponents = EXPONENT_BIAS - scales.int().unsqueeze(2)
    numbers = torch.ldexp(weight.float().unflatten(1, (-1, 32)), exponents).flatten(1)
    codes = torch.searchsorted(torch.tensor(_POSITIVE), numbers.abs()) | numbers.signbit() << 3
    return _packed(codes.to(torch.uint8))


def _packed(numbers: Tensor) -> Tensor:
    """Pack 4-bit numbers: [O, 32 G] -> [O, G, 16]."""
    even, odd = numbers.unflatten(1, (-1, 16, 2)).unbind(3)
    return even | odd << 4
