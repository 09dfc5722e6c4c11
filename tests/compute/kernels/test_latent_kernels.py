"""The latent attention kernels compile for Hopper, with the sizes of DeepSeek's and of small models."""

from __future__ import annotations

import pytest

from tests.compute.interpreted import run_compiled

PROGRAM = """
import torch

from aioengine.kernels.kv_target import KVTarget
from aioengine.kernels.triton import attention, expanded_attention, invariant_linear
from aioengine.kernels.triton import latent_decode, latent_heads


ints = torch.zeros(3, dtype=torch.int32)
rows = attention.PagedRows(ints, ints, ints, ints)
for num_heads, value_size, more, dtypes in (
    (16, 512, 64, (torch.bfloat16, torch.float32)),
    (128, 512, 64, (torch.float16,)),
    (20, 512, 64, (torch.bfloat16,)),
):
    for dtype in dtypes:
        size = value_size + more
        heads = torch.zeros(2, num_heads + 1, size, dtype=dtype)
        q, out = heads[:, :-1], torch.zeros(2, num_heads, value_size, dtype=dtype)
        keys = torch.zeros(3, 1, 16, size, dtype=dtype)
        pool = keys, keys[..., :value_size]
        tiles, in_splits = ints.view(-1, 1).expand(-1, 2), num_heads != 20
        attention.attend(q, pool, rows, tiles, scale=0.1, out=out, in_splits=in_splits)
        attention.attend_splits(q, pool, rows, ints, max_splits=4, num_programs=2, scale=0.1, out=out)
        both = torch.zeros(2, num_heads * (64 + more) + size, dtype=dtype)
        queries, latents = both.tensor_split((num_heads * (64 + more),), dim=1)
        queries = queries.unflatten(1, (num_heads, -1))
        norm = torch.zeros(value_size, dtype=dtype), torch.tensor(1e-6)
        rotation = torch.zeros(2, 2, more // 2)
        for target in (None, KVTarget(ints[:2], keys, keys)):
            latent_heads.rotate(queries, latents, heads, norm=norm, rotation=rotation, target=target)
        for rotated_queries in (queries, torch.zeros(2, num_heads, 64 + more, dtype=dtype)):
            target = KVTarget(ints[:2], keys, keys)
            latent_heads.rotate(queries, latents, rotated_queries, norm=norm, rotation=rotation, target=target)
        if dtype == torch.bfloat16 and num_heads == 16:
            parts = (out, queries[..., 64:]), keys, rows
            for count in (1, 8, 64):
                latent_decode.attend(*parts, latent_decode.Parts(1, count), scale=0.1, out=out)
            for plain, size in ((128, 128), (192, 256)):
                expanded = torch.zeros(48, num_heads, plain + size, dtype=dtype)
                expanded_queries = torch.zeros(2, num_heads, plain + more, dtype=dtype)
                values = torch.zeros(2, num_heads, size, dtype=dtype)
                rotated = keys.view(48, -1)[:, value_size:]
                kv = expanded_attention.ExpandedKV(expanded, rotated, 16, 0)
                for tile in (expanded_attention.LARGE, expanded_attention.SMALL):
                    expanded_tiles = expanded_attention.ExpandedTiles(tiles, tile)
                    expanded_attention.attend(expanded_queries, kv, rows, expanded_tiles, scale=0.1, out=values)
        weight = torch.zeros(num_heads, 64, value_size, dtype=dtype)
        invariant_linear.head_matmul(queries[..., :64], weight, q[..., :value_size])
        invariant_linear.head_matmul(out, weight.transpose(1, 2), queries[..., :64])
"""


@pytest.mark.slow
def test_kernels_compile_for_hopper() -> None:
    run_compiled(PROGRAM)
