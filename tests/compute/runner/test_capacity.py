"""The size of the pool, and the same sizes in ``plan()``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from msgspec.structs import replace

from aioengine.attention._base import AttentionShape
from aioengine.runner.device_memory import PoolBudget, fit_pool, kv_cache_of
from aioengine.settings.memory_model import PoolDemand
from aioengine.settings.page_groups import PageGroups
from aioengine.settings.planning import plan
from tests.compute.runner_world import World, make_settings, save_model
from tests.kit.tiny_sizes import CONTEXT_LENGTH

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30
DEMAND = PoolDemand(
    num_tokens=None,
    groups=PageGroups(windows=(None,), page_size=16),
    page_bytes=16 * 1024,
    context_length=2048,
    max_running=1 << 20,
)


def test_kv_cache_of_an_attention_shape() -> None:
    shape = AttentionShape(num_layers=3, num_heads=8, num_kv_heads=2, head_size=64, scale=1.0)
    assert kv_cache_of(shape).elements_per_token == 2 * 3 * 2 * 64


def budget(num_bytes: int) -> PoolBudget:
    return PoolBudget(num_bytes, "this is the explanation")


def test_pool_uses_the_budget() -> None:
    assert fit_pool(DEMAND, budget(GIB)).num_pages == GIB // (16 * 1024)


def test_pool_without_memory_for_one_context_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"capacity of 2032 tokens.*2048.*need 2\.0 MiB; this is the explanation\. Lower context_length",
    ):
        fit_pool(DEMAND, budget((2 << 20) - 1))
    assert fit_pool(DEMAND, budget(2 << 20)).num_pages == 128


def test_requested_pool_that_does_not_fit_is_refused() -> None:
    requested = replace(DEMAND, num_tokens=48)
    assert fit_pool(requested, budget(GIB)).num_pages == 3
    with pytest.raises(
        ValueError, match=r"48 tokens needs 48\.0 KiB, but only 1\.0 KiB are available; this.*Lower max_total_tokens"
    ):
        fit_pool(requested, budget(1024))


def test_states_of_one_request_must_fit() -> None:
    states = replace(DEMAND, state_bytes=600 << 10, has_snapshots=True, max_running=3)
    assert fit_pool(states, budget(GIB)).num_rows == 3
    with pytest.raises(
        ValueError, match=r"states of one request.*need 600\.0 KiB.*only 1\.0 MiB are available.*Lower max_total_tokens"
    ):
        fit_pool(states, budget(2 << 20))
    with pytest.raises(
        ValueError,
        match=r"the states of 1 request need 1\.2 MiB, and their 0 snapshots 0\.0 KiB\. Lower context_length",
    ):
        fit_pool(states, budget(3 << 20))


WINDOWS: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": 20},
    "qwen3": {
        "use_sliding_window": True,
        "sliding_window": 20,
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", *["sliding_attention"] * 3],
    },
}


@pytest.mark.parametrize("family", WINDOWS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plan_has_the_sizes_of_the_engine(tmp_path: Path, family: str, dtype: str) -> None:
    save_model(family, tmp_path, dtype=torch.float32, **WINDOWS[family])
    facts = World(make_settings(tmp_path, dtype=dtype, page_size=16, num_pages=64)).runner.facts
    planned = plan(tmp_path, device="cpu", dtype=dtype, page_size=16, max_total_tokens=1024)
    assert planned.weights_bytes == facts["weights_bytes"]
    assert (planned.kv_pool_bytes, planned.max_total_tokens) == (facts["kv_pool_bytes"], facts["max_total_tokens"])
    assert planned.max_requests == 1024 // CONTEXT_LENGTH
