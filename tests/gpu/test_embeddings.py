"""Bidirectional attention and vectors of a runner on a GPU, compared with the CPU in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from msgspec.structs import replace
from transformers import BertConfig, ModernBertConfig

from aioengine.attention._base import AttentionShape
from aioengine.attention.packed import PackedAttention
from tests.compute.models.test_encoders import SPECIAL
from tests.compute.runner.test_pooling import PROMPTS, PoolWorld, saved, settings_for
from tests.compute.stepping import make_batch

if TYPE_CHECKING:
    from pathlib import Path

LENGTHS = [7, 300, 1, 64, 64, 500]
HEADS, HEAD_SIZE = 4, 64
WIDE = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("windows", [(), (None, 16)])
def test_attention_of_packed_rows_is_that_of_a_cpu(dtype: torch.dtype, windows: tuple[int | None, ...]) -> None:
    shape = AttentionShape(
        num_layers=2,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_size=HEAD_SIZE,
        scale=HEAD_SIZE**-0.5,
        is_causal=False,
        windows=windows,
    )
    torch.manual_seed(0)
    heads = torch.randn(3, sum(LENGTHS), HEADS, HEAD_SIZE)
    batch = make_batch([(0, length) for length in LENGTHS], [[0] * length for length in LENGTHS], 1)
    actual = PackedAttention(shape, torch.empty(0, dtype=dtype, device="cuda"))
    expected = PackedAttention(shape, torch.empty(0))
    for layer in range(2):
        for attention in (expected, actual):
            attention.prepare(batch)
        wanted = expected.attend(*heads.to(dtype).float(), layer)
        close = actual.attend(*heads.to(dtype).cuda(), layer).float().cpu()
        torch.testing.assert_close(close, wanted, atol=2e-2 if dtype != torch.float32 else 1e-5, rtol=1e-2)


@pytest.mark.parametrize("graphs", [0, 8])
@pytest.mark.parametrize("kind", ["cls", "mean"])
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_vectors_equal_the_cpu(family: str, kind: str, graphs: int, tmp_path: Path) -> None:
    config = BertConfig(**WIDE) if family == "bert" else ModernBertConfig(**WIDE, **SPECIAL, local_attention=12)
    saved(config, tmp_path)
    settings = settings_for(tmp_path, "embed", kind)
    expected = PoolWorld(settings).vectors_of(PROMPTS)
    for dtype, least in (("float32", 0.99999), ("bfloat16", 0.99)):
        runner = replace(settings.runner, device="cuda", cuda_graph_max_rows=graphs)
        world = PoolWorld(replace(settings, runner=runner, model=replace(settings.model, dtype=dtype)))
        assert (world.runner.prompt_graphs is not None) == (graphs > 0 and dtype == "bfloat16")
        for wanted, actual in zip(expected, world.vectors_of(PROMPTS), strict=True):
            assert torch.cosine_similarity(wanted, actual, dim=0) > least
