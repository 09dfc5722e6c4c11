"""Product of 4-bit codes with one row on a GPU (``code_linear``): x [1, I], codes [O, I] -> [1, O].

Tensor cores read the codes as they are in memory: converting them to fp32 takes longer than reading them.

Programs: each computes ``OUTPUTS`` outputs over all inputs, in blocks. A lane multiplies 32 neighboring columns of a
block.

Sums: the products of a lane are added by tensor cores, and scaled. A lane adds its sums of all blocks in fp32, from the
first to the last. Then the lanes are added.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.codes import PIECES
from aioengine.kernels.triton.activation import activated
from aioengine.kernels.triton.dependent import DEPENDENT, wait_and_start_next
from aioengine.kernels.triton.launcher import alignments, dtypes, kernel, next_power_of_2, options
from aioengine.kernels.triton.skinny_linear import FEW_OUTPUTS, MANY_OUTPUTS

OUTPUTS = tl.constexpr(8)
"""Outputs of a program. Their scales of a group fill a sector of memory."""


def _vector_asm() -> str:
    """Return the instructions of ``_lane_sums`` for 4 words of each of two outputs, and the inputs of 4 parts.

    If the high 8 bits of a bf16 number are 0, its value is its low 8 bits times 2 ** -133. So a code that is masked in
    place is the code times 2 ** -133 or 2 ** -129. The inputs are multiplied by 2 ** 66 or 2 ** 62 first.
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
    return " ".join([*lines, *(f"mov.f32 ${index}, s{index};" for index in range(4)), "}"])


_VECTOR_ASM = tl.constexpr(_vector_asm())
_VECTOR_REGISTERS = tl.constexpr(",".join(["=f"] * 4 + ["r"] * 24))
_TIMES = tl.constexpr("mul.bf16x2 $0, $1, $2;")
_UNIT = tl.constexpr(2.0**-67)
"""The factor of all sums until the end: 2 ** -133 * 2 ** 66, or 2 ** -129 * 2 ** 62."""


