"""Matmul with weights of 4 or 8 bits per number (``Codes``): x [T, D] -> [T, O].

On a CPU, torch's kernels multiply 4-bit codes in groups of 32, 64, 128 or 256 inputs, and int8 numbers with a scale per
output. Both give a row the same bits for every T. Fp8 weights are converted to the dtype of x once, and other weights
for each product.

On a GPU, up to 256 rows in 16 bits use our own kernel, which converts the weight in registers. For more rows, in fp32,
for sizes that the kernel does not support, and with ``batch_invariant``, the weight is dequantized in memory first. If
an fp8 weight has a scale per output or block, the kernel computes up to 64 rows, and more bf16 rows are rounded to fp8,
with a scale per row, or per row and 128 inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch.nn import functional

from aioengine.kernels import linear
from aioengine.kernels.codes import FP8, MIDDLE, Codes, pack_nibbles
from aioengine.kernels.triton import launcher
from aioengine.model_files.quantization import FP8_BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from aioengine.kernels.linear import Matmul
    from aioengine.kernels.triton.code_linear import DeviceCodes

GROUP_SIZES: Final = (256, 128, 64, 32)
"""Group sizes of torch's kernel for 4-bit codes on a CPU."""
FEW_ROWS: Final = 64
"""On a GPU, up to this row count the inputs of fp8 weights are not rounded to fp8."""


class PreparedCodes(NamedTuple):
    """A product [T, D] -> [T, O], and a function that returns its codes."""

    matmul: Matmul
    restore: Callable[[], Codes]


def prepare(codes: Codes, bias: Tensor | None, dtype: torch.dtype, *, batch_invariant: bool = False) -> PreparedCodes:
    """Prepare the product with codes [O, D] and bias [O]. dtype: of the inputs.

    batch_invariant: on a GPU, the result for a row must not depend on the number of rows.
    """
    if launcher.serves(codes.packed):
        matmul = _OnDevice(codes, bias, batch_invariant=batch_invariant)
        return PreparedCodes(matmul, matmul.restore)
    if codes.packed.device.type != "cpu":
        return PreparedCodes(lambda x: functional.linear(x, codes.dequantized(x.dtype), bias), lambda: codes)
    if codes.packed.dtype == FP8:
        return _wide(codes, bias, dtype)
    prepared = _of_bytes(codes, dtype) or _of_nibbles(codes, dtype)
    if prepared is None:
        return PreparedCodes(_dequantizing(codes, bias, dtype), lambda: codes)
    matmul = prepared.matmul
    return prepared if bias is None else prepared._replace(matmul=lambda x: matmul(x) + bias)


def _wide(codes: Codes, bias: Tensor | None, dtype: torch.dtype) -> PreparedCodes:
    """Convert an fp8 weight [O, D] to the dtype of the inputs. bias: [O]."""
    weight = linear.pack(codes.dequantized(dtype), has_bias=bias is not None)
    sizes = codes._replace(packed=codes.packed.to("meta"))  # without the fp8 weight, whose memory is freed

    def restore() -> Codes:
        numbers = linear.unpack(weight).float() / sizes.expanded(sizes.scales)
        return Codes(numbers.to(FP8), sizes.scales)

    return PreparedCodes(linear.prepare(weight, bias), restore)


def _of_bytes(codes: Codes, dtype: torch.dtype) -> PreparedCodes | None:
    """Use torch's kernel for int8 with a scale per output, on a CPU; None: it cannot compute the product."""
    if codes.bits != 8 or codes.scales.shape[1] > 1 or codes.offsets is not None or codes.order is not None:
        return None
    if codes.shape[1] % 16:  # torch's kernel reads beyond the end of bf16 rows
        return None
    factors = codes.scales[:, 0].to(dtype)
    return PreparedCodes(lambda x: torch.ops.aten._weight_int8pack_mm(x, codes.packed, factors), lambda: codes)


