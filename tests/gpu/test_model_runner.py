"""The runner under the real scheduler: graphs and eager, overlap or not, FlashInfer and torch, and transformers."""

from __future__ import annotations

import copy
from pathlib import Path

import msgspec
import pytest
import torch

from aioengine.protocol.messages import Sampling
from tests.compute.runner_world import World, make_settings, save_model

HEADS = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_model(request.param, folder, dtype=torch.bfloat16, **HEADS).float().cuda()


PROMPTS = [[(7 * i + 3 * j) % 290 + 1 for j in range(3 + 5 * i)] for i in range(12)]


def run(folder: Path, samplings: list[Sampling], *, depth: int, graphs: int, backend: str) -> list[list[int]]:
    settings = make_settings(folder, dtype="bfloat16", depth=depth, page_size=16)
    runner = msgspec.structs.replace(
        settings.runner, device="cuda", attention_backend=backend, cuda_graph_max_rows=graphs
    )
    world = World(msgspec.structs.replace(settings, runner=runner))
    uids = [
        world.submit(prompt, sampling, max_new_tokens=24) for prompt, sampling in zip(PROMPTS, samplings, strict=True)
    ]
    for _ in range(500):
        if not world.core.has_work:
            break
        world.step()
    world.runner.close()
    return [world.outputs[uid] for uid in uids]


def check(found: list[list[int]], expected: list[list[int]], model: torch.nn.Module) -> None:
    """Equal, or parted where the two tokens are so near in fp32 that rounding in bf16 may change their places: each
    of the two logits of ours and of theirs may be off by as much as transformers' own in bf16 are.
    """
    rounded = copy.deepcopy(model).bfloat16()
    for prompt, ours, theirs in zip(PROMPTS, found, expected, strict=True):
        assert len(ours) == len(theirs) == 24
        place = next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
        if place is None:
            continue
        ids = torch.tensor([[*prompt, *theirs[:place]]], device="cuda")
        logits = model(ids).logits[0, -1]
        rounding = float((rounded(ids).logits[0, -1].float() - logits).abs().max())
        gap = float((logits[theirs[place]] - logits[ours[place]]).abs())
        message = f"token {place} of prompt {prompt[:5]}: {ours[place]} for {theirs[place]}, {gap=} {rounding=}"
        assert gap < 4 * rounding, message


def greedy() -> list[Sampling]:
    return [Sampling(i, temperature=0.0) for i in range(len(PROMPTS))]


def test_greedy_against_transformers(model: tuple[Path, torch.nn.Module]) -> None:
    folder, reference = model
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device="cuda")
        out = reference.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0, use_cache=True)
        expected.append(out[0, len(prompt) :].tolist())
    for backend, graphs in (("flashinfer", 0), ("flashinfer", 16), ("torch", 0)):
        check(run(folder, greedy(), depth=1, graphs=graphs, backend=backend), expected, reference)


def test_overlap_changes_nothing(model: tuple[Path, torch.nn.Module]) -> None:
    folder, _ = model
    samplings = [Sampling(i, temperature=0.8) for i in range(len(PROMPTS))]
    apart = run(folder, samplings, depth=0, graphs=16, backend="flashinfer")
    assert run(folder, samplings, depth=1, graphs=16, backend="flashinfer") == apart


def test_rows_that_need_more_than_a_temperature(model: tuple[Path, torch.nn.Module]) -> None:
    folder, _ = model
    samplings = [
        Sampling(i, temperature=0.7, top_k=20 if i % 2 else -1, repetition_penalty=1.2 if i % 3 else 1.0)
        for i in range(len(PROMPTS))
    ]
    with_graphs = run(folder, samplings, depth=1, graphs=16, backend="flashinfer")
    without = run(folder, samplings, depth=0, graphs=0, backend="flashinfer")
    same = sum(ours == theirs for ours, theirs in zip(with_graphs, without, strict=True))
    assert same >= len(PROMPTS) // 2
