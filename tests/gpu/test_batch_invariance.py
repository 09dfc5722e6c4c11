"""With ``enable_deterministic_inference``, the results of a row on a GPU have the same bits in any batch."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch

from aioengine import models
from aioengine.attention._base import AttentionShape, kv_pool_shape
from aioengine.kernels.codes import FP8
from aioengine.models._base import ModelOptions
from aioengine.protocol.messages import Sampling
from aioengine.runner import weights
from aioengine.runner.inputs import model_inputs
from tests.compute.runner_world import World, make_settings, save_model
from tests.compute.stepping import make_batch, write_and_attend
from tests.gpu.test_model_runner import on_device

PAGE_SIZE = 16
HEADS = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
PROMPTS = [[(11 * i + 5 * j) % 290 + 1 for j in range(4 + 11 * i)] for i in range(12)]
SAMPLINGS = [Sampling(i, temperature=0.0 if i % 4 == 0 else 1.0) for i in range(len(PROMPTS))]
LENGTH = 1100

Rows = list[tuple[int, int]]

WAYS: dict[str, Rows] = {
    "the first split of it": [(0, 700)],
    "the rest": [(700, 400)],
    "its last token": [(1099, 1)],
    "a few tokens": [(i, 1) for i in range(0, LENGTH, 100)],
    "many tokens": [(i, 1) for i in range(300, 500)],
    "tokens and splits": [(0, 33), (500, 77), (1000, 1), (255, 2)],
}


LONG = 40_000
LONG_WAYS: dict[str, Rows] = {
    "in two": [(0, 9000)],
    "the rest": [(9000, LONG - 9000)],
    "its last token": [(LONG - 1, 1)],
    "tokens on both sides of the splits": [(i, 1) for i in (0, 8191, 8192, 8193, 16383, 16384, 20_000, 32_768)],
    "many tokens": [(i, 1) for i in range(100, LONG, 400)],
}


def positions_of(rows: Rows) -> torch.Tensor:
    return torch.cat([torch.arange(start, start + count, device="cuda") for start, count in rows])


def check_attention(
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    *,
    length: int,
    ways: dict[str, Rows],
    window: int | None = None,
    is_fp8: bool = False,
) -> None:
    """Check that each position of a row has the same bits in any batch and chunks."""
    from aioengine.attention.triton import build

    shape = AttentionShape(
        num_layers=1, num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, scale=head_size**-0.5,
        windows=(window,), soft_cap=None if window is None else 3.0,
        sinks=() if window is None else (torch.randn(num_heads, device="cuda"),),
        dtype=dtype, kv_scales=(torch.tensor([0.25, 0.6], device="cuda"),) if is_fp8 else (),
    )  # fmt: skip
    num_pages = length // PAGE_SIZE + 10
    size = kv_pool_shape(shape, num_pages=num_pages, page_size=PAGE_SIZE)
    pool = torch.full(size, torch.nan, device="cuda", dtype=dtype).to(FP8 if is_fp8 else dtype)  # not written yet
    heads = torch.randn(length, num_heads + 2 * num_kv_heads, head_size, device="cuda", dtype=dtype)
    table = (torch.randperm(num_pages - 1) + 1).tolist()
    attention = build(shape, pool)

    def attended(rows: Rows) -> torch.Tensor:
        batch = on_device(make_batch(rows, [table] * len(rows), PAGE_SIZE), torch.device("cuda"))
        q, k, v = heads[positions_of(rows)].split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        attention.prepare(batch)
        return write_and_attend(attention, q, k, v, 0)

    whole = attended([(0, length)]).clone()
    for way, rows in ways.items():
        expected = torch.cat([whole[start : start + count] for start, count in rows])
        assert torch.equal(attended(rows), expected), way


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "dtype"),
    [
        (16, 8, 128, torch.bfloat16),
        (32, 8, 128, torch.float16),
        (14, 2, 32, torch.bfloat16),
        (4, 4, 80, torch.bfloat16),
        (71, 1, 64, torch.bfloat16),
        (8, 4, 256, torch.bfloat16),
        (4, 2, 128, torch.float32),
    ],
)
def test_attention_does_not_depend_on_the_batch(
    num_heads: int, num_kv_heads: int, head_size: int, dtype: torch.dtype
) -> None:
    check_attention(num_heads, num_kv_heads, head_size, dtype, length=LENGTH, ways=WAYS)


def test_attention_of_long_rows_does_not_depend_on_the_batch() -> None:
    check_attention(16, 8, 128, torch.bfloat16, length=LONG, ways=LONG_WAYS)


@pytest.mark.parametrize("window", [1, 100, 5000])
def test_attention_with_windows_caps_and_sinks_does_not_depend_on_the_batch(window: int) -> None:
    check_attention(16, 8, 128, torch.bfloat16, length=LENGTH, ways=WAYS, window=window)
    check_attention(8, 4, 64, torch.bfloat16, length=LONG, ways=LONG_WAYS, window=window)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_model(request.param, path, dtype=torch.bfloat16, **HEADS)
    return path


def test_logits_do_not_depend_on_the_batch(folder: Path) -> None:
    from aioengine.attention.triton import build

    device = torch.device("cuda")
    options = ModelOptions(dtype=torch.bfloat16, device=device, max_positions=256, batch_invariant=True)
    model = models.build(json.loads((folder / "config.json").read_bytes()), options)
    weights.load(model, folder, load_format="auto", seed=0, report=lambda *_: None)
    shape = kv_pool_shape(model.attention_shape, num_pages=64, page_size=PAGE_SIZE)
    attention = build(model.attention_shape, torch.zeros(shape, dtype=torch.bfloat16, device=device))
    ids = torch.tensor([(7 * i) % 290 + 1 for i in range(200)], device=device)
    tables = [list(range(1 + 14 * row, 15 + 14 * row)) for row in range(4)]

    def logits(rows: Rows) -> torch.Tensor:
        batch = on_device(make_batch(rows, tables[: len(rows)], PAGE_SIZE), device)
        attention.prepare(batch)
        positions = positions_of(rows)
        return model.compute_logits(model.forward(model_inputs(model, ids[positions], positions), attention))

    whole = logits([(0, 200)]).clone()
    splits = [logits([rows]).clone() for rows in ((0, 33), (33, 66), (99, 1), (100, 1), (101, 99))]
    assert torch.equal(torch.cat(splits), whole)
    together = logits([(0, 200), (0, 7), (0, 1), (0, 130)])
    assert torch.equal(together, torch.cat((whole, whole[:7], whole[:1], whole[:130])))


def world(folder: Path, *, graphs: int = 16, chunk_tokens: int = 512, num_pages: int = 256) -> World:
    settings = make_settings(
        folder, dtype="bfloat16", depth=1, page_size=PAGE_SIZE, chunk_tokens=chunk_tokens, num_pages=num_pages
    )
    runner = msgspec.structs.replace(
        settings.runner,
        device="cuda",
        attention_backend="triton",
        batch_invariant=True,
        cuda_graph_max_rows=graphs,
    )
    return World(msgspec.structs.replace(settings, runner=runner))


def test_tokens_do_not_depend_on_the_batch(folder: Path) -> None:
    """Prompts run alone, together, with prefix hits, in small chunks, without graphs, and with preemptions."""
    plain = world(folder)
    pairs = zip(PROMPTS, SAMPLINGS, strict=True)
    alone = [plain.answers([prompt], [sampling], max_new_tokens=24)[0] for prompt, sampling in pairs]
    plain.num_cached.clear()
    assert plain.answers(PROMPTS, SAMPLINGS, max_new_tokens=24) == alone
    assert sum(plain.num_cached.values()) > 0
    plain.runner.close()
    for changes in ({"chunk_tokens": 24}, {"graphs": 0}, {"num_pages": 40}):
        other = world(folder, **changes)
        assert other.answers(PROMPTS, SAMPLINGS, max_new_tokens=24) == alone, changes
        assert bool(other.num_preemptions) == ("num_pages" in changes)
        other.runner.close()
