"""Absorbed and expanded latent attention on a GPU, in Triton's interpreter: kernels and a model against torch, and the
choice of the form for each row.
"""

from __future__ import annotations

import pytest

from tests.compute.interpreted import run_interpreted

PREPARED = """
import numpy as np
import torch

from aioengine.attention import _latent
from aioengine.attention._base import AttentionShape, kv_pool_shape
from aioengine.attention.torch import TorchAttention
from aioengine.attention.triton import build
from aioengine.kernels import latent_heads
from aioengine.kernels.heads import RotaryTables
from aioengine.kernels.kv_target import KVTarget
from aioengine.kernels.triton import expanded_attention, latent_decode
from aioengine.kernels.triton import latent_heads as kernels
from aioengine.kernels.triton.attention import AttentionTile
from tests.compute.stepping import make_batch, write_and_attend

torch.manual_seed(0)
torch.Tensor.pin_memory = lambda tensor: tensor
"""
FORMS = """
_latent.TOKEN_PAIRS, _latent.POSITION_PAIRS = 0, 10
expanded_attention.LARGE = AttentionTile(32, 16, 4, 2)
expanded_attention.SMALL = AttentionTile(16, 16, 4, 2)
expanded_attention.ENOUGH_PROGRAMS = 9
latent_decode.part_size.fn.__globals__["LONG"] = latent_decode.LONG = latent_decode.tl.constexpr(32)
all_ones, mixed, fresh = [(0, 1), (40, 1), (99, 1)], [(40, 1), (7, 5), (100, 1), (16, 30), (0, 45)], [(0, 33), (21, 24)]
for num_heads, value_size, more, plain, output_size, rows, num_absorbed, num_bytes in (
    (4, 32, 16, 24, 20, all_ones, 3, 1 << 20),
    (20, 48, 8, 16, 32, mixed, 7, 1 << 12),
    (3, 32, 8, 16, 16, fresh, 0, 1 << 20),
):
    _latent.MAX_EXPANDED_BYTES = num_bytes
    expansions = tuple(torch.randn(2, num_heads, plain + output_size, value_size) / value_size**0.5)
    shape = AttentionShape(
        num_layers=2, num_heads=num_heads, num_kv_heads=1, head_size=value_size + more, scale=0.2,
        value_size=value_size, expansions=expansions, plain_size=plain, batch_invariant=False,
    )
    pool = torch.randn(kv_pool_shape(shape, num_pages=40, page_size=16))
    expected_pool, order = pool.clone(), (torch.randperm(39) + 1).tolist()
    tables = [[order.pop() for _ in range(-(-(start + count) // 16))] for start, count in rows]
    batch = make_batch(rows, tables, 16)
    backend, reference = build(shape, pool), TorchAttention(shape, expected_pool)
    backend.prepare(batch)
    reference.prepare(batch)
    assert backend._step.num_absorbed == num_absorbed
    num_tokens = len(batch.slot_mapping)
    q, k = torch.randn(num_tokens, num_heads, plain + more), torch.randn(num_tokens, 1, value_size + more)
    for layer in range(2):
        result = write_and_attend(backend, q, k, k[..., :value_size], layer)
        expected = write_and_attend(reference, q, k, k[..., :value_size], layer)
        assert float((result - expected).norm() / expected.norm()) < 1e-5
"""
ROTATION = """
num_heads, plain, rotated, value_size = 18, 24, 8, 48
for num_tokens in (1, 3):
    both = torch.randn(num_tokens, num_heads * (plain + rotated) + value_size + rotated)
    q, latents = both.tensor_split((num_heads * (plain + rotated),), dim=1)
    q, angles = q.unflatten(1, (num_heads, -1)), torch.randn(num_tokens, 1, rotated // 2)
    tables = RotaryTables(torch.cat((angles.cos(), angles.sin()), 1))
    norm = torch.randn(value_size), torch.tensor(1e-6)
    slots, keys, expected = torch.randperm(32)[:num_tokens], *torch.zeros(2, 2, 1, 16, value_size + rotated)
    turned = latent_heads.rotated_queries(
        q.clone(), latents, norm=norm, tables=tables, target=KVTarget(slots, expected, expected[..., :value_size])
    )
    out, rest = torch.zeros_like(turned), {"norm": norm, "rotation": tables.pairs}
    kernels.rotate(q, latents, out, **rest, target=KVTarget(slots, keys, keys))
    torch.testing.assert_close(out, turned)
    torch.testing.assert_close(keys, expected)
    kernels.rotate(q, latents, q, **rest, target=KVTarget(slots, keys, keys))
    assert torch.equal(q, out)
"""
MODEL = """
from types import SimpleNamespace

from aioengine import models
from aioengine.attention._base import DecodeBuffers
from aioengine.models import _decoder
from tests.compute.stepping import make_inputs, options

expanded_attention.LARGE = AttentionTile(32, 16, 4, 2)
expanded_attention.SMALL = AttentionTile(16, 16, 4, 2)
latent_decode.NARROW = AttentionTile(16, 32, 4, 2)
config = {
    "architectures": ["YoutuForCausalLM"], "model_type": "youtu", "vocab_size": 96, "hidden_size": 48,
    "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 128, "kv_lora_rank": 24, "q_lora_rank": 28, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 20, "rope_theta": 500.0,
}
prompts, ids = [(0, 40), (0, 25), (0, 1)], torch.randint(0, 96, (70,))
tables = [[5, 2, 9, 1], [3, 8, 4], [7]]
outputs = []
for is_ours in (False, True):
    _decoder._has_forms = lambda placement: is_ours
    latent_heads.launcher = SimpleNamespace(supports=lambda x: is_ours)
    model, generator = models.build(config, options()), torch.Generator().manual_seed(0)
    for _, target in sorted(model.weights().items()):
        target.tensor.copy_(torch.randn(target.tensor.shape, generator=generator) * 0.2 + (target.tensor.ndim == 1))
    model.finish_loading()
    pool = torch.zeros(kv_pool_shape(model.attention_shape, num_pages=10, page_size=16))
    attention = (build if is_ours else TorchAttention)(model.attention_shape, pool)
    attention.prepare(make_batch(prompts, tables, 16))
    outputs.append([model.forward(make_inputs(model, prompts, ids[:66]), attention)])
    for rows, tokens in (([(40, 1), (25, 1), (1, 1)], ids[66:69]), ([(41, 1)], ids[69:])):
        batch = make_batch(rows, tables[: len(rows)], 16)
        attention.prepare(batch)
        step = attention
        if is_ours:
            pages = [table[: start // 16 + 1] for (start, _), table in zip(rows, tables)]
            lengths = torch.tensor([len(row_pages) for row_pages in pages])
            step = attention.fixed_decode(len(rows), DecodeBuffers(
                slot_mapping=batch.slot_mapping,
                starts=torch.cat((torch.zeros(1), lengths.cumsum(0))).int(),
                last_lengths=torch.tensor([start % 16 + 1 for start, _ in rows]).int(),
                page_ids=torch.tensor(sum(pages, [])).int(),
                max_pages=8,
            ))
        outputs[-1].append(model.forward(make_inputs(model, rows, tokens), step))
for ours, expected in zip(*outputs):
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
"""
CHOICE = """
def first(rows, max_positions=1 << 20):
    queries, lengths = np.array(rows, dtype=np.int32).T
    return _latent.first_expanded(queries, lengths, 16, max_positions)

assert first([(1, 4096)] * 3) == 3, "rows of one token"
assert first([(1, 4096), (4096, 4096), (2048, 8192)]) == 1, "long rows"
assert first([(1, 4096), (4096, 4096), (9, 300)]) == 1, "last chunk of a short row after a long row"
assert first([(1, 4096), (4096, 4096), (9, 1 << 18)]) == 3, "last chunk of a long row"
assert first([(1, 4096), (60, 60)]) == 1, "a short prompt"
assert first([(2048, 65536), (4096, 4096)], max_positions=8192) == 1, "positions exceed the limit"
assert first([(2048, 65536)], max_positions=8192) == 1, "one row exceeds the limit"
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [FORMS, ROTATION, MODEL, CHOICE], ids=["forms", "rotation", "model", "choice"])
def test_latent_attention_in_the_interpreter(program: str) -> None:
    run_interpreted(PREPARED + program)