def _of_nibbles(codes: Codes, dtype: torch.dtype) -> PreparedCodes | None:
    """Use torch's kernel for 4 bits on a CPU; None: it cannot compute the product."""
    outputs, inputs = codes.shape
    size = next((size for size in GROUP_SIZES if codes.group % size == 0), None)
    if codes.bits != 4 or size is None or outputs % 16 or codes.table is not None:
        return None
    order, scales = codes.order, codes.scales
    offsets = MIDDLE * scales if codes.offsets is None else codes.offsets + MIDDLE * scales
    step = codes.group // size
    parameters = torch.stack((scales, offsets), -1).repeat_interleave(step, 1)
    parameters = parameters.transpose(0, 1).contiguous().to(dtype)  # [D / size, O, 2]
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.unpacked().int(), 1)

    def matmul(x: Tensor) -> Tensor:
        """[T, D] -> [T, O]."""
        x = x.contiguous() if order is None else x[:, order]
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, size, parameters)

    def restore() -> Codes:
        """Multiply with a scale of 1 and the identity, because torch has no function that unpacks."""
        ones = torch.tensor([1.0, MIDDLE]).expand(*parameters.shape).contiguous()
        values = torch.ops.aten._weight_int4pack_mm_for_cpu(torch.eye(inputs), packed, size, ones)
        offsets = parameters[::step, :, 1].t() - MIDDLE * scales
        return Codes(pack_nibbles(values.t().round().to(torch.uint8)), scales, offsets, bits=4, order=order)

    return PreparedCodes(matmul, restore)


def _dequantizing(codes: Codes, bias: Tensor | None, dtype: torch.dtype) -> Matmul:
    """Dequantize the weight [O, D] for each product, on a CPU. bias: [O]. dtype: of the inputs."""
    counts = tuple(linear.independent_rows(*codes.shape, dtype, torch.get_num_threads())) or (1,)

    def dequantize_and_multiply(x: Tensor) -> Tensor:
        """[T, D] -> [T, O]."""
        weight = codes.dequantized(dtype)
        multiply = linear.in_pieces(lambda x: functional.linear(x, weight, bias), counts)
        return multiply(x)

    return dequantize_and_multiply


class _OnDevice:
    """The product with codes [O, D] and bias [O] on a GPU."""

    def __init__(self, codes: Codes, bias: Tensor | None, *, batch_invariant: bool) -> None:
        """bias: [O]."""
        from aioengine.kernels.triton import code_linear

        self._kernels = code_linear
        self._codes = code_linear.device_codes(codes)
        self._order = codes.order
        self._bias = bias
        self._batch_invariant = batch_invariant
        num_outputs, size = codes.shape
        num_tiles = code_linear.num_tiles(num_outputs)
        self._num_done = torch.zeros(num_tiles, dtype=torch.int32, device=codes.packed.device)
        self._fp8_scales = _scales_of_fp8(self._codes)
        self._max_rows, self._serves_vector = 0, False
        if not batch_invariant and code_linear.serves(size, codes.group, codes.bits):
            self._serves_vector = code_linear.serves_vector(self._codes)
            self._max_rows = code_linear.MAX_ROWS if self._fp8_scales is None else FEW_ROWS

    def restore(self) -> Codes:
        """Return the codes."""
        return self._codes.restored(self._order)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, O]."""
        codes, bias, num_rows = self._codes, self._bias, x.shape[0]
        if self._order is not None:
            x = x[:, self._order]
        x = x.contiguous()
        if num_rows == 1 and self._serves_vector:
            return self._kernels.vector_matmul(x, codes, bias)
        if num_rows <= self._max_rows and x.dtype != torch.float32:  # tensor cores would round fp32
            return self._kernels.matmul(x, codes, bias, self._num_done)
        if self._fp8_scales is not None and x.dtype == torch.bfloat16 and not self._batch_invariant:
            numbers, scales = self._kernels.quantize_rows(x, codes.group)
            result = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
                numbers, codes.numbers.t(), scale_a=scales.t(), scale_b=self._fp8_scales, out_dtype=x.dtype
            )[:num_rows]
            return result if bias is None else result.add_(bias)
        weight = self._kernels.dequantize(codes, x.dtype)
        if self._batch_invariant:
            return linear.prepare(weight, bias, batch_invariant=True)(x)
        return functional.linear(x, weight, bias)


def _scales_of_fp8(codes: DeviceCodes) -> Tensor | None:
    """Return the scales of outputs [1, O], or of blocks [D / 128, O / 128], as ``torch._scaled_mm`` takes them.

    None: it does not support the codes.
    """
    (num_outputs, size), scales = codes.shape, codes.scales
    if codes.numbers.dtype != FP8 or size % 16 or num_outputs % 16:
        return None
    if len(scales) == 1:
        return scales
    if codes.group != FP8_BLOCK or size % FP8_BLOCK or num_outputs % FP8_BLOCK:
        return None
    blocks = scales.unflatten(1, (-1, FP8_BLOCK))
    return blocks[..., 0].t().contiguous().t() if (blocks == blocks[..., :1]).all() else None