@triton.jit
def _lane_sums(first: tl.tensor, second: tl.tensor, vectors: tl.tuple) -> tuple[tl.tensor, tl.tensor]:
    """Multiply codes by inputs: [H, 4 N] words for each of two results [H, N].

    A word is int32 and has 8 codes. The sum of 4 neighboring results [h, 4 i : 4 i + 4] is the product of a piece of
    128 columns, times ``_UNIT``.

    Args:
        vectors: four bf16 pairs [1, 4 N] int32 for each word. Pair i is for the codes at bits 4 i and 4 i + 16.

    Each lane of a warp holds 4 neighboring words. For tensor cores, the words of 4 lanes are two rows of a matrix, and
    the inputs of 4 lanes are a column of another one. Only 16 of the 128 results multiply a row by its own inputs. One
    of the 4 lanes has two of them, and the others return 0.
    """
    HEIGHT: tl.constexpr = first.shape[0]
    LANES: tl.constexpr = first.shape[1] // 4
    if DEPENDENT:
        operands = (first, second)
        for index in tl.static_range(4):
            factor = tl.full(vectors[0].shape, 0x5E805E80 if index % 2 else 0x60806080, tl.int32)  # 2 ** 62, 2 ** 66
            operands += (
                tl.inline_asm_elementwise(_TIMES, "=r,r,r", [vectors[index], factor], tl.int32, is_pure=True, pack=1),
            )
        products = tl.inline_asm_elementwise(
            _VECTOR_ASM, _VECTOR_REGISTERS, operands, dtype=tl.float32, is_pure=True, pack=4
        )
        even, odd = tl.split(tl.reshape(products, (HEIGHT, LANES, 2, 2)))
        lane = tl.arange(0, LANES)[None, :, None]
        own = tl.where(lane // 4 % 2 == 0, even, odd)
        return tl.split(tl.where(lane % 4 == lane // 8 % 4, own, 0.0))
    sums = ()
    for output in tl.static_range(2):
        words = (first, second)[output]
        products = tl.zeros(words.shape, tl.float32)
        for index in tl.static_range(4):
            low = (vectors[index] << 16).to(tl.float32, bitcast=True)
            high = (vectors[index] & -65536).to(tl.float32, bitcast=True)
            products += (words >> 4 * index & 15).to(tl.float32) * low
            products += (words >> 4 * index + 16 & 15).to(tl.float32) * high
        sums += (tl.sum(tl.reshape(products, (HEIGHT, LANES, 4)), 2) * _UNIT,)
    return sums


@kernel()
def _code_vector_kernel(
    x: tl.tensor, weight: tl.tensor, scales: tl.tensor, offsets: tl.tensor, zeros: tl.tensor, bias: tl.tensor,
    out: tl.tensor, num_outputs: tl.tensor,
    SIZE: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr,
) -> None:  # fmt: skip
    """A program computes OUTPUTS outputs in two adjacent halves. GATED: the first half are gates, the second the values
    they multiply (``code_linear.vector_matmul``).

    The first codes and their scales are loaded while the previous kernel still runs.
    """
    HEIGHT: tl.constexpr = OUTPUTS // 2
    LANES: tl.constexpr = BLOCK // 32
    outputs = tl.program_id(0) * (HEIGHT if GATED else OUTPUTS) + tl.arange(0, HEIGHT)
    distance = num_outputs // 2 if GATED else HEIGHT
    places = tl.arange(0, 4 * LANES)
    pointers = weight.to(tl.pointer_type(tl.int32)) + outputs[:, None].to(tl.int64) * (SIZE // 8) + places[None, :]
    more_pointers = pointers + distance.to(tl.int64) * (SIZE // 8)
    vector_places = x.to(tl.pointer_type(tl.int32)) + places // 16 * 64 + places % 16
    columns = tl.arange(0, LANES)[:, None] * 32
    inside = places < SIZE // 8
    words = tl.load(pointers, mask=inside[None, :], eviction_policy="evict_first")
    more_words = tl.load(more_pointers, mask=inside[None, :], eviction_policy="evict_first")
    factors = _factors(scales, offsets, zeros, outputs, columns, num_outputs, SIZE, GROUP)
    more_factors = _factors(scales, offsets, zeros, outputs + distance, columns, num_outputs, SIZE, GROUP)
    wait_and_start_next()
    total = tl.zeros((HEIGHT, LANES), tl.float32)
    more_total = tl.zeros((HEIGHT, LANES), tl.float32)
    for start in tl.range(0, SIZE, BLOCK):
        inside = start // 8 + places < SIZE // 8
        vectors = ()
        for index in tl.static_range(4):
            vectors += (tl.load(vector_places + start // 2 + index * 16, mask=inside, other=0)[None, :],)
        sums, more_sums = _lane_sums(words, more_words, vectors)
        following = start + BLOCK
        inside = following // 8 + places < SIZE // 8
        words = tl.load(pointers + following // 8, mask=inside[None, :], eviction_policy="evict_first")
        more_words = tl.load(more_pointers + following // 8, mask=inside[None, :], eviction_policy="evict_first")
        ones = tl.full((1, 4 * LANES), 0x11111111, tl.int32)
        inputs, _ = _lane_sums(ones, ones, vectors)
        total += _scaled_sums(sums, inputs, factors, offsets, zeros, ZERO)
        more_total += _scaled_sums(more_sums, inputs, more_factors, offsets, zeros, ZERO)
        columns += BLOCK
        factors = _factors(scales, offsets, zeros, outputs, columns, num_outputs, SIZE, GROUP)
        more_factors = _factors(scales, offsets, zeros, outputs + distance, columns, num_outputs, SIZE, GROUP)
    result, more_result = tl.sum(total, 1) / _UNIT, tl.sum(more_total, 1) / _UNIT
    if bias is not None:
        result += tl.load(bias + outputs).to(tl.float32)
        more_result += tl.load(bias + outputs + distance).to(tl.float32)
    if GATED:
        tl.store(out + outputs, activated(result, more_result, out.dtype.element_ty))
    else:
        tl.store(out + outputs, result.to(out.dtype.element_ty))
        tl.store(out + outputs + HEIGHT, more_result.to(out.dtype.element_ty))


@triton.jit
def _factors(
    scales: tl.tensor, offsets: tl.tensor, zeros: tl.tensor, outputs: tl.tensor, columns: tl.tensor,
    num_outputs: tl.tensor,
    SIZE: tl.constexpr, GROUP: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Load the scales, zeros and offsets, if there are any, of outputs [H] and columns [N, 1], each as [H, N]."""
    group = outputs[None, :] + columns // GROUP * num_outputs  # transposed, so that lanes are columns
    inside = columns < SIZE
    factors = (tl.load(scales + group, mask=inside, other=0.0).T,)
    if zeros is not None:
        factors += (tl.load(zeros + group, mask=inside, other=0.0).T,)
    if offsets is not None:
        factors += (tl.load(offsets + group, mask=inside, other=0.0).T,)
    return factors


@triton.jit
def _scaled_sums(
    sums: tl.tensor, inputs: tl.tensor, factors: tl.tuple, offsets: tl.tensor, zeros: tl.tensor, ZERO: tl.constexpr
) -> tl.tensor:
    """Scale the products [H, N] of codes by their factors. inputs: sums of inputs [1, N]."""
    if zeros is not None:
        sums -= factors[1] * inputs
    elif ZERO > 0:
        sums -= ZERO * inputs
    sums *= factors[0]
    if offsets is not None:
        sums += factors[-1] * inputs
    return sums


def supports(num_outputs: int, group: int) -> bool:
    """Return whether ``matmul`` supports codes with these outputs and inputs per scale."""
    return num_outputs % OUTPUTS.value == 0 and group % PIECES[0] == 0


def matmul(
    x: Tensor, words: Tensor, tensors: Sequence[Tensor | None], group: int, zero: int, *, is_gated: bool
) -> Tensor:
    """x [1, I] bf16, words [O, I / 4] int16 -> [1, O].

    For ``tensors`` (scales, offsets and zeros [G, O], bias [O]), ``group`` and ``zero`` see ``DeviceCodes``, for
    ``is_gated`` see ``code_linear.vector_matmul``.
    """
    num_outputs, size = len(words), x.shape[1]
    # measured on an H200 for an 8B model; with smaller blocks, all programs of queries, keys and values run at once
    block = 2048 if FEW_OUTPUTS < num_outputs < MANY_OUTPUTS else 4096
    block = min(block, max(next_power_of_2(size), 1024))
    out = torch.empty((1, num_outputs // 2 if is_gated else num_outputs), dtype=x.dtype, device=x.device)
    sizes = size, group, zero, block, is_gated
    key = (num_outputs, sizes, *dtypes(*tensors), *alignments(x, words))
    arguments = (x, words, *tensors, out, num_outputs, *sizes)
    _code_vector_kernel((num_outputs // OUTPUTS.value, 1, 1), key, arguments, options(block // 1024))
    return out
