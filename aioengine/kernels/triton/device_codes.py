"""Weights of few bits in the layout of the GPU kernels, and their conversion to numbers in registers.

A weight is (number - zero) * scale + offset. Its number is a 4-bit code, the entry of a table at this code, or stored
as int8 or fp8. Each output has a scale, and maybe a zero and an offset, for each group of inputs.

In 16 bits on Hopper and newer, instructions for pairs of numbers convert 4-bit codes: other conversions would take
longer than reading the codes. They compute number - zero exactly, multiply it by the scale in 16 bits, and round once.
In other cases, weights are computed in fp32 and then rounded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.codes import MIDDLE, Codes
from aioengine.kernels.triton.dependent import DEPENDENT

_EXACT = 1e-3
"""Offsets that are this near to integers times scales were such products before they were rounded."""
MAX_ZERO = tl.constexpr(64)
"""Codes minus zeros up to this one are exact in bf16."""


class DeviceCodes(NamedTuple):
    """``Codes`` in the layout of the kernels.

    Attributes:
        numbers: [O, I] int8 or fp8, or 4-bit codes [O, I / 4] int16.
        scales: [G, O] fp32, or uint8 (see ``Codes``).
        offsets: [G, O] fp32; None: 0.
        zeros: [G, O] fp32: integers that are subtracted from codes before they are scaled; None: see ``zero``.
        table: [16] fp32.
        group: inputs that share a scale.
        zero: is subtracted from all codes before they are scaled; -1: nothing is subtracted.
    """

    numbers: Tensor
    scales: Tensor
    offsets: Tensor | None
    zeros: Tensor | None
    table: Tensor | None
    bits: int
    group: int
    zero: int

    @property
    def shape(self) -> tuple[int, int]:
        """O and I."""
        return self.numbers.shape[0], self.numbers.shape[1] * (1 if self.bits == 8 else 4)

    def restored(self, order: Tensor | None = None) -> Codes:
        """Undo ``device_codes``. order: [I], see ``Codes``."""
        packed = self.numbers if self.bits == 8 else self.numbers.view(torch.uint8)
        offsets = self.offsets
        if self.zeros is not None:
            offsets = -self.zeros * self.scales
        elif self.zero > 0:
            offsets = -self.zero * self.scales
        offsets = None if offsets is None else offsets.t()
        return Codes(packed, self.scales.t(), offsets, self.bits, order, self.table)


def device_codes(codes: Codes) -> DeviceCodes:
    """Prepare codes for the kernels."""
    scales, zeros, zero = codes.scales.t().contiguous(), None, -1
    offsets = None if codes.offsets is None else codes.offsets.t().contiguous()
    if codes.bits == 4 and codes.table is None:
        exact = torch.zeros_like(scales) if offsets is None else -offsets / scales
        exact = torch.where(exact.isnan(), float(MIDDLE), exact)  # scale and offset are 0: any number is correct
        integers = exact.round()
        if (exact - integers).abs().max() < _EXACT and integers.min() >= 0 and integers.max() <= MAX_ZERO.value:
            offsets, zeros = None, integers
            if (integers == integers[0, 0]).all():
                zeros, zero = None, int(integers[0, 0])
    numbers = codes.packed if codes.bits == 8 else codes.packed.view(torch.int16)
    return DeviceCodes(numbers, scales, offsets, zeros, codes.table, codes.bits, codes.group, zero)


@triton.jit
def _as_scales(values: tl.tensor) -> tl.tensor:
    """Convert loaded scales to fp32. uint8: exponents, for the numbers of ``numbers_of``."""
    if values.dtype == tl.uint8:
        values = (values.to(tl.int32) + 126 << 23).to(tl.float32, bitcast=True)
    return values


@triton.jit
def numbers_of(codes: tl.tensor, table: tl.tensor, scales: tl.tensor) -> tl.tensor:
    """Convert 4-bit codes, or int8 or fp8 numbers, to fp32. Numbers of MXFP4 are multiplied by 2 ** -126."""
    if scales.dtype.element_ty == tl.uint8:  # sign, exponent and mantissa move to their places in fp32
        codes = codes.to(tl.int32)
        numbers = ((codes & 8) << 28 | (codes & 7) << 22).to(tl.float32, bitcast=True)
    elif table is not None:
        numbers = tl.load(table + codes.to(tl.int32))
    else:
        numbers = codes.to(tl.float32)
    return numbers


@triton.jit
def numbers_of_words(words: tl.tensor, table: tl.tensor, scales: tl.tensor, PER_WORD: tl.constexpr) -> tl.tuple:
    """Return ``numbers_of`` each code of words: of 1 code with 8 bits, or of 4 codes with 4 bits."""
    numbers = ()
    if PER_WORD == 1:
        numbers += (numbers_of(words, table, scales),)
    elif DEPENDENT and scales.dtype.element_ty == tl.uint8:
        codes = tl.inline_asm_elementwise(
            _ASM_MXFP4, "=r,=r,=r,=r,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
        for index in tl.static_range(4):
            numbers += (codes[index].to(tl.float32),)
    else:
        for index in tl.static_range(4):
            numbers += (numbers_of(words >> 4 * index & 15, table, scales),)
    return numbers


@triton.jit
def narrowed(numbers: tl.tensor, vectors: tl.tensor) -> tl.tensor:
    """Convert int8 or fp8 numbers to the dtype of ``vectors``, exactly."""
    if DEPENDENT and numbers.dtype == tl.int8 and vectors.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(_ASM_INT8, "=r,=r,r", [numbers], dtype=tl.bfloat16, is_pure=True, pack=4)
    return numbers.to(tl.float32).to(vectors.dtype)


_ASM_INT8 = tl.constexpr(
    # bytes 0 and 1, then 2 and 3: 128 + (low 7 bits), minus 128 or 256
    """{ .reg .b32 a, b;
    prmt.b32 a, $2, 0, 0x4140;
    lop3.b32 b, a, 0x007F007F, 0x43004300, 0xEA; lop3.b32 a, a, 0x00800080, 0x43004300, 0xEA; sub.bf16x2 $0, b, a;
    prmt.b32 a, $2, 0, 0x4342;
    lop3.b32 b, a, 0x007F007F, 0x43004300, 0xEA; lop3.b32 a, a, 0x00800080, 0x43004300, 0xEA; sub.bf16x2 $1, b, a; }"""
)


@triton.jit
def _load_for(numbers: tl.tensor, values: tl.tensor, places: tl.tensor, inside: tl.tensor | None) -> tl.tensor:
    """Load the scales, zeros or offsets of numbers from ``places``: one for each number, or for each group of numbers.

    Places [outputs, groups] are for numbers [outputs, groups * N] or [outputs, groups, N]. A single group is broadcast.
    """
    loaded = _as_scales(tl.load(values + places) if inside is None else tl.load(values + places, mask=inside, other=0))
    if len(numbers.shape) == 3:
        loaded = tl.expand_dims(loaded, 2)
    elif len(places.shape) == 2:
        COUNT: tl.constexpr = places.shape[1]
        if COUNT > 1 and numbers.shape[1] > COUNT:
            WIDTH: tl.constexpr = numbers.shape[1] // COUNT
            wide = tl.broadcast_to(tl.expand_dims(loaded, 2), (numbers.shape[0], COUNT, WIDTH))
            loaded = tl.reshape(wide, numbers.shape)
    return loaded


@triton.jit
def scaled(
    numbers: tl.tensor, scales: tl.tensor, offsets: tl.tensor, zeros: tl.tensor, places: tl.tensor, inside: tl.tensor,
    ZERO: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the weights of numbers. places: see ``_load_for``. inside: mask of the places; None: all. ZERO: see
    ``DeviceCodes``.
    """
    if zeros is not None:
        numbers -= _load_for(numbers, zeros, places, inside)
    elif ZERO > 0:
        numbers -= ZERO
    numbers *= _load_for(numbers, scales, places, inside)
    if offsets is not None:
        numbers += _load_for(numbers, offsets, places, inside)
    return numbers


