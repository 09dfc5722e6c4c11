"""Numbers that are not finite are removed from pages of failed rows after the step in flight."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from aioengine.kernels import clean_pages
from aioengine.protocol.messages import Sampling
from aioengine.runner.build import build
from aioengine.scheduler.plan import TOKENS, NewRow, Row, StepPlan
from tests.compute.runner_world import make_settings, save_model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("page_size", [1, 16])
def test_kernel_cleans_pages(dtype: torch.dtype, page_size: int) -> None:
    pool = torch.randn(3, 2, 9, 2, page_size, 24, device="cuda", dtype=dtype)
    pool[torch.rand(pool.shape, device="cuda") < 0.1] = torch.nan
    pool[torch.rand(pool.shape, device="cuda") < 0.1] = -torch.inf
    expected = pool.cpu()
    marks = torch.tensor([5, -1, 0, -1])
    rows = torch.tensor([[1, 0, 2], [2, 2, 1], [3, 3, 0], [0, 3, 2]], dtype=torch.int32)
    page_ids = torch.tensor([4, 7, 1, 2, 3], dtype=torch.int32)
    clean_pages.clean_pages(expected, marks, rows, page_ids)
    assert expected[:, :, [4, 7]].isfinite().all()
    assert not expected[:, :, 1].isfinite().all()
    clean_pages.clean_pages(pool, marks.cuda(), rows.cuda(), page_ids.cuda())
    assert torch.equal(pool.cpu().nan_to_num(), expected.nan_to_num())
    assert torch.equal(pool.cpu().isfinite(), expected.isfinite())


@pytest.mark.parametrize("backend", ["torch", "triton", "flashinfer"])
@pytest.mark.parametrize("graphs", [0, 4])
def test_next_owner_of_a_page_reads_finite_numbers(tmp_path: Path, backend: str, graphs: int) -> None:
    """A row fails in the step in flight while its page is allocated to another request."""
    heads = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
    save_model("qwen3", tmp_path, dtype=torch.bfloat16, **heads)
    engine_settings = make_settings(tmp_path, dtype="bfloat16", depth=1, page_size=16)
    settings = msgspec.structs.replace(
        engine_settings.runner, device="cuda", attention_backend=backend, cuda_graph_max_rows=graphs
    )
    runner = build(msgspec.structs.replace(engine_settings, runner=settings), lambda _: None)
    runner._model._embedding.weight[77] = torch.nan  # pyright: ignore
    greedy = Sampling(0, temperature=0.0)
    first = runner.launch(StepPlan([Row(4, 0, 2, TOKENS, [5, 6])], [NewRow(4, greedy, 2, [5, 6], [9])]))
    expected = runner.collect(first).tokens.token_ids
    opened = [NewRow(1, greedy, 3, [5, 6, 6], [1]), NewRow(2, greedy, 1, [5], [2])]
    runner.collect(runner.launch(StepPlan([Row(1, 0, 3, TOKENS, [5, 6, 6])], opened, closed=[4])))
    runner._table.last_tokens[runner._table.requests[1].row_index] = 77
    bad = runner.launch(StepPlan([Row(1, 3, 1, TOKENS)]))
    opened = [NewRow(3, greedy, 2, [5, 6], [1])]
    good = runner.launch(StepPlan([Row(3, 0, 2, TOKENS, [5, 6])], opened, closed=[1, 2]))
    assert "non-finite" in runner.collect(bad).failed[1]
    result = runner.collect(good)
    assert (result.tokens.token_ids, result.failed) == (expected, {})
    assert runner._pools[0].tensors[0][:, :, 1:].isfinite().all()
    runner.close()
