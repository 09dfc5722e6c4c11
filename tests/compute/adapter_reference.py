"""Reference for the adapter kernels of a GPU, in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from aioengine.kernels.adapter_types import RANK_UNIT, TABLE_COLUMNS, UNIT, AdapterTiles, AdapterWeights

if TYPE_CHECKING:
    from torch import Tensor


def add_adapters(y: Tensor, x: Tensor, weights: AdapterWeights, tiles: AdapterTiles, *, is_gated: bool) -> Tensor:
    """Return y [T, O] plus the adapter outputs for x [T, I]. For a gated layer, return silu(gate) * up: [T, O / 2]."""
    y = y.clone()
    for rows, slot in zip(tiles.order, tiles.slots.tolist(), strict=True):
        if slot < 1:
            continue
        chosen = rows[rows >= 0].long()
        first_output = 0
        for part, num_outputs in enumerate(weights.sizes):
            entry = (weights.first_part + part) * TABLE_COLUMNS
            num_units, first_a, first_b, _ = weights.table[slot - 1, entry : entry + TABLE_COLUMNS].tolist()
            rank, elements = num_units * RANK_UNIT, weights.pool[slot - 1]
            a = elements[first_a * UNIT :][: rank * weights.size].view(rank, weights.size)
            b = elements[first_b * UNIT :][: num_outputs * rank].view(num_outputs, rank)
            y[chosen, first_output : first_output + num_outputs] += x[chosen] @ a.T @ b.T
            first_output += num_outputs
    if not is_gated:
        return y
    gates, ups = y.chunk(2, dim=-1)
    return functional.silu(gates) * ups