def _weights_asm(kind: str, first: int, second: int) -> str:
    """Return the instructions that convert two words, with four zeros, scales and offsets for each.

    A 16-bit float whose high byte is 0 is its low byte times the smallest subnormal. So codes in bits 0 to 3 only need
    the factor ``first``, and codes in bits 4 to 7 the factor ``second``, to become codes times ``_STEP``.
    """
    lines = [f"{{ .reg .b32 a, b, c, d; mov.b32 c, {first:#x}; mov.b32 d, {second:#x}; shr.b32 b, $4, 8;"]
    for index in range(4):
        word, mask, factor = "$4" if index < 2 else "b", 0x00F000F0 if index % 2 else 0x000F000F, "cd"[index % 2]
        zero, scale, offset = (f"${5 + 3 * index + operand}" for operand in range(3))
        lines.append(f"and.b32 a, {word}, {mask:#x}; fma.rn.{kind}x2 a, a, {factor}, {zero};")
        lines.append(f"fma.rn.{kind}x2 ${index}, a, {scale}, {offset};")
    return " ".join([*lines, "}"])


_STEP = tl.constexpr(2.0**-9)
_ASM_BF16 = tl.constexpr(_weights_asm("bf16", 0x7D807D80, 0x7B807B80))  # 2 ** 124, 2 ** 120
_ASM_FP16 = tl.constexpr(_weights_asm("f16", 0x78007800, 0x68006800))  # 2 ** 15, 2 ** 11


