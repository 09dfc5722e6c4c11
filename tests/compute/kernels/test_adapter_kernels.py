"""LoRA on a GPU: the tiles of a step, and the kernels in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aioengine.kernels.adapter_types import AdapterTiles, max_tiles
from aioengine.runner.lora.grouping import FixedTiles, StepAdapters, TileRows, tile
from tests.compute.interpreted import run_interpreted

PROGRAM = """
import numpy as np
import torch

from aioengine.kernels import linear
from aioengine.kernels.adapter_types import AdapterWeights, AdapterTiles
from aioengine.layers.adapters import PooledAdapters
from aioengine.runner.lora.grouping import tile
from tests.compute.adapter_reference import add_adapters

torch.manual_seed(0)
NUM_SLOTS, UNIT, RANK_UNIT = 3, 16, 16


def slots_of(size, sizes, ranks_of_slots, max_rank, dtype):
    first_part = 2  # other layers come before
    matrices = len(sizes) * max_rank * size + sum(sizes) * max_rank + 64 * (len(sizes) + 2)
    pool = torch.full((NUM_SLOTS, -(-matrices // UNIT) * UNIT), float("nan"), dtype=dtype)  # unset elements stay NaN
    table = pool.view(torch.int32)
    for slot, ranks in enumerate(ranks_of_slots):
        end = 128
        for part, (rank, outputs) in enumerate(zip(ranks, sizes)):
            first_b = end + -(-rank * size // UNIT) * UNIT
            entry = (first_part + part) * 4
            table[slot, entry : entry + 4] = torch.tensor([rank // RANK_UNIT, end // UNIT, first_b // UNIT, 0])
            pool[slot, end : end + rank * size] = torch.randn(rank * size) * size**-0.5
            pool[slot, first_b : first_b + outputs * rank] = torch.randn(outputs * rank)
            end = first_b + -(-outputs * rank // UNIT) * UNIT
    return AdapterWeights(pool, table, first_part, size, tuple(sizes), max_rank)


def check(size, sizes, ranks, max_rank, num_rows, rows_of_tile, dtype=torch.float32, is_gated=False):
    weights = slots_of(size, sizes, ranks, max_rank, dtype)
    adapters = PooledAdapters(weights, is_gated=is_gated)
    slots = np.random.default_rng(0).integers(0, NUM_SLOTS + 1, num_rows).astype(np.int32)
    order, tile_slots = tile(slots, num_slots=NUM_SLOTS, size=rows_of_tile)
    tiles = AdapterTiles(torch.from_numpy(order), torch.from_numpy(tile_slots))
    x, y = torch.randn(num_rows, size, dtype=dtype), torch.randn(num_rows, sum(sizes), dtype=dtype)
    expected = add_adapters(y, x, weights, tiles, is_gated=is_gated)
    result = adapters.add(lambda _: y.clone(), x, tiles)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)
    for slot in (1, 2):  # a single row
        order, tile_slots = tile(np.array([slot], dtype=np.int32), num_slots=NUM_SLOTS, size=16)
        tiles = AdapterTiles(torch.from_numpy(order), torch.from_numpy(tile_slots))
        matmul = linear.DeviceMatmul(torch.randn(sum(sizes), size, dtype=dtype) * size**-0.5, y[0])
        plain = torch.nn.functional.linear(x[:1], matmul.weight, matmul.bias)
        expected = add_adapters(plain, x[:1], weights, tiles, is_gated=is_gated)
        result = adapters.add(matmul, x[:1], tiles)
        torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)


check(48, [64, 32, 32], [(16, 0, 16), (32, 32, 32), (16, 16, 16)], 32, 30, 16)
check(600, [130], [(16,), (48,), (0,)], 48, 9, 16)
check(600, [130], [(16,), (48,), (0,)], 48, 9, 16, is_gated=True)
check(80, [96, 96], [(16, 16), (0, 16), (16, 0)], 16, 40, 16, is_gated=True)
check(2100, [70, 70], [(80, 16), (96, 96), (0, 0)], 96, 70, 64, is_gated=True)
check(2100, [64, 32, 32], [(16, 16, 16), (0, 0, 16), (16, 0, 0)], 16, 20, 16, torch.float16)
check(2100, [200], [(16,), (32,), (16,)], 32, 70, 64, torch.float16)
"""


def test_kernels_match_the_reference() -> None:
    run_interpreted(PROGRAM)


@pytest.mark.parametrize("num_slots", [1, 3, 8])
@pytest.mark.parametrize("size", [16, 64])
def test_each_row_is_in_one_tile_of_its_adapter(num_slots: int, size: int) -> None:
    generator = np.random.default_rng(num_slots)
    for num_rows in (1, 2, 15, 16, 17, 33, 200):
        for slots in (
            generator.integers(0, num_slots + 1, num_rows).astype(np.int32),
            np.zeros(num_rows, dtype=np.int32),
            (np.arange(num_rows) % (num_slots + 1)).astype(np.int32),
        ):
            order, tile_slots = tile(slots, num_slots=num_slots, size=size)
            assert order.shape == (max_tiles(num_rows, num_slots, size), size)
            assert sorted(order[order >= 0].tolist()) == [*range(num_rows)]
            for rows, slot in zip(order, tile_slots.tolist(), strict=True):
                assert set(slots[rows[rows >= 0]].tolist()) == ({slot} if slot >= 0 else set())


@pytest.mark.parametrize("max_rows", [40, 300])
def test_graph_tiles_equal_the_tiles_of_the_padded_step(max_rows: int) -> None:
    group = TileRows(num_slots=3, batch_invariant=False, upload=torch.from_numpy)
    fixed = FixedTiles(max_rows, group, torch.device("cpu"))
    for num_rows, num_used in ((max_rows, max_rows), (1, 1), (24, 17), (max_rows, 30), (24, 20)):
        slots = np.random.default_rng(num_used).integers(0, 4, num_used).astype(np.int32)
        fixed.fill(slots, num_rows)
        tiles, size = fixed.for_graph(num_rows), group.size(num_rows)
        order, tile_slots = tile(np.pad(slots, (0, num_rows - num_used)), num_slots=3, size=size)
        assert torch.equal(tiles.order, torch.from_numpy(order))
        assert torch.equal(tiles.slots, torch.from_numpy(tile_slots))


def test_step_is_regrouped_for_a_padded_graph() -> None:
    group = TileRows(num_slots=2, batch_invariant=True, upload=torch.from_numpy)
    token_slots = np.array([1] * 20 + [0] * 3 + [2] * 5, dtype=np.int32)
    rows = StepAdapters(token_slots, token_slots[[19, 22, 27, 0]], group)
    assert isinstance(rows.tokens, AdapterTiles)
    assert rows.tokens.slots.tolist() == [0, 1, 1, 2]
    tokens, outputs = (FixedTiles(size, group, torch.device("cpu")) for size in (64, 8))
    tokens.fill(rows.token_slots, 32)
    order, slots = tokens.for_graph(32)
    assert slots.tolist() == [0, 1, 1, 2]
    assert sorted(order[0][order[0] >= 0].tolist()) == [20, 21, 22, 28, 29, 30, 31]
    outputs.fill(token_slots[[19, 22, 27]], 3)
    order, slots = outputs.for_graph(3)
    assert slots.tolist() == [0, 1, 2]
    assert order[:, 0].tolist() == [1, 0, 2]
