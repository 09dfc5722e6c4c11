"""Matmul with weights of 4 or 8 bits per number (``Codes``): x [T, I] -> [T, O].

On a CPU, torch's kernel multiplies 4-bit codes in groups of 32, 64, 128 or 256 inputs with x in bf16: its fp32 variant
takes 16 to 100 times as long. Int8 numbers with a scale per output are multiplied as integers. Both give a row the same
bits for every T. Fp8 weights are converted to the dtype of x once, and other weights in each call, ``BLOCK_OUTPUTS``
outputs at a time.

On a GPU, by weights and number of rows:

- 8 bits in groups of a multiple of 128 inputs, up to 256 rows: the inputs become sums of two 8-bit numbers, which is
  nearly exact (``byte_linear``). Not for one row with int8 in groups, see the next line, or with fp8 and a scale per
  output, which the kernel of 16-bit weights multiplies.
- other weights, up to 256 rows (512 with 4-bit integers without offsets): the weight is converted in registers.
- more rows, inputs in fp32, other sizes, ``batch_invariant``: the weight is dequantized in memory first.
- fp8 with a scale per output or block, more than 64 rows: bf16 inputs are rounded to fp8, with a scale per row, or per
  row and 128 inputs. Fewer rows are rounded only if the number of inputs is not a multiple of 128.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor
from torch.nn import functional

from aioengine.kernels import int8_linear, linear
from aioengine.kernels.activation import activate_and_mul
from aioengine.kernels.codes import FP8, MIDDLE, Codes, copy_in_place, pack_nibbles
from aioengine.kernels.linear import PreparedMatmul
from aioengine.kernels.row_counts import in_pieces
from aioengine.kernels.triton import launcher
from aioengine.model_files.online_quantization import CPU_OUTPUTS, GROUP_SIZES
from aioengine.model_files.quantization import FP8_BLOCK

if TYPE_CHECKING:
    from aioengine.kernels.triton.device_codes import DeviceCodes

BLOCK_OUTPUTS: Final = 256
"""Outputs whose weights are dequantized at a time. They fit the cache."""


def prepare(
    codes: Codes, bias: Tensor | None, dtype: torch.dtype, *, batch_invariant: bool = False, is_shared: bool = False
) -> PreparedMatmul[Codes]:
    """Prepare the matmul with codes [O, I] and bias [O]. dtype: of the inputs.

    batch_invariant: on a GPU, the result for a row must not depend on the number of rows. is_shared: the codes stay in
    memory, so the matmul should not copy them.
    """
    if launcher.supports(codes.packed):
        matmul = _OnDevice(codes, bias, batch_invariant=batch_invariant)
        return PreparedMatmul(matmul, matmul.restore, matmul.update, matmul.gated)
    if codes.packed.dtype == FP8:
        return _prepare_fp8(codes, bias, dtype)
    is_int8 = codes.bits == 8 and codes.scales.shape[1] == 1 and codes.offsets is None and codes.order is None
    if is_int8 and int8_linear.part_bits():
        return int8_linear.prepare(codes, bias, activation_bits=16, is_shared=is_shared)
    size = next((size for size in GROUP_SIZES if codes.group % size == 0), None)
    if codes.bits == 4 and size is not None and codes.shape[0] % CPU_OUTPUTS == 0 and codes.table is None:
        return _prepare_int4(codes, bias, size)
    return _prepare_dequantizing(codes, bias, dtype)


def _prepare_fp8(codes: Codes, bias: Tensor | None, dtype: torch.dtype) -> PreparedMatmul[Codes]:
    """Convert an fp8 weight [O, I] to the dtype of the inputs once. bias: [O]. ``linear`` chooses the row counts."""
    weight = linear.pack(codes.dequantized(dtype), has_bias=bias is not None)
    sizes = codes._replace(packed=codes.packed.to("meta"))  # without the fp8 weight, whose memory is freed

    def restore() -> Codes:
        numbers = linear.unpack(weight).float() / sizes.expanded(sizes.scales)
        return Codes(numbers.nan_to_num_(0.0).to(FP8), sizes.scales)  # a scale of 0 makes all numbers 0

    return PreparedMatmul(linear.prepare(weight, bias), restore)


def _prepare_int4(codes: Codes, bias: Tensor | None, size: int) -> PreparedMatmul[Codes]:
    """Use torch's kernel for 4 bits in groups of ``size`` inputs, on a CPU. bias: [O].

    A row has the same bits for any number of rows.
    """
    order, scales = codes.order, codes.scales
    offsets = MIDDLE * scales if codes.offsets is None else codes.offsets + MIDDLE * scales
    step = codes.group // size
    parameters = torch.stack((scales, offsets), -1).repeat_interleave(step, 1)
    parameters = parameters.transpose(0, 1).bfloat16().contiguous()  # [I / size, O, 2]
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.unpacked().int(), 1)
    inputs = codes.shape[1]

    def matmul(x: Tensor) -> Tensor:
        """[T, I] -> [T, O]."""
        narrow = (x if order is None else x[:, order]).bfloat16().contiguous()
        result = torch.ops.aten._weight_int4pack_mm_for_cpu(narrow, packed, size, parameters).to(x.dtype)
        return result if bias is None else result.add_(bias)

    def restore() -> Codes:
        """Multiply with a scale of 1 and the identity, because torch has no function that unpacks."""
        ones = torch.tensor([1.0, MIDDLE]).bfloat16().expand(*parameters.shape).contiguous()
        identity = torch.eye(inputs, dtype=torch.bfloat16)
        values = torch.ops.aten._weight_int4pack_mm_for_cpu(identity, packed, size, ones)
        offsets = parameters[::step, :, 1].t() - MIDDLE * scales
        return Codes(pack_nibbles(values.t().to(torch.uint8)), scales, offsets, bits=4, order=order)

    return PreparedMatmul(matmul, restore)


def _prepare_dequantizing(codes: Codes, bias: Tensor | None, dtype: torch.dtype) -> PreparedMatmul[Codes]:
    """Dequantize the weight [O, I] in each call, on a CPU. bias: [O]. dtype: of the inputs.

    Rows are padded or split to row counts that give the same bits (``linear.independent_rows``).
    """
    num_outputs, inputs = codes.shape
    sizes = [min(BLOCK_OUTPUTS, num_outputs - first) for first in range(0, num_outputs, BLOCK_OUTPUTS)]
    biases = [None] * len(sizes) if bias is None else bias.split(sizes)
    counts = [tuple(linear.independent_rows(size, inputs, dtype, torch.get_num_threads())) or (1,) for size in sizes]
    blocks = list(zip(codes.split(sizes), biases, counts, strict=True))

    def block_outputs(x: Tensor, block: Codes, bias: Tensor | None, counts: tuple[int, ...]) -> Tensor:
        """[T, I] -> [T, outputs of the block]."""
        weight = block.dequantized(dtype)
        return in_pieces(lambda x: functional.linear(x, weight, bias), counts)(x)

    def matmul(x: Tensor) -> Tensor:
        """[T, I] -> [T, O]."""
        x = x.contiguous()
        return torch.cat([block_outputs(x, *block) for block in blocks], 1)

    return PreparedMatmul(matmul, lambda: codes)


class _OnDevice:
    """The matmul with codes [O, I] and bias [O] on a GPU."""

    def __init__(self, codes: Codes, bias: Tensor | None, *, batch_invariant: bool) -> None:
        """bias: [O]."""
        from aioengine.kernels.triton import byte_linear, code_linear
        from aioengine.kernels.triton.device_codes import device_codes

        self._kernels, self._byte_kernels = code_linear, byte_linear
        self._codes, self._device_codes = device_codes(codes), device_codes
        self._order = codes.order
        self._bias = bias
        self._batch_invariant = batch_invariant
        num_outputs, size = codes.shape
        num_tiles = code_linear.num_tiles(num_outputs)
        self._num_done = torch.zeros(num_tiles, dtype=torch.int32, device=codes.packed.device)
        self._fp8_scales = _scales_of_fp8(self._codes)
        self._max_rows, self._supports_vector = 0, False
        self._supports_bytes = not batch_invariant and byte_linear.supports(self._codes)
        if not batch_invariant and code_linear.supports(size, codes.group, codes.bits):
            self._supports_vector = code_linear.supports_vector(self._codes)
            self._max_rows = code_linear.max_rows(self._codes)

    def restore(self) -> Codes:
        """Return the codes."""
        return self._codes.restored(self._order)

    def update(self, codes: Codes, bias: Tensor | None) -> None:
        """Replace codes [O, I] and bias [O]."""
        new = self._device_codes(codes)
        old = *self._codes, self._order, self._fp8_scales, self._bias
        copy_in_place(old, (*new, codes.order, _scales_of_fp8(new), bias))

    def __call__(self, x: Tensor) -> Tensor:
        """[T, I] -> [T, O]."""
        codes, bias, num_rows = self._codes, self._bias, x.shape[0]
        x = self._ordered(x)
        if self._is_vector(x):
            return self._kernels.vector_matmul(x, codes, bias)
        if self._supports_bytes and self._byte_kernels.is_fast(codes, x):
            return self._byte_kernels.matmul(x, codes, bias, self._num_done)
        if self._fp8_scales is not None and x.dtype == torch.bfloat16 and not self._batch_invariant:
            numbers, scales = self._byte_kernels.quantize_rows(x, codes.group)
            result = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
                numbers, codes.numbers.t(), scale_a=scales.t(), scale_b=self._fp8_scales, out_dtype=x.dtype
            )[:num_rows]
            return result if bias is None else result.add_(bias)
        if num_rows <= self._max_rows and x.dtype != torch.float32:  # tensor cores would round fp32
            return self._kernels.matmul(x, codes, bias, self._num_done)
        weight = self._kernels.dequantize(codes, x.dtype)
        if self._batch_invariant:
            from aioengine.kernels.triton.invariant_linear import InvariantMatmul

            return InvariantMatmul(weight, bias, self._num_done, is_constant=False)(x)
        return functional.linear(x, weight, bias)

    def gated(self, x: Tensor) -> Tensor:
        """[T, I] -> silu(first half of the outputs) * (second half), [T, O / 2]."""
        if self._is_vector(x) and (self._bias is None or self._codes.bits == 4):
            return self._kernels.vector_matmul(self._ordered(x), self._codes, self._bias, is_gated=True)
        if self._supports_bytes and self._byte_kernels.is_fast(self._codes, x):
            return self._byte_kernels.matmul(self._ordered(x), self._codes, self._bias, self._num_done, is_gated=True)
        return activate_and_mul(self(x), "silu")

    def _is_vector(self, x: Tensor) -> bool:
        """Return whether x [T, I] has one row, and the kernel for one row supports it."""
        return self._supports_vector and len(x) == 1 and x.dtype == torch.bfloat16

    def _ordered(self, x: Tensor) -> Tensor:
        """Return x [T, I] in the order of the codes."""
        return (x if self._order is None else x[:, self._order]).contiguous()


def _scales_of_fp8(codes: DeviceCodes) -> Tensor | None:
    """Return the scales of outputs [1, O], or of blocks [I / 128, O / 128], as ``torch._scaled_mm`` takes them.

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
