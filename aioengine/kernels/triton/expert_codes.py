"""Products with the weights of experts on a GPU. The weights have 16 or 32 bits, or are ``DeviceCodes`` [E * O, I].

``add_products`` multiplies a block of lines by a block of several vectors, with tensor cores. ``vector_products``
multiplies lines by one vector, in fp32. Codes are converted in registers. A line is an output of an expert.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.codes import Codes, piece_of
from aioengine.kernels.expert_types import ExpertWeights, GateFunction
from aioengine.kernels.triton.device_codes import (
    DeviceCodes,
    device_codes,
    joined,
    numbers_of,
    numbers_of_words,
    scaled,
    weights_of,
)
from aioengine.kernels.triton.invariant_linear import loaded
from aioengine.kernels.triton.launcher import alignments, dtypes

RUN = 16
"""8-bit columns that a thread loads at once. Groups must have a multiple of this number."""


class CodeLayout(NamedTuple):
    """The layout of ``DeviceCodes``.

    Attributes:
        per_word: columns of a word: 4, with 4 bits, or 1.
        width: adjacent words that a thread loads at once. With 4 bits, the columns of a word are at this distance.
        group: inputs that share a scale.
        zero: see ``DeviceCodes``.
    """

    per_word: int
    width: int
    group: int
    num_groups: int
    zero: int


@triton.jit
def _places(
    lines: tl.tensor, num_lines: tl.tensor, first: tl.tensor, COUNT: tl.constexpr, STEP: tl.constexpr,
    LAYOUT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the places of the scales of lines [outputs] for COUNT runs of columns, STEP apart: [outputs, COUNT]."""
    groups = tl.minimum((first + tl.arange(0, COUNT) * STEP) // LAYOUT.group, LAYOUT.num_groups - 1)
    return lines[:, None] + groups[None, :].to(tl.int64) * num_lines


@triton.jit
def add_products(
    total: tl.tensor, weight: tl.tensor, codes: tl.tuple, lines: tl.tensor, start: tl.tensor, vectors: tl.tensor,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, LAYOUT: tl.constexpr, IS_WHOLE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Add the products of lines [outputs] with vectors [BLOCK, rows], a block of x, to total [outputs, rows].

    codes: see ``weights_of``. start: the first input. 4-bit codes: the block is a piece.
    """
    PER_WORD: tl.constexpr = 1 if LAYOUT is None else LAYOUT.per_word
    columns = start // PER_WORD + tl.arange(0, BLOCK // PER_WORD)
    pointers = weight + lines[:, None] * (SIZE // PER_WORD) + columns[None, :]
    weights = loaded(pointers, (columns < SIZE // PER_WORD)[None, :], IS_WHOLE)
    if LAYOUT is not None:
        scales, offsets, zeros, table, num_lines = codes
        if PER_WORD == 4:
            weights = weights_of(weights, codes, lines[:, None], start, LAYOUT.group, LAYOUT.zero, vectors.dtype)
            weights = joined(weights)
        else:
            RUNS: tl.constexpr = BLOCK // LAYOUT.group
            COUNT: tl.constexpr = RUNS if LAYOUT.num_groups > 1 and RUNS > 1 else 1
            places = _places(lines, num_lines, start, COUNT, BLOCK // COUNT, LAYOUT)
            numbers = numbers_of(weights, table, scales)
            weights = scaled(numbers, scales, offsets, zeros, places, None, LAYOUT.zero).to(vectors.dtype)
    return tl.dot(weights, vectors, total, input_precision="ieee")


@triton.jit
def vector_parts(
    vector: tl.tensor, is_output: tl.tensor, start: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Load inputs from ``start`` on in fp32 for each column of words, in the shape of the weights in
    ``vector_products``, and repeated for each output.
    """
    parts = ()
    if LAYOUT is None:
        columns = start + tl.arange(0, BLOCK)[None, :] + tl.zeros((is_output.shape[0], 1), tl.int32)
        mask = is_output[:, None] & (columns < SIZE)
        parts += (tl.load(vector + columns, mask=mask, other=0.0).to(tl.float32),)
    else:
        WIDTH: tl.constexpr = LAYOUT.width
        PER_WORD: tl.constexpr = LAYOUT.per_word
        STEP: tl.constexpr = PER_WORD * WIDTH
        columns = start + tl.arange(0, BLOCK // STEP)[:, None] * STEP + tl.arange(0, WIDTH)[None, :]
        columns = tl.expand_dims(columns, 0) + tl.zeros((is_output.shape[0], 1, 1), tl.int32)
        for index in tl.static_range(PER_WORD):
            own = tl.load(vector + index * WIDTH + columns, mask=columns < SIZE - index * WIDTH, other=0.0)
            parts += (own.to(tl.float32),)
    return parts


@triton.jit
def vector_zeros(OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, LAYOUT: tl.constexpr) -> tl.tensor:
    """Return zeros in the shape of the results of ``vector_products``."""
    if LAYOUT is None:
        zeros = tl.zeros((OUTPUTS, BLOCK), tl.float32)
    else:
        WIDTH: tl.constexpr = LAYOUT.width
        zeros = tl.zeros((OUTPUTS, BLOCK // (LAYOUT.per_word * WIDTH), WIDTH), tl.float32)
    return zeros


@triton.jit
def line_sums(products: tl.tensor) -> tl.tensor:
    """Sum over all dimensions but the first."""
    if len(products.shape) == 3:
        products = tl.sum(products, 2)
    return tl.sum(products, 1)


@triton.jit
def vector_products(
    weight: tl.tensor, codes: tl.tuple, lines: tl.tensor, is_output: tl.tensor, start: tl.tensor, vectors: tl.tuple,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, LAYOUT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return products of lines [outputs] with ``vector_parts``. The sums over the dimensions but the first are results.

    The shape is [outputs, BLOCK], or with codes [outputs, runs, words of a run]. codes: see ``weights_of``.
    """
    scales, offsets, zeros, table, num_lines = codes
    if LAYOUT is None:
        columns = start + tl.arange(0, BLOCK)[None, :]
        mask = is_output[:, None] & (columns < SIZE)
        pointers = weight + lines[:, None] * SIZE + columns
        result = tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32) * vectors[0]
    else:
        PER_WORD: tl.constexpr = LAYOUT.per_word
        WIDTH: tl.constexpr = LAYOUT.width
        COUNT: tl.constexpr = BLOCK // (PER_WORD * WIDTH)
        runs = tl.arange(0, COUNT)[:, None] * WIDTH
        places = tl.expand_dims(start // PER_WORD + runs + tl.arange(0, WIDTH)[None, :], 0)
        mask = is_output[:, None, None] & (places < SIZE // PER_WORD)
        pointers = weight + lines[:, None, None] * (SIZE // PER_WORD) + places
        words = tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")
        lines = tl.where(is_output, lines, 0)
        result = tl.zeros(words.shape, tl.float32)
        numbers = numbers_of_words(words, table, scales, PER_WORD)
        for index in tl.static_range(PER_WORD):
            own = _places(lines, num_lines, start + index * WIDTH, COUNT, PER_WORD * WIDTH, LAYOUT)
            result += scaled(numbers[index], scales, offsets, zeros, own, None, LAYOUT.zero) * vectors[index]
    return result


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
        unit = RUN if codes.bits == 8 else piece_of(codes.shape[1]) // 4
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
        layout: see ``CodeLayout``; None: the weight is not quantized.
        key: the facts that need other kernels.
    """

    arguments: tuple[Tensor | int | None, ...]
    layout: CodeLayout | None
    key: tuple[object, ...]


def stored_weight(weight: Tensor | DeviceCodes) -> KernelWeight:
    """Return the arguments for a weight [E, O, I] or codes [E * O, I]."""
    if not isinstance(weight, DeviceCodes):
        return KernelWeight((weight, None, None, None, None, 0), None, (weight.shape, *alignments(weight)))
    num_lines, size = weight.shape
    words = (1, RUN) if weight.bits == 8 else (4, piece_of(size) // 4)
    layout = CodeLayout(*words, weight.group, weight.scales.shape[0], weight.zero)
    tensors = weight.numbers, weight.scales, weight.offsets, weight.zeros, weight.table
    key = layout, weight.shape, *dtypes(*tensors), *alignments(weight.numbers)
    return KernelWeight((*tensors, num_lines), layout, key)
