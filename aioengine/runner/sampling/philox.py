"""Philox4x32-10, the counter-based random number generator of sampling.

Each token uses one uniform number, a pure function of (seed, position). So a request gets the same tokens in any batch,
after a preemption and after a restart. The format must not change: key = the 64 bits of the seed (low word first),
counter = (position low word, position high word, 0, 0). The number consists of the first two words of the block, 27 and
26 bits, as a multiple of 2**-53 in [0, 1).

Source: J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from aioengine.kernels.arrays import Ints64

Words = npt.NDArray[np.uint64]

NUM_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox(counter: Words, key: Words) -> Words:
    """Return blocks of four random words [4, R] for counter [4, R] and key [2, R]: 32-bit words in 64-bit integers."""
    even = counter[0::2]  # words 0 and 2 are multiplied, words 1 and 3 are mixed in
    odd = counter[1::2]
    for _ in range(NUM_ROUNDS):
        product = even * _MULTIPLIERS
        even = (product >> _SHIFT)[::-1] ^ odd ^ key
        odd = (product & _MASK)[::-1]
        key = (key + _KEY_STEPS) & _MASK
    return np.stack((even[0], odd[0], even[1], odd[1]))


def uniforms(seeds: Words, positions: Ints64) -> npt.NDArray[np.float64]:
    """Return the number in [0, 1) for the token at ``positions[i]`` of a request with ``seeds[i]``."""
    wide = positions.astype(np.uint64)
    counter = np.zeros((4, len(seeds)), dtype=np.uint64)
    counter[0] = wide & _MASK
    counter[1] = wide >> _SHIFT
    key = np.stack((seeds & _MASK, seeds >> _SHIFT))
    words = philox(counter, key)
    bits = (words[0] >> np.uint64(5) << np.uint64(26)) | (words[1] >> np.uint64(6))
    numbers: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return numbers


class UniformTable:
    """Caches the uniforms of the next positions of each row. ``AHEAD`` positions cost as much time as one."""

    AHEAD = 16

    def __init__(self, max_rows: int) -> None:
        self._numbers = np.zeros((max_rows, self.AHEAD))
        self._starts = np.full(max_rows, -self.AHEAD)
        self._seeds = np.zeros(max_rows, dtype=np.uint64)

    def take(self, row_indices: Ints64, seeds: Words, positions: Ints64) -> npt.NDArray[np.float64]:
        """Return ``uniforms(seeds, positions)`` [S]. A row may belong to another request than before, and may occur
        several times, with up to ``AHEAD`` ascending positions.
        """
        offsets = positions - self._starts[row_indices]
        is_stale = (offsets < 0) | (offsets >= self.AHEAD) | (self._seeds[row_indices] != seeds)
        if is_stale.any():
            is_stale = np.isin(row_indices, row_indices[is_stale])
            # the first position of a row is written last, and stays
            stale, firsts = row_indices[is_stale][::-1], positions[is_stale][::-1]
            stale_seeds = seeds[is_stale][::-1]
            ahead = (firsts[:, None] + np.arange(self.AHEAD)).ravel()
            self._numbers[stale] = uniforms(stale_seeds.repeat(self.AHEAD), ahead).reshape(-1, self.AHEAD)
            self._starts[stale] = firsts
            self._seeds[stale] = stale_seeds
            offsets = positions - self._starts[row_indices]
        numbers: npt.NDArray[np.float64] = self._numbers[row_indices, offsets]
        return numbers
