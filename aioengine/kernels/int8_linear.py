"""Matmul of int8 weights with activations that are quantized per token: x [T, D] -> [T, O].

The products of integers are exact, so a row has the same bits for every T.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.kernels.linear import Matmul

MAX_INT8: Final = 127
MIN_ROWS_ON_GPU: Final = 17
"""cuBLAS multiplies int8 only with more than 16 rows."""


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x [T, D] per token -> values [T, D] int8 and scales [T, 1] fp32."""
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True).clamp_min(1e-10) / MAX_INT8
    return (wide / scales).round().to(torch.int8), scales


def prepare(weight: Tensor, scales: Tensor, bias: Tensor | None) -> Matmul:
    """Return a callable [T, D] -> [T, O] for weight [O, D] int8, scales [O, 1] fp32 and bias [O]."""
    transposed, output_scales = weight.t(), scales.t()

    def multiply(x: Tensor) -> Tensor:
        """[T, D] -> [T, O]."""
        values, row_scales = quantize(x)
        num_rows = x.shape[0]
        if x.is_cuda and num_rows < MIN_ROWS_ON_GPU:
            values = torch.nn.functional.pad(values, (0, 0, 0, MIN_ROWS_ON_GPU - num_rows))
        sums = torch._int_mm(values, transposed)[:num_rows]  # pyright: ignore[reportPrivateImportUsage]
        result = (sums.float() * row_scales * output_scales).to(x.dtype)
        return result if bias is None else result + bias

    return multiply
