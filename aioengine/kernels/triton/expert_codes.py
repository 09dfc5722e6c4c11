"""Products with the weights of experts on a GPU. The weights have 16 or 32 bits, or are ``DeviceCodes`` [E * O, D].

Codes are converted in registers. A line is a row of this matrix: an output of an expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.codes import Codes, piece_of
from aioengine.kernels.expert_types import ExpertWeights, GateFunction
from aioengine.kernels.triton.code_linear import DeviceCodes, as_scales, dequantize, device_codes, numbers_of
from aioengine.kernels.triton.dependent import DEPENDENT, start_next_and_wait
from aioengine.kernels.triton.launcher import KernelLauncher, alignments, options

LINES, WORDS = 4, 256
"""Lines of a program that dequantizes 4-bit codes, and words of 4 codes of each line."""
RUN = tl.constexpr(16)
"""8-bit columns that a thread loads at once. Groups must have a multiple of this number."""


class CodeLayout(NamedTuple):
    """The layout of ``DeviceCodes``.

    Attributes:
        part: with 4 bits, a word of 16 bits has four columns at this distance; 0: 8 bits.
        group: inputs that share a scale.
        zero: see ``DeviceCodes``.
    """

    part: int
    group: int
    num_groups: int
    zero: int


@triton.jit
def loaded(pointers: tl.tensor, inside: tl.tensor, IS_WHOLE: tl.constexpr) -> tl.tensor:
    """Load from pointers [...]; 0 outside of the mask. IS_WHOLE: the mask is true everywhere."""
    return tl.load(pointers) if IS_WHOLE else tl.load(pointers, mask=inside, other=0.0)


def _asm(*, has_scales: bool) -> str:
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


_ASM_SCALED = tl.constexpr(_asm(has_scales=True))
_ASM = tl.constexpr(_asm(has_scales=False))


@triton.jit
def _four_numbers(
    words: tl.tensor, table: tl.tensor, scales: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return ``numbers_of`` the four codes of words."""
    if DEPENDENT and scales.dtype.element_ty == tl.uint8:
        code_0, code_1, code_2, code_3 = tl.inline_asm_elementwise(
            _ASM, "=r,=r,=r,=r,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
        code_0, code_1, code_2, code_3 = (
            code_0.to(tl.float32),
            code_1.to(tl.float32),
            code_2.to(tl.float32),
            code_3.to(tl.float32),
        )
    else:
        code_0, code_1 = numbers_of(words & 15, table, scales), numbers_of(words >> 4 & 15, table, scales)
        code_2, code_3 = numbers_of(words >> 8 & 15, table, scales), numbers_of(words >> 12 & 15, table, scales)
    return code_0, code_1, code_2, code_3


@triton.jit
def _of_groups(
    values: tl.tensor, lines: tl.tensor, num_lines: tl.tensor, first: tl.tensor, COUNT: tl.constexpr,
    STEP: tl.constexpr, WIDTH: tl.constexpr, STORED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the scales, zeros or offsets of lines [outputs] for COUNT runs of WIDTH columns, STEP apart.

    The shape is [outputs, COUNT * WIDTH], or [outputs, 1] if COUNT is 1.
    """
    groups = tl.minimum((first + tl.arange(0, COUNT) * STEP) // STORED.group, STORED.num_groups - 1)
    loaded = as_scales(tl.load(values + lines[:, None] + groups[None, :].to(tl.int64) * num_lines))
    if COUNT > 1:
        wide = tl.broadcast_to(tl.expand_dims(loaded, 2), (loaded.shape[0], COUNT, WIDTH))
        loaded = tl.reshape(wide, (loaded.shape[0], COUNT * WIDTH))
    return loaded


@triton.jit
def _weights(
    codes: tl.tensor, table: tl.tensor, scales: tl.tensor, zeros: tl.tensor, offsets: tl.tensor, lines: tl.tensor,
    num_lines: tl.tensor, first: tl.tensor, COUNT: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
    STORED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the weights of codes in fp32; see ``_of_groups``."""
    result = numbers_of(codes, table, scales)
    if zeros is not None:
        result -= _of_groups(zeros, lines, num_lines, first, COUNT, STEP, WIDTH, STORED)
    elif STORED.zero > 0:
        result -= STORED.zero
    result *= _of_groups(scales, lines, num_lines, first, COUNT, STEP, WIDTH, STORED)
    if offsets is not None:
        result += _of_groups(offsets, lines, num_lines, first, COUNT, STEP, WIDTH, STORED)
    return result


@triton.jit
def _mxfp4_weights(
    words: tl.tensor, scales: tl.tensor, lines: tl.tensor, num_lines: tl.tensor, start: tl.tensor, COUNT: tl.constexpr,
    STORED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Convert words [outputs, N] int16 to the weights of their four codes, in bf16."""
    PART: tl.constexpr = STORED.part
    scale_0 = _of_groups(scales, lines, num_lines, start, COUNT, 4 * PART, PART, STORED).to(tl.bfloat16)
    scale_1, scale_2 = scale_0, scale_0
    if STORED.group % (2 * PART):
        first = start + PART
        scale_1 = _of_groups(scales, lines, num_lines, first, COUNT, 4 * PART, PART, STORED).to(tl.bfloat16)
    if STORED.group % (4 * PART):
        first = start + 2 * PART
        scale_2 = _of_groups(scales, lines, num_lines, first, COUNT, 4 * PART, PART, STORED).to(tl.bfloat16)
    scale_3 = scale_2
    if STORED.group % (2 * PART):
        first = start + 3 * PART
        scale_3 = _of_groups(scales, lines, num_lines, first, COUNT, 4 * PART, PART, STORED).to(tl.bfloat16)
    return tl.inline_asm_elementwise(
        _ASM_SCALED, "=r,=r,=r,=r,r,r,r,r,r", [words, scale_0, scale_1, scale_2, scale_3],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def add_products(
    total: tl.tensor, weight: tl.tensor, scales: tl.tensor, zeros: tl.tensor, offsets: tl.tensor, table: tl.tensor,
    lines: tl.tensor, num_lines: tl.tensor, start: tl.tensor, x_0: tl.tensor, x_1: tl.tensor, x_2: tl.tensor,
    x_3: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr, STORED: tl.constexpr, IS_WHOLE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Add the products of weight lines [outputs] with BLOCK inputs from ``start`` on to total [outputs, rows].

    x_0: the inputs [BLOCK, rows]. With 4 bits, x_0 to x_3 are the inputs [BLOCK / 4, rows] of each code of the words.
    """
    PART: tl.constexpr = 0 if STORED is None else STORED.part
    PER_WORD: tl.constexpr = 4 if PART > 0 else 1
    columns = tl.arange(0, BLOCK // PER_WORD)
    inside = start // PER_WORD + columns < SIZE // PER_WORD
    pointers = weight + lines[:, None] * (SIZE // PER_WORD) + (start // PER_WORD + columns)[None, :]
    part = loaded(pointers, inside[None, :], IS_WHOLE)
    if STORED is None:
        total = tl.dot(part, x_0, total, input_precision="ieee")
    elif PART == 0:
        COUNT: tl.constexpr = BLOCK // STORED.group if STORED.num_groups > 1 and STORED.group < BLOCK else 1
        WIDTH: tl.constexpr = BLOCK // COUNT
        part = _weights(
            part, table, scales, zeros, offsets, lines, num_lines, start, COUNT, WIDTH, WIDTH, STORED
        ).to(x_0.dtype)  # fmt: skip
        total = tl.dot(part, x_0, total, input_precision="ieee")
    else:
        COUNT: tl.constexpr = BLOCK // (4 * PART)
        IS_MXFP4: tl.constexpr = scales.dtype.element_ty == tl.uint8 and x_0.dtype == tl.bfloat16
        if IS_MXFP4 and DEPENDENT:
            weight_0, weight_1, weight_2, weight_3 = _mxfp4_weights(
                part, scales, lines, num_lines, start, COUNT, STORED
            )
            total = tl.dot(weight_0, x_0, total, input_precision="ieee")
            total = tl.dot(weight_1, x_1, total, input_precision="ieee")
            total = tl.dot(weight_2, x_2, total, input_precision="ieee")
            total = tl.dot(weight_3, x_3, total, input_precision="ieee")
        else:
            for index in tl.static_range(4):
                vectors = x_0 if index == 0 else x_1 if index == 1 else x_2 if index == 2 else x_3
                codes = _weights(
                    part >> 4 * index & 15, table, scales, zeros, offsets, lines, num_lines, start + index * PART,
                    COUNT, 4 * PART, PART, STORED,
                )  # fmt: skip
                total = tl.dot(codes.to(vectors.dtype), vectors, total, input_precision="ieee")
    return total


@triton.jit
def _vector_part(
    vector: tl.tensor, is_output: tl.tensor, start: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    STORED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load inputs from ``start`` on for each output, in fp32, in the shape of the weights in ``vector_products``."""
    if STORED is None:
        columns = start + tl.arange(0, BLOCK)[None, :] + tl.zeros((is_output.shape[0], 1), tl.int32)
        mask = is_output[:, None] & (columns < SIZE)
    else:
        WIDTH: tl.constexpr = STORED.part if STORED.part > 0 else RUN
        STEP: tl.constexpr = 4 * WIDTH if STORED.part > 0 else WIDTH
        columns = start + tl.arange(0, BLOCK // STEP)[:, None] * STEP + tl.arange(0, WIDTH)[None, :]
        columns = tl.expand_dims(columns, 0) + tl.zeros((is_output.shape[0], 1, 1), tl.int32)
        mask = columns < SIZE
    return tl.load(vector + columns, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def vector_parts(
    vector: tl.tensor, is_output: tl.tensor, start: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    STORED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Load the inputs of each code of words; the same inputs four times if weights have no words of 4 codes."""
    x_0 = _vector_part(vector, is_output, start, SIZE, BLOCK, STORED)
    x_1, x_2, x_3 = x_0, x_0, x_0
    PART: tl.constexpr = 0 if STORED is None else STORED.part
    if PART > 0:
        x_1 = _vector_part(vector + PART, is_output, start, SIZE - PART, BLOCK, STORED)
        x_2 = _vector_part(vector + 2 * PART, is_output, start, SIZE - 2 * PART, BLOCK, STORED)
        x_3 = _vector_part(vector + 3 * PART, is_output, start, SIZE - 3 * PART, BLOCK, STORED)
    return x_0, x_1, x_2, x_3


@triton.jit
def vector_zeros(OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, STORED: tl.constexpr) -> tl.tensor:
    """Return zeros in the shape of the results of ``vector_products``."""
    if STORED is None:
        zeros = tl.zeros((OUTPUTS, BLOCK), tl.float32)
    elif STORED.part > 0:
        PART: tl.constexpr = STORED.part
        zeros = tl.zeros((OUTPUTS, BLOCK // (4 * PART), PART), tl.float32)
    else:
        zeros = tl.zeros((OUTPUTS, BLOCK // RUN, RUN), tl.float32)
    return zeros


@triton.jit
def line_sums(products: tl.tensor) -> tl.tensor:
    """Sum over all dimensions but the first."""
    if len(products.shape) == 3:
        products = tl.sum(products, 2)
    return tl.sum(products, 1)


@triton.jit
def vector_products(
    weight: tl.tensor, scales: tl.tensor, zeros: tl.tensor, offsets: tl.tensor, table: tl.tensor,
    lines: tl.tensor, num_lines: tl.tensor, is_output: tl.tensor, start: tl.tensor, x_0: tl.tensor, x_1: tl.tensor,
    x_2: tl.tensor, x_3: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr, STORED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return products of weight lines [outputs] with inputs. The sums over the dimensions but the first are results.

    The shape is [outputs, BLOCK], or with codes [outputs, runs, columns of a run], see ``_of_groups``.
    """
    if STORED is None:
        columns = start + tl.arange(0, BLOCK)[None, :]
        mask = is_output[:, None] & (columns < SIZE)
        pointers = weight + lines[:, None] * SIZE + columns
        result = tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32) * x_0
    else:
        PER_WORD: tl.constexpr = 4 if STORED.part > 0 else 1
        WIDTH: tl.constexpr = STORED.part if STORED.part > 0 else RUN
        runs = tl.arange(0, BLOCK // (PER_WORD * WIDTH))
        places = tl.expand_dims(start // PER_WORD + runs[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], 0)
        mask = is_output[:, None, None] & (places < SIZE // PER_WORD)
        pointers = weight + lines[:, None, None] * (SIZE // PER_WORD) + places
        words = tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")
        lines = tl.where(is_output, lines, 0)
        result = tl.zeros(words.shape, tl.float32)
        if PER_WORD == 4:
            code_0, code_1, code_2, code_3 = _four_numbers(words, table, scales)
        else:
            code_0 = numbers_of(words, table, scales)
            code_1, code_2, code_3 = code_0, code_0, code_0
        for index in tl.static_range(PER_WORD):
            x = x_0 if index == 0 else x_1 if index == 1 else x_2 if index == 2 else x_3
            numbers = code_0 if index == 0 else code_1 if index == 1 else code_2 if index == 2 else code_3
            groups = (start + runs * (PER_WORD * WIDTH) + index * WIDTH) // STORED.group
            groups = tl.minimum(groups, STORED.num_groups - 1)
            places = lines[:, None] + groups[None, :].to(tl.int64) * num_lines
            if zeros is not None:
                numbers -= tl.expand_dims(tl.load(zeros + places), 2)
            elif STORED.zero > 0:
                numbers -= STORED.zero
            weights = numbers * tl.expand_dims(as_scales(tl.load(scales + places)), 2)
            if offsets is not None:
                weights += tl.expand_dims(tl.load(offsets + places), 2)
            result += weights * x
    return result


@triton.jit
def _dequantize_words_kernel(
    weight: tl.tensor, scales: tl.tensor, offsets: tl.tensor, zeros: tl.tensor, table: tl.tensor, out: tl.tensor,
    num_lines: tl.tensor, SIZE: tl.constexpr, STORED: tl.constexpr, LINES: tl.constexpr, WORDS: tl.constexpr,
) -> None:  # fmt: skip
    start_next_and_wait()
    PART: tl.constexpr = STORED.part
    lines = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)[:, None]
    places = tl.program_id(1) * WORDS + tl.arange(0, WORDS)[None, :]
    inside = (lines < num_lines) & (places < SIZE // 4)
    words = tl.load(weight + lines * (SIZE // 4) + places, mask=inside, other=0)
    columns = places // PART * (4 * PART) + places % PART
    code_0, code_1, code_2, code_3 = _four_numbers(words, table, scales)
    for index in tl.static_range(4):
        values = code_0 if index == 0 else code_1 if index == 1 else code_2 if index == 2 else code_3
        group = lines + ((columns + index * PART) // STORED.group).to(tl.int64) * num_lines
        if zeros is not None:
            values -= tl.load(zeros + group, mask=inside, other=0.0)
        elif STORED.zero > 0:
            values -= STORED.zero
        values *= as_scales(tl.load(scales + group, mask=inside, other=0))
        if offsets is not None:
            values += tl.load(offsets + group, mask=inside, other=0.0)
        tl.store(out + lines * SIZE + columns + index * PART, values.to(out.dtype.element_ty), mask=inside)


_dequantize_words = KernelLauncher(_dequantize_words_kernel)


def widened(codes: DeviceCodes, dtype: torch.dtype, num_experts: int) -> Tensor:
    """Dequantize codes [E * O, D] -> [E, O, D]."""
    num_lines, size = codes.shape
    if codes.bits == 8:
        return dequantize(codes, dtype).view(num_experts, -1, size)
    stored = stored_weight(codes)
    out = torch.empty((num_experts, num_lines // num_experts, size), dtype=dtype, device=codes.numbers.device)
    arguments = (*stored.arguments[:-1], out, num_lines, size, stored.how, LINES, WORDS)
    grid = -(-num_lines // LINES), -(-size // (4 * WORDS)), 1
    _dequantize_words(grid, (dtype, *stored.key), arguments, options(4))
    return out


class DeviceWeights(NamedTuple):
    """``ExpertWeights`` in the layout of the kernels."""

    gate_up: Tensor | DeviceCodes
    down: Tensor | DeviceCodes
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    gate: GateFunction
    num_experts: int


def device_weights(weights: ExpertWeights) -> DeviceWeights:
    """Prepare the weights for the kernels. Raises ValueError if they do not support the size of the groups."""
    matrices = [device_codes(part) if isinstance(part, Codes) else part for part in (weights.gate_up, weights.down)]
    for codes in (part for part in matrices if isinstance(part, DeviceCodes)):
        unit = RUN.value if codes.bits == 8 else piece_of(codes.shape[1]) // 4
        if codes.scales.shape[0] > 1 and (codes.group % unit or (codes.group % 128 and 128 % codes.group)):
            raise ValueError(f"experts with groups of {codes.group} inputs are not implemented; 32, 64 and 128 work")
    return DeviceWeights(*matrices, *weights[2:], weights.num_experts)


def restored(weights: DeviceWeights) -> ExpertWeights:
    """Undo ``device_weights``. The offsets may differ in the last bit."""
    gate_up, down, *others, _ = weights
    matrices = (part.restored() if isinstance(part, DeviceCodes) else part for part in (gate_up, down))
    return ExpertWeights(*matrices, *others)


class KernelWeight(NamedTuple):
    """A weight as arguments of kernels.

    Attributes:
        arguments: the weight, the other tensors of codes, and the number of lines.
        how: see ``CodeLayout``; None: the weight is not quantized.
        key: the facts that need other kernels.
    """

    arguments: tuple[Tensor | int | None, ...]
    how: CodeLayout | None
    key: tuple[object, ...]


def stored_weight(weight: Tensor | DeviceCodes) -> KernelWeight:
    """Return the arguments for a weight [E, O, D] or codes [E * O, D]."""
    if not isinstance(weight, DeviceCodes):
        return KernelWeight((weight, None, None, None, None, 0), None, (weight.shape, *alignments(weight)))
    num_lines, size = weight.shape
    how = CodeLayout(0 if weight.bits == 8 else piece_of(size) // 4, weight.group, weight.scales.shape[0], weight.zero)
    tensors = weight.numbers, weight.scales, weight.offsets, weight.zeros, weight.table
    key = how, weight.shape, *(None if own is None else own.dtype for own in tensors), *alignments(weight.numbers)
    return KernelWeight((*tensors, num_lines), how, key)
