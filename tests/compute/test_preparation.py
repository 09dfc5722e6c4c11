"""What a GPU sees before its first request, with models on the CPU."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from aioengine.layers.linear import Linear
from aioengine.runner import preparation
from aioengine.runner.model_runner import build
from tests.compute.runner_world import FAMILIES, make_settings, save_model


@pytest.mark.parametrize("family", FAMILIES)
def test_the_products_of_a_block_see_every_number_of_tokens(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(family, tmp_path)
    seen: list[tuple[int, ...]] = []
    plain = Linear.finish_loading

    def finish_loading(layer: Linear) -> None:
        shape = layer._tensors["weight"].shape
        plain(layer)
        product = layer._product
        assert product is not None

        def watched(x: Tensor) -> Tensor:
            seen.append((x.shape[0], *shape))
            return product(x)

        layer._product = watched

    monkeypatch.setattr(Linear, "finish_loading", finish_loading)
    runner = build(make_settings(tmp_path), lambda _: None)
    seen.clear()
    pool = runner._kv_pool.tensor.clone()
    preparation.see_token_counts(runner._model, (7, 300))
    shapes = (128, 64), (64, 64), (192, 64), (64, 96)  # q, k and v; output; gate and up; down
    assert seen == [(num_tokens, *shape) for num_tokens in (7, 300) for shape in shapes]
    assert torch.equal(runner._kv_pool.tensor, pool)
    runner.close()


@pytest.mark.parametrize(("graphs", "longest"), [(0, 0), (8, 2500)])
def test_the_longest_graph(graphs: int, longest: int) -> None:
    settings = make_settings("", chunk_tokens=8192)
    settings = msgspec.structs.replace(
        settings, runner=msgspec.structs.replace(settings.runner, cuda_graph_max_rows=graphs)
    )
    assert preparation.longest_graph(settings, 4_000_000_000, torch.bfloat16) == longest
    few = preparation.longest_graph(settings, 4_000_000, torch.bfloat16)
    assert few == (settings.scheduler.max_step_tokens if graphs else 0)


def test_token_counts_of_steps_without_graphs() -> None:
    assert list(preparation.token_counts(700, 622)) == [700, 669, 638]
    assert list(preparation.token_counts(8192, 8192)) == []
    assert max(preparation.token_counts(131_072, 0)) == 8192, "a start is not to take minutes"
