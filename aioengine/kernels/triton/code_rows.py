"""Product of 4-bit codes with few rows on a GPU (``code_linear``): x [T, I], codes [O, I] -> [T, O]. G groups.

Tensor cores read the codes as they are in memory: converting them takes longer than reading them. A warp multiplies
pieces of 128 inputs by 16 outputs: two halves of 8.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.codes import PIECES
from aioengine.kernels.triton.dependent import DEPENDENT, wait_and_start_next
from aioengine.kernels.triton.launcher import KernelLauncher, alignments, options
from aioengine.kernels.triton.skinny_linear import activated

MAX_ROWS = 16
HALF = tl.constexpr(8)
"""Outputs of a half, and rows that an instruction multiplies."""
PIECE = tl.constexpr(PIECES[0])


def _products_asm() -> str:
    """Return the instructions of ``_products`` for 4 words of both halves, and the inputs of 4 parts.

    A number in bf16 of which only the low 8 bits are set is their value times 2 ** -133. So a code that is masked in
    place is the code times 2 ** -133 or 2 ** -129. The inputs were multiplied by 2 ** 66 or 2 ** 62.
    """
    lines = ["{ .reg .b32 a<4>, b<2>; .reg .f32 s<4>; mov.f32 s0, 0f00000000;"]
    lines += [f"mov.f32 s{index}, s0;" for index in (1, 2, 3)]
    sums = "{s0, s1, s2, s3}"
    for word, part in itertools.product(range(4), (0, 2)):
        words = [f"${4 + word}", f"${8 + word}"]
        if part == 2:
            lines += [f"shr.b32 b{index}, {words[index]}, 8;" for index in (0, 1)]
            words = ["b0", "b1"]
        for index in range(4):
            lines.append(f"and.b32 a{index}, {words[index % 2]}, {0x000F000F << 4 * (index // 2):#x};")
        inputs = f"{{${12 + 4 * part + word}, ${16 + 4 * part + word}}}"
        kind = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
        lines.append(f"{kind} {sums}, {{a0, a1, a2, a3}}, {inputs}, {sums};")
    return " ".join([*lines, *(f"mov.f32 ${index}, s{(0, 2, 1, 3)[index]};" for index in range(4)), "}"])


_PRODUCTS_ASM = tl.constexpr(_products_asm())
_PRODUCTS_REGISTERS = tl.constexpr(",".join(["=f"] * 4 + ["r"] * 24))
_TIMES = tl.constexpr("mul.bf16x2 $0, $1, $2;")
_LOAD = tl.constexpr("ld.global.nc.f32 $0, [$1];")
_UNIT = tl.constexpr(2.0**-67)


@triton.jit
def _products(first: tl.tensor, second: tl.tensor, vectors: tl.tuple) -> tuple[tl.tensor, tl.tensor]:
    """Multiply codes of both halves by inputs: words [8, N, 16] of N pieces -> [8 outputs, N, 4, 2 rows] for each half.

    A word is int32 and has 8 codes. The results times ``_UNIT`` are the products.

    Args:
        vectors: four bf16 pairs [8 rows, N, 16] int32 for each word. Pair i is for the codes at bits 4 i and 4 i + 16,
            and was multiplied by ``_widened``.

    A lane of a warp holds 4 words of each half, and 2 rows of their results. This is how tensor cores read matrices.
    """
    COUNT: tl.constexpr = first.shape[1]
    if DEPENDENT:
        results = tl.inline_asm_elementwise(
            _PRODUCTS_ASM, _PRODUCTS_REGISTERS, [first, second, vectors[0], vectors[1], vectors[2], vectors[3]],
            dtype=tl.float32, is_pure=True, pack=4,
        )  # fmt: skip
        return tl.split(tl.reshape(results, (HALF, COUNT, 4, 2, 2)))
    sums = ()
    for half in tl.static_range(2):
        words = tl.expand_dims((first, second)[half], 2)  # [8, N, 1, 16]
        total = tl.zeros((HALF, COUNT, HALF), tl.float32)
        for index in tl.static_range(4):
            pairs = tl.expand_dims(tl.permute(vectors[index], (1, 0, 2)), 0)  # [1, N, 8, 16]
            low = (pairs << 16).to(tl.float32, bitcast=True)
            high = (pairs & -65536).to(tl.float32, bitcast=True)
            total += tl.sum((words >> 4 * index & 15).to(tl.float32) * low, 3)
            total += tl.sum((words >> 4 * index + 16 & 15).to(tl.float32) * high, 3)
        sums += (tl.reshape(total * _UNIT, (HALF, COUNT, 4, 2)),)
    return sums


@triton.jit
def _widened(vectors: tl.tuple) -> tl.tuple:
    """Multiply bf16 pairs by the factors of ``_products_asm``."""
    if not DEPENDENT:
        return vectors
    results = ()
    for index in tl.static_range(4):
        factor = tl.full(vectors[0].shape, 0x5E805E80 if index % 2 else 0x60806080, tl.int32)  # 2 ** 62, 2 ** 66
        results += (
            tl.inline_asm_elementwise(_TIMES, "=r,r,r", [vectors[index], factor], tl.int32, is_pure=True, pack=1),
        )
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
    SIZE: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, TILES: tl.constexpr, COUNT: tl.constexpr,
    GATED: tl.constexpr,
) -> None:  # fmt: skip
    """A program computes two halves of outputs, which are adjacent. GATED: they are gates, and what they multiply
    (``code_linear.vector_matmul``). TILES: of 8 rows. COUNT: pieces that are multiplied at once.
    """
    PER_LINE: tl.constexpr = SIZE // PIECE
    ALL: tl.constexpr = PER_LINE % COUNT == 0
    outputs = tl.program_id(0) * (HALF if GATED else 2 * HALF) + tl.arange(0, HALF)
    distance = num_outputs // 2 if GATED else HALF
    pieces, words = tl.arange(0, COUNT)[None, :, None], tl.arange(0, 16)[None, None, :]
    lines = weight.to(tl.pointer_type(tl.int32)) + outputs[:, None, None].to(tl.int64) * (SIZE // 8)
    lines += pieces * 16 + words
    more_lines = lines + distance.to(tl.int64) * (SIZE // 8)
    vector_lines, totals, more_totals = (), (), ()
    for tile in tl.static_range(TILES):
        rows = tl.minimum(tl.arange(0, HALF) + tile * HALF, num_rows - 1)
        vector_lines += (
            x.to(tl.pointer_type(tl.int32)) + (rows[:, None, None] * (SIZE // 2) + pieces * 64 + words),
        )
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
            vectors = ()
            for index in tl.static_range(4):
                pairs = vector_lines[tile] + start * 64 + index * 16
                if ALL:
                    vectors += (tl.load(pairs),)
                else:
                    vectors += (tl.load(pairs, mask=inside, other=0),)
            vectors = _widened(vectors)
            sums, more_sums = _products(codes, more_codes, vectors)
            inputs, _ = _products(ones, ones, vectors)
            new_totals += (totals[tile] + _scaled(sums, inputs, group, scales, offsets, zeros, ZERO),)
            new_more_totals += (
                more_totals[tile] + _scaled(more_sums, inputs, group + distance, scales, offsets, zeros, ZERO),
            )
        totals, more_totals = new_totals, new_more_totals
        inside = start + COUNT + pieces < PER_LINE
        codes = tl.load(lines + (start + COUNT) * 16, mask=inside, eviction_policy="evict_first")
        more_codes = tl.load(more_lines + (start + COUNT) * 16, mask=inside, eviction_policy="evict_first")
    own = outputs[:, None]
    for tile in tl.static_range(TILES):
        result = tl.reshape(tl.sum(totals[tile], 1), (HALF, HALF)) / _UNIT
        more_result = tl.reshape(tl.sum(more_totals[tile], 1), (HALF, HALF)) / _UNIT
        rows = (tl.arange(0, HALF) + tile * HALF)[None, :]
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


def serves(num_outputs: int, group: int) -> bool:
    """Return whether ``matmul`` supports codes with these outputs and inputs per scale."""
    return num_outputs % (2 * HALF.value) == 0 and group % PIECES[0] == 0


@lru_cache(maxsize=256)
def shape_of_programs(num_outputs: int, size: int, num_rows: int) -> tuple[int, int]:
    """Return (pieces at once, warps)."""
    return 4, 4


def matmul(
    x: Tensor, words: Tensor, tensors: Sequence[Tensor | None], group: int, zero: int, *, is_gated: bool
) -> Tensor:
    """x [T, I] bf16, words [O, I / 4] int16 -> [T, O].

    For ``tensors`` (scales, offsets and zeros [G, O], bias [O]), ``group`` and ``zero`` see ``DeviceCodes``, for
    ``is_gated`` see ``code_linear.vector_matmul``.
    """
    num_outputs, (num_rows, size) = len(words), x.shape
    count, num_warps = shape_of_programs(num_outputs, size, num_rows)
    out = torch.empty((num_rows, num_outputs // 2 if is_gated else num_outputs), dtype=x.dtype, device=x.device)
    sizes = size, group, zero, -(-num_rows // HALF.value), count, is_gated
    key = (num_outputs, sizes, num_warps, *(None if own is None else own.dtype for own in tensors), *alignments(x, words))
    arguments = (x, words, *tensors, out, num_rows, num_outputs, *sizes)
    _code_rows((num_outputs // (2 * HALF.value), 1, 1), key, arguments, options(num_warps))
    return out
