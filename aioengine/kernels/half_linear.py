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
from functools import cache, lru_cache
from threading import Lock, Semaphore
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
CACHED_OUTPUTS: Final = 256
"""Outputs that are checked at a time. Their weights fit the cache."""
UNUSED_BITS: Final = (1 << 13) - 1
"""The bits of a number in fp32 that are 0 if it has at most 11 significant bits."""


class PackedBlock(NamedTuple):
    """The weights of up to ``MAX_OUTPUTS`` outputs, in fp16.

    Attributes:
        weight: in FBGEMM's layout.
        factors: [O], the powers of two by which the numbers in fp16 are multiplied.
        rounded: the indices of outputs with a rounded number [R], and their weights [R, I] fp32.
    """

    weight: Any
    factors: Tensor
    rounded: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, weight: Tensor) -> PackedBlock:
        """Pack a weight [O, I] fp32."""
        low, high = torch.aminmax(weight, dim=1)
        exponents = MAX_EXPONENT - torch.frexp(torch.maximum(-low, high)).exponent
        exponents = exponents.clamp(-MAX_FACTOR_EXPONENT, MAX_FACTOR_EXPONENT)
        # the bits of powers of two in fp32
        factors, reciprocals = (((sign * exponents + 127) << 23).view(torch.float32) for sign in (1, -1))
        scaled, is_rounded = torch.empty_like(weight), torch.zeros(len(weight), dtype=torch.bool)
        for rows in torch.arange(len(weight)).split(CACHED_OUTPUTS):
            part = slice(rows[0], rows[-1] + 1)
            torch.mul(weight[part], factors[part, None], out=scaled[part])
            is_rounded[part] = (scaled[part].half() != scaled[part]).any(1)
        [outputs] = is_rounded.nonzero(as_tuple=True)
        packed = torch.ops.quantized.linear_prepack_fp16(scaled, None)
        return cls(packed, reciprocals, (outputs, weight[outputs]))

    def restore(self) -> Tensor:
        """Return the weight [O, I] in fp32."""
        weight = torch.ops.quantized.linear_unpack_fp16(self.weight)[0].mul_(self.factors.unsqueeze(1))
        outputs, exact = self.rounded
        return weight.index_copy_(0, outputs, exact)


class HalfWeight(NamedTuple):
    """A weight [O, I] in fp16.

    Attributes:
        blocks: futures of its blocks, in the order of the outputs.
        counts: the row counts that give the same bits, ascending.
    """

    blocks: list[Future[PackedBlock]]
    counts: tuple[int, ...]

    def restore(self) -> Tensor:
        """Return the weight [O, I] in fp32."""
        return torch.cat([block.result().restore() for block in self.blocks])


class _Packer:
    """Threads that pack weights. FBGEMM packs a weight in one thread, 90 million numbers per second."""

    def __init__(self) -> None:
        num_threads = torch.get_num_threads()
        self._threads = ThreadPoolExecutor(num_threads, "pack-weights")
        self._slots = Semaphore(2 * num_threads)  # limits the memory of weights that wait

    def submit(self, weight: Tensor) -> Future[PackedBlock]:
        """Pack a weight [O, I]."""
        self._slots.acquire()
        future = self._threads.submit(PackedBlock.of, weight)
        future.add_done_callback(lambda _: self._slots.release())
        return future

    def finish(self) -> None:
        self._threads.shutdown()


@cache
def _packer() -> _Packer:
    return _Packer()


_packer_lock = Lock()
"""Adapters are read, and so packed, in other threads, also while ``finish_packing`` runs."""


def _pack(weight: Tensor) -> Future[PackedBlock]:
    """Pack a weight [O, I] in a thread."""
    with _packer_lock:
        return _packer().submit(weight)


def finish_packing() -> None:
    """Wait until all weights are packed, and end the threads."""
    with _packer_lock:
        packer = _packer()
        _packer.cache_clear()
    packer.finish()


def is_available() -> bool:
    """Return whether torch can use FBGEMM on this CPU. It needs AVX2."""
    return torch.backends.quantized.engine in {"x86", "fbgemm"}


def pack(weight: Tensor) -> HalfWeight | None:
    """Return the weight [O, I] in 16 bits. None: it needs more bits, or FBGEMM cannot compute it here."""
    if weight.dtype != torch.float32 or not is_available() or not _has_16_bits(weight):
        return None
    blocks = weight.split(MAX_OUTPUTS)
    counts = [agreeing_counts(*block.shape, torch.get_num_threads()) for block in blocks]
    usable = tuple(count for count in counts[0] if all(count in others for others in counts))
    if not usable or usable[-1] < MIN_LARGEST_COUNT:
        return None
    return HalfWeight(list(map(_pack, blocks)), usable)


def _has_16_bits(weight: Tensor) -> bool:
    """Return whether all numbers of a weight [O, I] are finite and have at most 11 significant bits."""
    blocks = weight.contiguous().view(torch.int32).split(CACHED_OUTPUTS)
    if any((block & UNUSED_BITS).any() for block in blocks):
        return False
    return bool(torch.stack(weight.aminmax()).isfinite().all())


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

    @cache
    def packed() -> tuple[list[Any], Tensor]:
        """Return the packed weights, and the factors [O]."""
        blocks = [block.result() for block in weight.blocks]
        return [block.weight for block in blocks], torch.cat([block.factors for block in blocks])

    def matmul(x: Tensor) -> Tensor:
        """[T, I] -> [T, O]."""
        weights, factors = packed()
        result = multiply(x, weights)
        return result.mul_(factors) if bias is None else torch.addcmul(bias, result, factors)

    return in_pieces(matmul, weight.counts)
