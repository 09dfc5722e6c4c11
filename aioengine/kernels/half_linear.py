"""Matmul in fp32 with a weight in 16 bits, on a CPU: x [T, I], weight [O, I], bias [O] -> [T, O].

A CPU without bf16 instructions computes in fp32. Weights of a checkpoint in bf16 or fp16 have at most 11 significant
bits, so fp16 holds them without rounding if they are multiplied by a power of two. (Only numbers below 2 ** -28 of the
largest one may be rounded, by at most 2 ** -39 of the largest one.) FBGEMM converts them to fp32 in registers, and
adds in fp32. Compared with oneDNN's matmul in fp32, weights take half the memory. On two cores of Zen 3, a matmul of up
to 32 rows takes 0.13 to 0.55 of the time, and one of 512 rows 0.8 to 1.0.

FBGEMM adds in another order if it computes one or two rows at a time, which may be the rest of a larger row count. So
only ``agreeing_counts`` are used.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from aioengine.kernels.row_counts import COMMON_ROWS, MAX_TRIED_ELEMENTS, Matmul, Trial, in_pieces

MAX_OUTPUTS: Final = 8192
"""Outputs that are packed together. FBGEMM takes three times as long per output to pack 150,000 of them."""
TRIED_COUNTS: Final = (
    *(1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 28, 32, 33, 36, 40, 48, 60, 64, 66, 72, 96),
    *(120, 128, 144, 192, 240, 360, 480),
)
"""Row counts that are tried with each shape of weights. With AVX2, FBGEMM computes 6 rows at a time."""
MIN_LARGEST_COUNT: Final = 32
"""If the largest usable row count is smaller, oneDNN's matmul is used."""
UNUSED_BITS: Final = (1 << 13) - 1
"""The bits of a number in fp32 that are 0 if it has at most 11 significant bits."""
MAX_EXPONENT: Final = 15
"""fp16 holds numbers below 2 ** 15."""


class HalfWeight:
    """A weight [O, I] in fp16, in FBGEMM's layout. Threads pack it, and the first matmul waits for them.

    Until then, the plain weight must not change.

    Attributes:
        factor: the power of two by which the numbers in fp16 are multiplied.
        counts: the row counts that give the same bits, ascending.
        blocks: the packed weights of ``MAX_OUTPUTS`` outputs each.
    """

    def __init__(self, weight: Tensor, counts: tuple[int, ...] = ()) -> None:
        """weight: [O, I] fp32, finite."""
        exponent = MAX_EXPONENT - int(torch.frexp(_largest(weight)).exponent)
        self.factor = 2.0**-exponent
        self.counts = counts
        self._packed = [_threads().submit(_pack, block, 2.0**exponent) for block in weight.split(MAX_OUTPUTS)]

    @cached_property
    def blocks(self) -> list[Any]:
        return [block.result() for block in self._packed]

    def matmul(self, x: Tensor) -> Tensor:
        """[T, I] -> [T, O], divided by ``factor``."""
        outputs = [torch.ops.quantized.linear_dynamic_fp16(x, block) for block in self.blocks]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    def restore(self) -> Tensor:
        """Return the weight [O, I] in fp32."""
        return torch.cat([torch.ops.quantized.linear_unpack_fp16(block)[0] for block in self.blocks]).mul_(self.factor)


def _pack(weight: Tensor, factor: float) -> Any:
    return torch.ops.quantized.linear_prepack_fp16(weight * factor, None)


@lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    """Return the threads that pack weights. FBGEMM packs a weight in one thread, 90 million numbers per second."""
    return ThreadPoolExecutor(torch.get_num_threads(), "pack-weights")


def finish_packing() -> None:
    """Wait until all weights are packed, so that their memory in fp32 is free. End the threads."""
    _threads().shutdown()
    _threads.cache_clear()


def _largest(weight: Tensor) -> Tensor:
    """Return the largest absolute value [] of a weight [O, I]."""
    low, high = torch.aminmax(weight)
    return torch.maximum(-low, high)


def is_available() -> bool:
    """Return whether torch has FBGEMM for this CPU, which must have AVX2."""
    return torch.backends.quantized.engine in {"x86", "fbgemm"}


def pack(weight: Tensor) -> HalfWeight | None:
    """Return the weight [O, I] in 16 bits. None: this would change its values, or FBGEMM cannot compute it here."""
    if weight.dtype != torch.float32 or not is_available() or not _fits_fp16(weight):
        return None
    sizes = {len(block) for block in weight.split(MAX_OUTPUTS)}
    tried = [agreeing_counts(size, weight.shape[1], torch.get_num_threads()) for size in sizes]
    counts = tuple(count for count in tried[0] if all(count in others for others in tried[1:]))
    return HalfWeight(weight, counts) if counts and counts[-1] >= MIN_LARGEST_COUNT else None


def _fits_fp16(weight: Tensor) -> bool:
    """Return whether all numbers of a weight [O, I] are finite and have at most 11 significant bits."""
    blocks = weight.contiguous().view(torch.int32).split(MAX_OUTPUTS)
    return not any((block & UNUSED_BITS).any() for block in blocks) and bool(_largest(weight).isfinite())


@lru_cache(maxsize=256)
def agreeing_counts(out_features: int, in_features: int, num_threads: int) -> tuple[int, ...]:
    """Return the row counts that give the same bits in the trials, ascending.

    num_threads: only part of the cache key, because the trials depend on it.
    """
    trial = Trial(out_features, in_features, torch.float32)
    agrees = trial.agreement_test(HalfWeight(trial.weight).matmul, COMMON_ROWS)
    return tuple(count for count in TRIED_COUNTS if count * out_features <= MAX_TRIED_ELEMENTS and agrees(count))


def prepare(weight: HalfWeight, bias: Tensor | None) -> Matmul:
    """Return the matmul [T, I] -> [T, O] with bias [O] fp32."""

    def matmul(x: Tensor) -> Tensor:
        """[T, I] -> [T, O]."""
        result = weight.matmul(x)
        return result.mul_(weight.factor) if bias is None else torch.add(bias, result, alpha=weight.factor)

    return in_pieces(matmul, weight.counts)
