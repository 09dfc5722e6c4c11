"""Matmul in fp32 with a weight in 16 bits, on a CPU: x [T, I], weight [O, I], bias [O] -> [T, O].

A CPU without bf16 instructions computes in fp32. Weights of a checkpoint in bf16 or fp16 have at most 11 significant
bits, so fp16 holds them without rounding if each output is multiplied by a power of two. Only numbers below 2 ** -28 of
the largest one of their output may be rounded, by at most 2 ** -39 of it, which is less than the rounding of the sums
in fp32. FBGEMM converts weights to fp32 in registers, and adds in fp32. Compared with oneDNN's matmul in fp32, weights
take half the memory. On two cores of Zen 3, a matmul of up to 32 rows takes 0.13 to 0.55 of the time, and one of 512
rows 0.8 to 1.0.

FBGEMM adds in another order if it computes one or two rows at a time, which may be the rest of a larger row count. So
only ``agreeing_counts`` are used.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from threading import BoundedSemaphore
from typing import Any, Final, NamedTuple

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
MAX_EXPONENT: Final = 15
"""fp16 holds numbers below 2 ** 15."""
MAX_FACTOR_EXPONENT: Final = 126
"""Powers of two up to this one, and their reciprocals, are normal numbers of fp32."""
MAX_ROUNDED: Final = 1e-4
"""A larger share of rounded numbers means that the weight has more than 16 bits."""


class HalfWeight(NamedTuple):
    """A weight [O, I] in fp16.

    Attributes:
        blocks: weights in FBGEMM's layout, of ``MAX_OUTPUTS`` outputs each, which threads pack.
        factors: [O], the powers of two by which the numbers in fp16 are multiplied.
        counts: the row counts that give the same bits, ascending.
        rounded: the indices of rounded numbers [N, 2], and these numbers [N] fp32.
    """

    blocks: list[Future[Any]]
    factors: Tensor
    counts: tuple[int, ...]
    rounded: tuple[Tensor, Tensor]

    def restore(self) -> Tensor:
        """Return the weight [O, I] in fp32."""
        weight = torch.cat([torch.ops.quantized.linear_unpack_fp16(block.result())[0] for block in self.blocks])
        weight.mul_(self.factors.unsqueeze(1))
        indices, numbers = self.rounded
        weight[indices[:, 0], indices[:, 1]] = numbers
        return weight


class _Packer:
    """Threads that pack weights. FBGEMM packs a weight in one thread, 90 million numbers per second."""

    def __init__(self) -> None:
        num_threads = torch.get_num_threads()
        self._threads = ThreadPoolExecutor(num_threads, "pack-weights")
        self._slots = BoundedSemaphore(2 * num_threads)  # limits the memory of weights that wait

    def submit(self, weight: Tensor) -> Future[Any]:
        """Pack a weight [O, I] of numbers that fp16 holds, fp32."""
        self._slots.acquire()
        future = self._threads.submit(torch.ops.quantized.linear_prepack_fp16, weight, None)
        future.add_done_callback(lambda _: self._slots.release())
        return future

    def finish(self) -> None:
        self._threads.shutdown()


@lru_cache(maxsize=1)
def _packer() -> _Packer:
    return _Packer()


def finish_packing() -> None:
    """Wait until all weights are packed, and end the threads."""
    _packer().finish()
    _packer.cache_clear()


def is_available() -> bool:
    """Return whether torch has FBGEMM for this CPU, which must have AVX2."""
    return torch.backends.quantized.engine in {"x86", "fbgemm"}


def pack(weight: Tensor) -> HalfWeight | None:
    """Return the weight [O, I] in 16 bits. None: it needs more bits, or FBGEMM cannot compute it here."""
    if weight.dtype != torch.float32 or not is_available():
        return None
    blocks: list[Future[Any]] = []
    factors, rounded, counts = [], [], []
    for first, block in zip(range(0, len(weight), MAX_OUTPUTS), weight.split(MAX_OUTPUTS), strict=True):
        scaled, factor = _scaled(block)
        is_rounded = scaled.half().float() != scaled
        indices = is_rounded.nonzero()
        if len(indices) > MAX_ROUNDED * block.numel() or not scaled.isfinite().all():
            return None
        counts.append(agreeing_counts(*block.shape, torch.get_num_threads()))
        blocks.append(_packer().submit(scaled))
        factors.append(factor)
        rounded.append((indices + torch.tensor([first, 0]), block[is_rounded]))
    usable = tuple(count for count in counts[0] if all(count in others for others in counts))
    if not usable or usable[-1] < MIN_LARGEST_COUNT:
        return None
    indices, numbers = (torch.cat(parts) for parts in zip(*rounded, strict=True))
    return HalfWeight(blocks, torch.cat(factors), usable, (indices, numbers))


def _scaled(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight [O, I] divided by powers of two, so that fp16 holds the largest number of each output, and these
    powers [O].
    """
    low, high = torch.aminmax(weight, dim=1)
    exponents = MAX_EXPONENT - torch.frexp(torch.maximum(-low, high)).exponent
    exponents = exponents.clamp(-MAX_FACTOR_EXPONENT, MAX_FACTOR_EXPONENT)
    factors, reciprocals = (((sign * exponents + 127) << 23).view(torch.float32) for sign in (1, -1))  # their bits
    return weight * factors.unsqueeze(1), reciprocals


@lru_cache(maxsize=256)
def agreeing_counts(out_features: int, in_features: int, num_threads: int) -> tuple[int, ...]:
    """Return the row counts that give the same bits in the trials, ascending.

    num_threads: only part of the cache key, because the trials depend on it.
    """
    trial = Trial(out_features, in_features, torch.float32)
    packed = torch.ops.quantized.linear_prepack_fp16(trial.weight, None)
    agrees = trial.agreement_test(lambda x: multiply(x, [packed]), COMMON_ROWS)
    return tuple(count for count in TRIED_COUNTS if count * out_features <= MAX_TRIED_ELEMENTS and agrees(count))


def multiply(x: Tensor, blocks: list[Any]) -> Tensor:
    """Multiply x [T, I] with the packed weights of all outputs -> [T, O]."""
    outputs = [torch.ops.quantized.linear_dynamic_fp16(x, block) for block in blocks]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def prepare(weight: HalfWeight, bias: Tensor | None) -> Matmul:
    """Return the matmul [T, I] -> [T, O] with bias [O] fp32."""
    factors, blocks = weight.factors, list[Any]()

    def matmul(x: Tensor) -> Tensor:
        """[T, I] -> [T, O]."""
        if not blocks:
            blocks.extend(block.result() for block in weight.blocks)
        result = multiply(x, blocks)
        return result.mul_(factors) if bias is None else torch.addcmul(bias, result, factors)

    return in_pieces(matmul, weight.counts)
