"""How a matmul with few rows is divided among programs on a GPU."""

from __future__ import annotations

import itertools

import pytest

SIZES = range(512, 16_385, 512)
NUM_OUTPUTS = (64, 256, 1000, 1024, 4096, 14_336, 16_384, 28_672, 65_536, 151_936)


def test_programs_stay_within_their_split_of_the_inputs() -> None:
    pytest.importorskip("triton")
    from aioengine.kernels.triton.skinny_linear import SKINNY_ROWS, num_tiles, shape_of_programs

    for num_outputs, size, num_rows in itertools.product(NUM_OUTPUTS, SIZES, (2, SKINNY_ROWS // 2, SKINNY_ROWS)):
        programs = shape_of_programs(num_outputs, size, num_rows)
        if programs is None:
            continue
        outputs, block, splits, _, _, lines_ahead = programs
        case = (num_outputs, size, num_rows)
        assert size % splits == 0, case
        assert size // splits % block == 0, case
        assert 64 * lines_ahead <= size // splits, case
        assert -(-num_outputs // outputs) <= num_tiles(num_outputs), case
