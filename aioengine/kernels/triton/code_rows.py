"""Product of 4-bit codes with few rows on a GPU (``code_linear``): x [T, I], codes [O, I] -> [T, O]. G groups.

Tensor cores read the codes as they are in memory: converting them takes longer than reading them. A warp multiplies
pieces of 128 inputs by 16 outputs: two halves of 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.codes import FP8, PIECES
from aioengine.kernels.triton.dependent import DEPENDENT, wait_and_start_next
from aioengine.kernels.triton.launcher import KernelLauncher, alignments, options
from aioengine.kernels.triton.skinny_linear import activated

MAX_ROWS = 16
HALF = tl.constexpr(8)
"""Outputs of a half, and rows that an instruction multiplies."""


def _products_asm(bits: int) -> str:
    """Return the instructions of ``_products`` for 4 words of both halves, and their inputs.

    A number in bf16 of which only the low 8 bits are set is their value times 2 ** -133. So a 4-bit code that is masked
    in place is the code times 2 ** -133 or 2 ** -129. An fp8 number whose sign, exponent and mantissa are moved to
    their places is the number times 2 ** -120. The inputs were multiplied by ``_widened``.
    """
    lines = ["{ .reg .b32 a<4>, b<4>; .reg .f32 s<4>; mov.f32 s0, 0f00000000;"]
    lines += [f"mov.f32 s{index}, s0;" for index in (1, 2, 3)]
    for word in range(4):
        words = [f"${4 + word}", f"${8 + word}"]
        if bits == 4:
            for part in (0, 2):
                if part == 2:
                    lines += [f"shr.b32 b{index}, {words[index]}, 8;" for index in (0, 1)]
                    words = ["b0", "b1"]
                for index in range(4):
                    lines.append(f"and.b32 a{index}, {words[index % 2]}, {0x000F000F << 4 * (index // 2):#x};")
                lines.append(_multiply(f"${12 + 4 * part + word}", f"${16 + 4 * part + word}"))
        else:
            for index, own in enumerate(words):
                lines.append(f"shl.b32 b0, {own}, 4; shl.b32 b1, {own}, 8; shr.b32 b2, {own}, 4;")
                lines.append("and.b32 b0, b0, 0x07F007F0; and.b32 b2, b2, 0x07F007F0;")
                lines.append(f"lop3.b32 a{index}, b1, 0x80008000, b0, 0xEA;")  # (b1 & mask) | b0: bytes 0 and 2
                lines.append(f"lop3.b32 a{index + 2}, {own}, 0x80008000, b2, 0xEA;")  # bytes 1 and 3
            pairs = f"${12 + 4 * (word // 2) + word % 2 * 2}, ${13 + 4 * (word // 2) + word % 2 * 2}"
            lines.append(f"prmt.b32 b0, {pairs}, 0x5410; prmt.b32 b1, {pairs}, 0x7632;")
            lines.append(_multiply("b0", "b1"))
    return " ".join([*lines, *(f"mov.f32 ${index}, s{(0, 2, 1, 3)[index]};" for index in range(4)), "}"])


def _multiply(first: str, second: str) -> str:
    """Return the instruction that adds products with two pairs of inputs to the sums."""
    kind, sums = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "{s0, s1, s2, s3}"
    return f"{kind} {sums}, {{a0, a1, a2, a3}}, {{{first}, {second}}}, {sums};"


_ASM_4_BITS = tl.constexpr(_products_asm(4))
_ASM_FP8 = tl.constexpr(_products_asm(8))
_REGISTERS_4_BITS = tl.constexpr(",".join(["=f"] * 4 + ["r"] * 24))
_REGISTERS_FP8 = tl.constexpr(",".join(["=f"] * 4 + ["r"] * 16))
_TIMES = tl.constexpr("mul.bf16x2 $0, $1, $2;")
_LOAD = tl.constexpr("ld.global.nc.f32 $0, [$1];")
_UNIT_4_BITS = tl.constexpr(2.0**-67)
_UNIT_FP8 = tl.constexpr(2.0**-60)


@triton.jit
def _products(first: tl.tensor, second: tl.tensor, vectors: tl.tuple) -> tuple[tl.tensor, tl.tensor]:
    """Multiply codes of both halves by inputs: words [8, N, 16] of N pieces -> [8 outputs, N, 4, 2 rows] for each half.

    A word is int32 and has 8 codes or 4 fp8 numbers. The results are products times ``_UNIT_4_BITS`` or ``_UNIT_FP8``.

    Args:
        vectors: inputs of ``_vectors``: four pairs for each word of codes, two for each word of fp8 numbers.

    A lane of a warp holds 4 words of each half, and 2 rows of their results. This is how tensor cores read matrices.
    """
    COUNT: tl.constexpr = first.shape[1]
    if DEPENDENT:
        if len(vectors) == 4:
            results = tl.inline_asm_elementwise(
                _ASM_4_BITS, _REGISTERS_4_BITS, [first, second, vectors[0], vectors[1], vectors[2], vectors[3]],
                dtype=tl.float32, is_pure=True, pack=4,
            )  # fmt: skip
        else:
            results = tl.inline_asm_elementwise(
                _ASM_FP8, _REGISTERS_FP8, [first, second, vectors[0], vectors[1]], tl.float32, is_pure=True, pack=4
            )
        return tl.split(tl.reshape(results, (HALF, COUNT, 4, 2, 2)))
    sums = ()
    for half in tl.static_range(2):
        words = tl.expand_dims((first, second)[half], 2)  # [8, N, 1, 16]
        total = tl.zeros((HALF, COUNT, HALF), tl.float32)
        for index in tl.static_range(len(vectors)):
            pairs = tl.expand_dims(tl.permute(vectors[index], (1, 0, 2)), 0)  # [1, N, 8, 16]
            low = (pairs << 16).to(tl.float32, bitcast=True)
            high = (pairs & -65536).to(tl.float32, bitcast=True)
            if len(vectors) == 4:
                total += tl.sum((words >> 4 * index & 15).to(tl.float32) * low, 3) * _UNIT_4_BITS
                total += tl.sum((words >> 4 * index + 16 & 15).to(tl.float32) * high, 3) * _UNIT_4_BITS
            else:
                total += tl.sum(_fp8_number(words >> 16 * index) * low, 3) * _UNIT_FP8
                total += tl.sum(_fp8_number(words >> 16 * index + 8) * high, 3) * _UNIT_FP8
        sums += (tl.reshape(total, (HALF, COUNT, 4, 2)),)
    return sums


@triton.jit
def _fp8_number(words: tl.tensor) -> tl.tensor:
    """Convert the last bytes of words [...] to fp32."""
    return ((words & 128) << 24 | (words & 127) << 20).to(tl.float32, bitcast=True) * 2.0**120


@triton.jit
def _vectors(lines: tl.tensor, inside: tl.tensor | None, BITS: tl.constexpr) -> tl.tuple:
    """Load bf16 pairs [8 rows, N, 16] int32 for words, and multiply them by the factors of ``_products_asm``.

    Pair i is for the codes at bits 4 i and 4 i + 16. For fp8, a lane has the 8 pairs of its 4 words.
    """
    results = ()
    for index in tl.static_range(4 if BITS == 4 else 2):
        words = tl.arange(0, 16)[None, None, :]
        if BITS == 4:
            places = index * 16 + words
        elif DEPENDENT:
            places = words // 4 * 8 + words % 4 + index * 4
        else:
            places = 2 * words + index
        pairs = tl.load(lines + places) if inside is None else tl.load(lines + places, mask=inside, other=0)
        if DEPENDENT:
            # 2 ** 60, 2 ** 62 or 2 ** 66
            factor = tl.full(pairs.shape, 0x5D805D80 if BITS == 8 else 0x5E805E80 if index % 2 else 0x60806080, tl.int32)
            pairs = tl.inline_asm_elementwise(_TIMES, "=r,r,r", [pairs, factor], tl.int32, is_pure=True, pack=1)
        results += (pairs,)
    return results


@triton.jit
def _loaded(pointers: tl.tensor) -> tl.tensor:
    """Load fp32 values [8, N, 4] for results [8 outputs, N, 4, 2 rows].

    The compiler would assign a normal load to other lanes than those that need the values.
    """
    if DEPENDENT:
        addresses = pointers.to(tl.int64)
        values = tl.inline_asm_elementwise(_LOAD, "=f,l", [addresses], tl.float32, is_pure=True, pack=1)
    else:
        values = tl.load(pointers)
    return tl.expand_dims(values, 3)


@triton.jit
def _scaled(
    sums: tl.tensor, inputs: tl.tensor, places: tl.tensor, scales: tl.tensor, offsets: tl.tensor, zeros: tl.tensor,
    ZERO: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Scale the products of codes. inputs: sums of inputs. places [8, N, 4]: of the scales."""
    if zeros is not None:
        sums -= _loaded(zeros + places) * inputs
    elif ZERO > 0:
        sums -= ZERO * inputs
    sums *= _loaded(scales + places)
    if offsets is not None:
        sums += _loaded(offsets + places) * inputs
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def _code_rows_kernel(
    x: tl.tensor, weight: tl.tensor, scales: tl.tensor, offsets: tl.tensor, zeros: tl.tensor, bias: tl.tensor,
    out: tl.tensor, num_rows: tl.tensor, num_outputs: tl.tensor,
    SIZE: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, TILES: tl.constexpr,
    COUNT: tl.constexpr, GATED: tl.constexpr,
) -> None:  # fmt: skip
    """A program computes two halves of outputs, which are adjacent. GATED: they are gates, and what they multiply
    (``code_linear.vector_matmul``). TILES: of 8 rows. COUNT: pieces of 16 words that are multiplied at once.
    """
    PIECE: tl.constexpr = 512 // BITS
    PER_LINE: tl.constexpr = SIZE // PIECE
    outputs = tl.program_id(0) * (HALF if GATED else 2 * HALF) + tl.arange(0, HALF)
    distance = num_outputs // 2 if GATED else HALF
    pieces = tl.arange(0, COUNT)[None, :, None]
    lines = weight.to(tl.pointer_type(tl.int32)) + outputs[:, None, None].to(tl.int64) * (SIZE // (32 // BITS))
    lines += pieces * 16 + tl.arange(0, 16)[None, None, :]
    more_lines = lines + distance.to(tl.int64) * (SIZE // (32 // BITS))
    vector_lines, totals, more_totals = (), (), ()
    for tile in tl.static_range(TILES):
        rows = tl.minimum(tl.arange(0, HALF) + tile * HALF, num_rows - 1)
        own = rows[:, None, None] * (SIZE // 2) + pieces * (PIECE // 2)
        vector_lines += (x.to(tl.pointer_type(tl.int32)) + own,)
        totals += (tl.zeros((HALF, COUNT, 4, 2), tl.float32),)
        more_totals += (tl.zeros((HALF, COUNT, 4, 2), tl.float32),)
    inside = pieces < PER_LINE
    codes = tl.load(lines, mask=inside, eviction_policy="evict_first")
    more_codes = tl.load(more_lines, mask=inside, eviction_policy="evict_first")
    ones = tl.full((HALF, COUNT, 16), 0x11111111, tl.int32)
    wait_and_start_next()
    for start in tl.range(0, PER_LINE, COUNT):
        group = tl.minimum(start + pieces, PER_LINE - 1) * PIECE // GROUP * num_outputs
        group = tl.broadcast_to(group + outputs[:, None, None], (HALF, COUNT, 4))
        new_totals, new_more_totals = (), ()
        for tile in tl.static_range(TILES):
            vectors = _vectors(vector_lines[tile] + start * (PIECE // 2), None if PER_LINE % COUNT == 0 else inside, BITS)
            sums, more_sums = _products(codes, more_codes, vectors)
            if BITS == 4:
                inputs, _ = _products(ones, ones, vectors)
                sums = _scaled(sums, inputs, group, scales, offsets, zeros, ZERO)
                more_sums = _scaled(more_sums, inputs, group + distance, scales, offsets, zeros, ZERO)
            elif GROUP < SIZE:
                sums *= _loaded(scales + group)
                more_sums *= _loaded(scales + group + distance)
            new_totals += (totals[tile] + sums,)
            new_more_totals += (more_totals[tile] + more_sums,)
        totals, more_totals = new_totals, new_more_totals
        inside = start + COUNT + pieces < PER_LINE
        codes = tl.load(lines + (start + COUNT) * 16, mask=inside, eviction_policy="evict_first")
        more_codes = tl.load(more_lines + (start + COUNT) * 16, mask=inside, eviction_policy="evict_first")
    own = outputs[:, None]
    UNIT: tl.constexpr = _UNIT_4_BITS if BITS == 4 else _UNIT_FP8
    for tile in tl.static_range(TILES):
        result = tl.reshape(tl.sum(totals[tile], 1), (HALF, HALF)) / UNIT
        more_result = tl.reshape(tl.sum(more_totals[tile], 1), (HALF, HALF)) / UNIT
        rows = (tl.arange(0, HALF) + tile * HALF)[None, :]
        if BITS == 8 and GROUP == SIZE:
            result *= tl.load(scales + own)
            more_result *= tl.load(scales + own + distance)
        if bias is not None:
            result += tl.load(bias + own).to(tl.float32)
            more_result += tl.load(bias + own + distance).to(tl.float32)
        if GATED:
            active = activated(result, more_result, out.dtype.element_ty)
            tl.store(out + rows * (num_outputs // 2) + own, active, mask=rows < num_rows)
        else:
            targets = out + rows * num_outputs + own
            tl.store(targets, result.to(out.dtype.element_ty), mask=rows < num_rows)
            tl.store(targets + HALF, more_result.to(out.dtype.element_ty), mask=rows < num_rows)


_code_rows = KernelLauncher(_code_rows_kernel)


def serves(num_outputs: int, size: int, group: int) -> bool:
    """Return whether ``matmul`` supports 4-bit codes or fp8 numbers of this shape, with these inputs per scale."""
    return num_outputs % (2 * HALF.value) == 0 and group % PIECES[0] == 0 and size % PIECES[0] == 0


@lru_cache(maxsize=256)
def shape_of_programs(num_outputs: int, size: int, num_rows: int) -> tuple[int, int]:
    """Return (pieces at once, warps)."""
    return 4, 4


def matmul(
    x: Tensor, numbers: Tensor, tensors: Sequence[Tensor | None], group: int, zero: int, *, is_gated: bool
) -> Tensor:
    """x [T, I] bf16, numbers [O, I / 4] int16 or [O, I] fp8 -> [T, O].

    For ``tensors`` (scales, offsets and zeros [G, O], bias [O]), ``group`` and ``zero`` see ``DeviceCodes``, for
    ``is_gated`` see ``code_linear.vector_matmul``.
    """
    num_outputs, (num_rows, size) = len(numbers), x.shape
    count, num_warps = shape_of_programs(num_outputs, size, num_rows)
    out = torch.empty((num_rows, num_outputs // 2 if is_gated else num_outputs), dtype=x.dtype, device=x.device)
    bits = 8 if numbers.dtype == FP8 else 4
    sizes = size, group, bits, zero, -(-num_rows // HALF.value), count, is_gated
    dtypes = (None if own is None else own.dtype for own in tensors)
    key = (num_outputs, sizes, num_warps, *dtypes, *alignments(x, numbers))
    arguments = (x, numbers, *tensors, out, num_rows, num_outputs, *sizes)
    _code_rows((num_outputs // (2 * HALF.value), 1, 1), key, arguments, options(num_warps))
    return out
