"""LoRA adapters on a GPU: the kernels, graphs against eager steps, and deterministic mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
import torch

from aioengine.kernels import linear
from aioengine.kernels.adapter_types import RANK_UNIT, TABLE_COLUMNS, UNIT, AdapterTiles, AdapterWeights, rows_of_tile
from aioengine.layers.adapters import PooledAdapters
from aioengine.protocol.messages import Adapter, Sampling
from aioengine.runner.build import build
from aioengine.runner.lora.grouping import tile
from aioengine.scheduler.plan import NOTHING, TOKENS, NewRow, Row, StepPlan
from aioengine.settings.config import LoraSettings
from tests.compute.adapter_reference import add_adapters
from tests.compute.runner_world import make_settings, save_model
from tests.kit.adapter_files import write_adapter

if TYPE_CHECKING:
    from pathlib import Path

    from aioengine.runner.model_runner import ModelRunner

NUM_SLOTS = 3
HEADS = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
"""Sizes that FlashInfer's kernels serve."""


class Given:
    """A matmul that returns a given result."""

    def __init__(self, y: torch.Tensor) -> None:
        self._y = y

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._y.clone()


def weights_of(size: int, sizes: tuple[int, ...], ranks: list[tuple[int, ...]], dtype: torch.dtype) -> AdapterWeights:
    """Return random adapters. ``ranks``: of each slot and part."""
    max_rank = max(max(ranks_of_slot) for ranks_of_slot in ranks)
    numbers = len(sizes) * max_rank * size + sum(sizes) * max_rank + 1024
    pool = torch.full((len(ranks), -(-numbers // UNIT) * UNIT), float("nan"), dtype=dtype, device="cuda")
    table = pool.view(torch.int32)
    for slot, own in enumerate(ranks):
        end = 256
        for part, (rank, outputs) in enumerate(zip(own, sizes, strict=True)):
            second = end + rank * size
            entry = torch.tensor([rank // RANK_UNIT, end // UNIT, second // UNIT, 0], device="cuda")
            table[slot, part * TABLE_COLUMNS :][:TABLE_COLUMNS] = entry
            pool[slot, end:second] = torch.randn(rank * size, device="cuda") * size**-0.5
            pool[slot, second : second + outputs * rank] = torch.randn(outputs * rank, device="cuda")
            end = second + outputs * rank
    return AdapterWeights(pool, table, 0, size, sizes, max_rank)


def tiles_of(slots: np.ndarray, *, batch_invariant: bool = False) -> AdapterTiles:
    size = rows_of_tile(len(slots), batch_invariant=batch_invariant)
    order, tile_slots = tile(slots, num_slots=NUM_SLOTS, size=size)
    return AdapterTiles(torch.from_numpy(order).cuda(), torch.from_numpy(tile_slots).cuda())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("max_rank", [16, 64, 256])
@pytest.mark.parametrize(
    ("size", "sizes", "is_gated"),
    [
        (1024, (512, 256, 256), False),
        (4096, (1000,), False),
        (14_336, (512,), False),
        (600, (300, 300), True),
        (600, (600,), True),
    ],
)
def test_adapter_kernels_equal_the_reference(
    size: int, sizes: tuple[int, ...], is_gated: bool, max_rank: int, dtype: torch.dtype
) -> None:
    ranks = [tuple(max_rank for _ in sizes), tuple(16 for _ in sizes), tuple(16 * (i % 2) for i in range(len(sizes)))]
    weights = weights_of(size, sizes, ranks, dtype)
    adapters = PooledAdapters(weights, is_gated=is_gated)
    for num_rows in (1, 19, 300):
        slots = np.random.default_rng(num_rows).integers(0, NUM_SLOTS + 1, num_rows).astype(np.int32)
        x = torch.randn(num_rows, size, device="cuda", dtype=dtype)
        y = torch.randn(num_rows, sum(sizes), device="cuda", dtype=dtype)
        tiles = tiles_of(slots)
        actual = adapters.add(Given(y), x, tiles).double()
        wide = AdapterWeights(weights.pool.double(), weights.table, 0, size, sizes, weights.max_rank)
        expected = add_adapters(y.double(), x.double(), wide, tiles, is_gated=is_gated)
        assert (actual - expected).norm() < (1e-2 if dtype == torch.bfloat16 else 1e-6) * expected.norm()


def test_row_does_not_depend_on_other_rows() -> None:
    sizes = 512, 256, 256
    ranks = [(16, 16, 16), (32, 16, 0), (16, 0, 48)]
    adapters = PooledAdapters(weights_of(1024, sizes, ranks, torch.bfloat16), is_gated=False)
    matmul = linear.prepare(torch.randn(1024, 1024, device="cuda").bfloat16(), None, batch_invariant=True)
    x = torch.randn(400, 1024, device="cuda").bfloat16()
    slots = (np.arange(400) % (NUM_SLOTS + 1)).astype(np.int32)
    whole = adapters.add(matmul, x, tiles_of(slots, batch_invariant=True))
    for chosen in (np.arange(3), np.arange(50, 90), np.array([399, 7, 250])):
        tiles = tiles_of(slots[chosen], batch_invariant=True)
        assert torch.equal(adapters.add(matmul, x[chosen], tiles), whole[chosen])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model and three adapters."""
    folder = tmp_path_factory.mktemp("adapted")
    save_model("llama", folder / "model", dtype=torch.bfloat16, **HEADS)
    return [
        folder / "model",
        *(write_adapter(folder / str(i), folder / "model", rank=8 * i + 4, seed=i) for i in range(3)),
    ]


PROMPTS = [[(7 * i + 3 * j) % 290 + 1 for j in range(3 + 5 * i)] for i in range(12)]


def runner_of(
    folders: list[Path], *, graphs: int = 0, batch_invariant: bool = False, dtype: str = "bfloat16"
) -> ModelRunner:
    settings = make_settings(folders[0], dtype=dtype, page_size=16)
    lora = LoraSettings(num_slots=NUM_SLOTS, max_rank=20)
    changed = msgspec.structs.replace(
        settings.runner, device="cuda", attention_backend="triton" if batch_invariant else "flashinfer",
        cuda_graph_max_rows=graphs, batch_invariant=batch_invariant, lora=lora,
    )  # fmt: skip
    runner = build(msgspec.structs.replace(settings, runner=changed), lambda _: None)
    for slot, path in enumerate(folders[1:], 1):
        runner.adapters.place(slot, runner.adapters.read(Adapter(slot, path.name, str(path), ""))).result(timeout=20)
    return runner


def generate(runner: ModelRunner, chosen: list[int], *, num_tokens: int = 8, chunk: int = 100) -> list[list[int]]:
    """Return greedy continuations of all prompts in one batch. Prompt i uses the adapter in slot i mod 4."""
    outputs: dict[int, list[int]] = {i: [] for i in chosen}
    starts = dict.fromkeys(chosen, 0)
    new = [
        NewRow(
            i, Sampling(i, temperature=0.0), len(PROMPTS[i]), PROMPTS[i], [*range(6 * i, 6 * i + 6)], adapter_slot=i % 4
        )
        for i in chosen
    ]
    while any(len(tokens) < num_tokens for tokens in outputs.values()):
        rows: list[Row] = []
        for uid in (uid for uid in chosen if len(outputs[uid]) < num_tokens):
            part = PROMPTS[uid][starts[uid] : starts[uid] + chunk]
            count = max(len(part), 1)
            ends = starts[uid] + count >= len(PROMPTS[uid])
            rows.append(Row(uid, starts[uid], count, TOKENS if ends else NOTHING, part))
            starts[uid] += count
        result = runner.collect(runner.launch(StepPlan(rows, new)))
        assert not result.failed, result.failed
        for uid, token in zip(result.tokens.uid_of_each(), result.tokens.token_ids, strict=True):
            outputs[uid].append(token)
        new = []
    runner.launch(StepPlan([], closed=chosen))
    return [outputs[i] for i in chosen]


def test_graphs_return_the_tokens_of_eager_steps(folders: list[Path]) -> None:
    eager, captured = runner_of(folders), runner_of(folders, graphs=16)
    expected = generate(eager, [*range(12)])
    base = [token_ids for i, token_ids in enumerate(expected) if i % 4 == 0]
    assert base != [token_ids for i, token_ids in enumerate(expected) if i % 4 == 1]
    actual = generate(captured, [*range(12)])
    num_equal = sum(a == b for a, b in zip(actual, expected, strict=True))
    assert num_equal >= 10, "more than ties of rounded logits differ"
    eager.close()
    captured.close()


def test_deterministic_mode_returns_the_same_tokens_in_any_batch(folders: list[Path]) -> None:
    runner = runner_of(folders, graphs=16, batch_invariant=True)
    together = generate(runner, [*range(12)])
    assert generate(runner, [*range(12)], chunk=7) == together
    for i in (0, 3, 5, 6, 10):
        assert generate(runner, [i]) == [together[i]]
    runner.close()