def _mxfp4_asm(*, has_scales: bool) -> str:
    """Return the instructions that convert two words of MXFP4 codes to bf16, and multiply them by four scales.

    Each code is moved to the places of sign, exponent and mantissa, which divides it by 2 ** 126.
    """
    lines = ["{ .reg .b32 a, b;"]
    for index in range(4):
        shift, result = 6 - 4 * index, "b" if has_scales else f"${index}"
        lines.append(f"shl.b32 a, $4, {12 - 4 * index};")
        lines.append(f"shl.b32 b, $4, {shift};" if shift > 0 else f"shr.b32 b, $4, {-shift};")
        lines.append("and.b32 a, a, 0x80008000;")
        lines.append(f"lop3.b32 {result}, b, 0x01C001C0, a, 0xEA;")  # (b & mask) | a
        if has_scales:
            lines.append(f"mul.rn.bf16x2 ${index}, b, ${5 + index};")
    return " ".join([*lines, "}"])


_ASM_MXFP4_SCALED = tl.constexpr(_mxfp4_asm(has_scales=True))
_ASM_MXFP4 = tl.constexpr(_mxfp4_asm(has_scales=False))


@triton.jit
def weights_of(
    words: tl.tensor, codes: tl.tuple, lines: tl.tensor, start: tl.tensor,
    GROUP: tl.constexpr, ZERO: tl.constexpr, DTYPE: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Convert words [lines, N] int16 of a piece of 4-bit codes to four parts of the weights, each [lines, N].

    codes: scales, offsets, zeros, table, and the number of lines. lines: [lines, 1]. start: the first column.
    GROUP, ZERO: see ``DeviceCodes``.
    """
    scales, offsets, zeros, table, num_lines = codes
    N: tl.constexpr = words.shape[1]
    IS_REGULAR: tl.constexpr = GROUP // (4 * N) * (4 * N) == GROUP or 4 * N % GROUP == 0
    IS_MXFP4: tl.constexpr = scales.dtype.element_ty == tl.uint8
    HAS_FACTORS: tl.constexpr = DEPENDENT and table is None and not IS_MXFP4 and tl.float32 != DTYPE
    operands, weights = (words,), ()
    for index in tl.static_range(4):
        if index * N % GROUP == 0 or not IS_REGULAR:  # otherwise the group is the previous one
            columns = start + index * N
            if GROUP // N * N != GROUP:
                columns = columns + tl.arange(0, N)[None, :]
            group = lines + columns // GROUP * num_lines
        if HAS_FACTORS:
            if index * N % GROUP == 0 or not IS_REGULAR:
                scale = tl.load(scales + group)
                if offsets is not None:
                    # an integer that is subtracted from codes, and a rest that may be rounded like a scale
                    offset = tl.load(offsets + group)
                    zero = tl.minimum(tl.maximum(tl.floor(0.5 - offset / scale), 0.0), MAX_ZERO)
                    rest = (offset + zero * scale).to(DTYPE)
                else:
                    rest = tl.zeros((words.shape[0], 1), DTYPE)
                    if zeros is None:
                        zero = tl.full((words.shape[0], 1), max(ZERO, 0), tl.float32)
                    else:
                        zero = tl.load(zeros + group)
                zero, scale = (zero * -_STEP).to(DTYPE), (scale / _STEP).to(DTYPE)
            operands += (zero, scale, rest)
        elif DEPENDENT and IS_MXFP4 and tl.bfloat16 == DTYPE:
            if index * N % GROUP == 0 or not IS_REGULAR:
                scale = _as_scales(tl.load(scales + group)).to(DTYPE)
            operands += (scale,)
        else:
            numbers = numbers_of(words >> 4 * index & 15, table, scales)
            weights += (scaled(numbers, scales, offsets, zeros, group, None, ZERO).to(DTYPE),)
    if len(operands) > 1:
        ASM: tl.constexpr = _ASM_MXFP4_SCALED if IS_MXFP4 else _ASM_BF16 if tl.bfloat16 == DTYPE else _ASM_FP16
        REGISTERS: tl.constexpr = "=r,=r,=r,=r" + ",r" * len(operands)
        narrow = operands[1].dtype
        weights = tl.inline_asm_elementwise(
            ASM, REGISTERS, operands, dtype=(narrow, narrow, narrow, narrow), is_pure=True, pack=2
        )
    return weights


@triton.jit
def joined(parts: tl.tuple) -> tl.tensor:
    """Join the parts of ``weights_of``: [lines, 4 N]."""
    LINES: tl.constexpr = parts[0].shape[0]
    N: tl.constexpr = parts[0].shape[1]
    pairs = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))
    return tl.reshape(tl.permute(pairs, (0, 2, 3, 1)), (LINES, 4 * N))
