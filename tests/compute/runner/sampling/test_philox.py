"""The random numbers are a format, so these values must never change."""

from __future__ import annotations

import numpy as np
import pytest

from aioengine.runner.sampling.philox import UniformTable, philox, uniforms

# Random123, tests/kat_vectors, philox4x32 with 10 rounds: counter, key, block.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(*columns: str) -> np.ndarray:
    return np.array([[int(word, 16) for word in column.split()] for column in columns], dtype=np.uint64).T


def test_known_answers_alone_and_together() -> None:
    for counter, key, block in KNOWN_ANSWERS:
        assert (philox(words(counter), words(key)) == words(block)).all()
    counters, keys, blocks = zip(*KNOWN_ANSWERS, strict=True)
    assert (philox(words(*counters), words(*keys)) == words(*blocks)).all()


@pytest.mark.parametrize(
    ("seed", "position", "counter", "key"),
    [
        (0, 0, "0 0 0 0", "0 0"),
        (0xA409382200000007, 5, "5 0 0 0", "00000007 a4093822"),
        (1, 2**32 + 3, "3 1 0 0", "1 0"),
    ],
)
def test_seed_is_the_key_and_position_the_counter(seed: int, position: int, counter: str, key: str) -> None:
    block = philox(words(counter), words(key))[:, 0].tolist()
    expected = ((block[0] >> 5) * 2**26 + (block[1] >> 6)) / 2**53
    assert uniforms(np.array([seed], dtype=np.uint64), np.array([position])).tolist() == [expected]


def test_numbers_are_uniform_and_below_one() -> None:
    numbers = uniforms(np.full(20_000, 42, dtype=np.uint64), np.arange(20_000))
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    counts = np.bincount((numbers * 20).astype(int), minlength=20)
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
    neighbours = np.corrcoef(numbers[1:], numbers[:-1])[0, 1]
    assert abs(neighbours) < 0.03


def test_cached_numbers_equal_computed_numbers() -> None:
    generator = np.random.default_rng(0)
    table = UniformTable(9)
    for _ in range(200):  # rows change their request, positions continue, jump and go back
        num_rows = int(generator.integers(1, 6))
        row_indices = generator.permutation(9)[:num_rows]
        seeds = generator.integers(0, 3, num_rows).astype(np.uint64)
        positions = generator.integers(0, 60, num_rows)
        numbers = table.take(row_indices, seeds, positions)
        assert numbers.tolist() == uniforms(seeds, positions).tolist()
