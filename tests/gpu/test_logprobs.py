"""Logprobs on a GPU match transformers with and without CUDA graphs, also if rows share a prefix."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from aioengine.protocol.messages import Sampling
from aioengine.protocol.packed_logprobs import LogprobRules
from tests.compute.runner import test_logprobs as on_cpu
from tests.compute.runner_world import World, make_settings, save_model
from tests.gpu.test_model_runner import HEADS

PROMPT = on_cpu.PROMPT


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> on_cpu.Saved:
    folder = tmp_path_factory.mktemp("llama")
    return on_cpu.Saved(folder, save_model("llama", folder, **HEADS))


def world_of(folder: Path, *, dtype: str, backend: str, graphs: int, mode: str = "raw", depth: int = 1) -> World:
    settings = make_settings(folder, dtype=dtype, depth=depth, page_size=16)
    runner = msgspec.structs.replace(
        settings.runner, device="cuda", attention_backend=backend, cuda_graph_max_rows=graphs, logprobs_mode=mode
    )
    return World(msgspec.structs.replace(settings, runner=runner))


@pytest.mark.parametrize("graphs", [0, 32])
def test_logprobs_in_fp32_equal_transformers(saved: on_cpu.Saved, graphs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_cpu, "CLOSE", 1e-3)
    world = world_of(saved.folder, dtype="float32", backend="triton", graphs=graphs)
    plain = [world.submit(PROMPT, Sampling(3, temperature=0.8)) for _ in range(3)]
    samplings = [
        Sampling(3, temperature=0.8),
        Sampling(3, temperature=0.8, top_k=9, bias_token_ids=(7,), logit_bias=(9.0,)),
        Sampling(3, temperature=0.0, repetition_penalty=1.3),
    ]
    asked = [
        (world.submit(PROMPT, sampling, logprobs=rules), rules) for rules in on_cpu.RULES for sampling in samplings
    ]
    world.run()
    world.runner.close()
    for uid, rules in asked:
        on_cpu.check(world, uid, rules, saved)
    assert [world.extras[uid] for uid in plain] == [[]] * 3


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("graphs", [0, 32])
def test_most_likely_token_of_a_greedy_row_is_its_token(saved: on_cpu.Saved, graphs: int, mode: str) -> None:
    """Rows that share a long prefix are in another order in the graph."""
    world = world_of(saved.folder, dtype="bfloat16", backend="flashinfer", graphs=graphs, mode=mode)
    rules = LogprobRules(num_top=2)
    shared = PROMPT * 4
    uids = [world.submit([*shared, place], Sampling(1, temperature=0.0), logprobs=rules) for place in range(24)]
    world.run()
    world.runner.close()
    for uid in uids:
        lists = on_cpu.lists_of(world, uid, rules, len(shared) + 1)
        assert [token_id for _, token_id, _ in lists["output_token_logprobs"]] == world.outputs[uid]
        assert [top[0] for top in lists["output_top_logprobs"]] == lists["output_token_logprobs"]


def test_next_token_logprobs_need_no_output_token(saved: on_cpu.Saved) -> None:
    world = world_of(saved.folder, dtype="float32", backend="triton", graphs=32)
    rules = LogprobRules(start=0, num_top=3)
    uid = world.submit(PROMPT, logprobs=rules, max_new_tokens=0)
    world.run()
    world.runner.close()
    lists = on_cpu.lists_of(world, uid, rules, len(PROMPT))
    [top] = lists["output_top_logprobs"]
    expected = saved.expected(PROMPT)[-1].topk(3)
    assert [value for value, _, _ in top] == pytest.approx(expected.values.tolist(), abs=1e-3)
    assert len(lists["input_token_logprobs"]) == len(PROMPT)
    assert torch.tensor([token_id for _, token_id, _ in top]).equal(expected.indices)
