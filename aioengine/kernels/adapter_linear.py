"""LoRA for rows with different adapters: y [T, O] += B (A x), x [T, I].

A row of the result depends on the other rows only through the tile size, which is constant with ``batch_invariant``.
"""

from __future__ import annotations

from torch import Tensor

from aioengine.kernels.activation import activate_and_mul
from aioengine.kernels.adapter_types import RANK_UNIT, TABLE_COLUMNS, UNIT, AdapterTiles, AdapterWeights
from aioengine.kernels.row_counts import Matmul
from aioengine.kernels.triton import launcher


def add(matmul: Matmul, x: Tensor, weights: AdapterWeights, tiles: AdapterTiles, *, is_gated: bool) -> Tensor:
    """Compute y [T, O] = ``matmul`` of x [T, I], on a GPU contiguous, and add the adapters' results.

    Returns y, or with ``is_gated`` silu(gate) * up [T, O / 2] of its two halves.
    """
    if launcher.supports(x):
        from aioengine.kernels.triton import adapter_linear

        is_one_part = len(weights.sizes) == 1  # the checkpoint fuses gate and up
        y = adapter_linear.add(matmul, x, weights, tiles, is_gated=is_gated and not is_one_part)
        return activate_and_mul(y, "silu") if is_gated and is_one_part else y
    y, x = matmul(x), x.contiguous()
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
    return activate_and_mul(y, "silu") if is_gated else y
