"""Rotated keys and values are written to their slots in the pool."""

from __future__ import annotations

import torch

from aioengine.kernels.heads import RotaryTables, rotate_heads
from aioengine.kernels.kv_target import KVTarget


def test_keys_and_values_are_written_to_their_slots() -> None:
    num_heads, num_kv_heads, head_size = 4, 2, 8
    heads = torch.randn(3, num_heads + 2 * num_kv_heads, head_size)
    angles = torch.randn(3, 1, head_size // 2)
    tables = RotaryTables(torch.cat((angles.cos(), angles.sin()), 1))
    q, k, v = rotate_heads(heads.clone(), num_heads, tables)
    keys, values = torch.zeros(2, 5, num_kv_heads, 4, head_size)
    slots = torch.tensor([4 * 4 + 3, 2 * 4, 1], dtype=torch.int32)
    kept = torch.zeros_like(heads)
    target = KVTarget(slots, keys, values)
    for own_target in (target, target._replace(heads=kept)):
        result = rotate_heads(heads.clone(), num_heads, tables, target=own_target)
        assert all(map(torch.equal, result, (q, k, v)))
    assert torch.equal(kept, torch.cat((q, k, v), dim=1))
    for token, (page, offset) in enumerate([(4, 3), (2, 0), (0, 1)]):
        assert torch.equal(keys[page, :, offset], k[token])
        assert torch.equal(values[page, :, offset], v[token])
    assert int((keys != 0).sum()) == k.numel()
    assert int((values != 0).sum()) == v.numel()
