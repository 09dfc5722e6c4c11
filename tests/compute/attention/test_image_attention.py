"""Bidirectional attention within images matches a mask, and does not depend on the prefix hit."""

from __future__ import annotations

import pytest
import torch

from aioengine.attention import _image_attention, _mixed
from aioengine.attention._base import AttentionBackend, AttentionShape, BidirectionalImage, ForwardBatch
from aioengine.attention.fused import FusedAttention
from aioengine.attention.torch import TorchAttention
from tests.compute.stepping import write_and_attend

NUM_TOKENS, START, STOP, PAGE_SIZE = 46, 9, 33, 4
WINDOWS = (11, None, 40)
SHAPE = AttentionShape(
    num_layers=3, num_heads=4, num_kv_heads=2, head_size=16, scale=0.3, windows=WINDOWS, has_bidirectional_images=True
)
PAGES = torch.tensor([[3, 1, 7, 2, 9, 4, 12, 5, 8, 6, 11, 10]], dtype=torch.int32)


def attention(plugin: type[TorchAttention] | type[FusedAttention]) -> AttentionBackend:
    pools = [torch.zeros(len(layers), 2, 13, 2, PAGE_SIZE, 16) for layers in SHAPE.groups]
    return _image_attention.build(_mixed.build(plugin, SHAPE, pools), SHAPE, pools)


def outputs(backend: AttentionBackend, heads: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Attend in each layer for tokens ``first`` to ``last``. heads: [L, T, 8, 16], 4 of q, 2 of k, 2 of v."""
    positions = torch.arange(first, last)
    image = BidirectionalImage(0, max(START - first, 0), max(START, first), STOP)
    batch = ForwardBatch(
        slot_mapping=PAGES[0, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE,
        page_table=PAGES,
        query_lengths=[last - first],
        kv_lengths=[last],
        bidirectional_images=[image] if first < STOP and last > START else [],
    )
    backend.prepare(batch)
    results: list[torch.Tensor] = []
    for layer, layer_heads in enumerate(heads[:, first:last]):
        q, k, v = layer_heads.split((4, 2, 2), 1)
        results.append(write_and_attend(backend, q, k, v, layer))
    return torch.stack(results)


@pytest.mark.parametrize("plugin", [TorchAttention, FusedAttention])
def test_image_tokens_attend_to_the_whole_image(plugin: type[TorchAttention] | type[FusedAttention]) -> None:
    torch.manual_seed(0)
    heads = torch.randn(3, NUM_TOKENS, 8, 16)
    backend = attention(plugin)
    whole = outputs(backend, heads, 0, NUM_TOKENS)
    token, position = torch.arange(NUM_TOKENS).unsqueeze(1), torch.arange(NUM_TOKENS)
    inside = (token >= START) & (token < STOP) & (position >= START) & (position < STOP)
    for layer, window in enumerate(WINDOWS):
        mask = (position <= token) | inside
        if window is not None:
            mask &= position > token - window
        q, k, v = (part.transpose(0, 1) for part in heads[layer].split((4, 2, 2), 1))
        wanted = torch.nn.functional.scaled_dot_product_attention(
            q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0), attn_mask=mask, scale=SHAPE.scale
        )
        torch.testing.assert_close(whole[layer], wanted.transpose(0, 1).flatten(1), atol=1e-5, rtol=1e-5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_is_on_gpu", True)
        torch.testing.assert_close(outputs(backend, heads, 0, NUM_TOKENS), whole, atol=1e-5, rtol=1e-5)
    for first in (START, START + 3, START + 16, STOP):  # a prefix hit may end within the image
        assert torch.equal(outputs(backend, heads, first, NUM_TOKENS), whole[:, first:])
