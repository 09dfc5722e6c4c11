"""Models with sliding windows, run with chunks, prefix hits and preemption, match transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from aioengine.protocol.packed_logprobs import LogprobRules
from tests.compute.runner_world import World, make_settings, save_model
from tests.kit.integrity import check_scheduler
from tests.kit.tiny_sizes import CONTEXT_LENGTH

if TYPE_CHECKING:
    from pathlib import Path

MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "in all layers": ("mistral", {"sliding_window": 10}),
    "in upper layers": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "in every other layer": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 16,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gemma3": ("gemma3_text", {"sliding_window": 9, "num_hidden_layers": 4, "tie_word_embeddings": False}),
    "gpt_oss": ("gpt_oss", {"sliding_window": 6, "num_hidden_layers": 4}),
}
WITH_GROUPS = {"in all layers": 1, "in upper layers": 2, "in every other layer": 2, "gemma3": 4, "gpt_oss": 2}
"""Number of page tables of each model."""
START = [(7 * i) % 250 + 1 for i in range(60)]
PROMPTS = [START[:9], START, [*START[:45], *range(100, 120)], [*START, *range(5, 50)]]
NUM_NEW = 24


@dataclass(frozen=True)
class Windowed:
    """A model folder, the answers of transformers to ``PROMPTS``, and the number of page tables."""

    folder: Path
    answers: list[list[int]]
    num_groups: int


@pytest.fixture(scope="module", params=MODELS)
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Windowed:
    family, fields = MODELS[request.param]
    folder = tmp_path_factory.mktemp("windowed")
    model = save_model(family, folder, dtype=torch.float32, **fields)
    answers: list[list[int]] = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        output = model.generate(ids, max_new_tokens=NUM_NEW, do_sample=False)  # type: ignore[operator]
        answers.append(output[0, len(prompt) :].tolist())
    return Windowed(folder, answers, WITH_GROUPS[request.param])


def run(world: World) -> tuple[list[list[int]], list[list[bytes]]]:
    """Return the answers to ``PROMPTS`` and their packed logprobs."""
    rules = LogprobRules(num_top=3)
    uids = [world.submit(prompt, max_new_tokens=NUM_NEW, logprobs=rules) for prompt in PROMPTS]
    world.run()
    return [world.outputs[uid] for uid in uids], [[extra.data for extra in world.extras[uid]] for uid in uids]


def test_answers_match_transformers_and_do_not_depend_on_pages(windowed: Windowed) -> None:
    world = World(make_settings(windowed.folder, page_size=16, num_pages=62, chunk_tokens=23))
    assert str(world.runner.facts["page_windows"]).count(" ") == windowed.num_groups - 1
    answers, bits = run(world)
    assert answers == windowed.answers
    assert run(world) == (answers, bits)
    assert any(world.num_cached.values()), "no prefix hits in the second run"
    other = World(make_settings(windowed.folder, page_size=1, num_pages=1000, chunk_tokens=60))
    assert run(other) == (answers, bits)


@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_preemption_does_not_change_answers(windowed: Windowed, depth: int) -> None:
    """The pool has pages for one request of the context length."""
    num_pages = CONTEXT_LENGTH // 4
    world = World(make_settings(windowed.folder, page_size=4, num_pages=num_pages, chunk_tokens=40, depth=depth))
    uids = [world.submit(prompt, max_new_tokens=NUM_NEW) for prompt in PROMPTS]
    num_steps = 0
    while world.core.has_work:
        world.step()
        num_steps += 1
        if num_steps % 13 == 0 and world.core.requests.running:
            world.core.requests.preempt()
    assert [world.outputs[uid] for uid in uids] == windowed.answers
    assert world.num_preemptions
    check_scheduler(world.core.scheduler)


def test_windows_save_pages(windowed: Windowed) -> None:
    """Requests with ``max_total_tokens`` tokens in total run concurrently, with fewer pages."""
    world = World(make_settings(windowed.folder, page_size=4, num_pages=4 * CONTEXT_LENGTH // 4, chunk_tokens=64))
    num_pages, tokens = world.runner.facts["num_pages"], world.runner.facts["max_total_tokens"]
    assert tokens == 4 * CONTEXT_LENGTH
    assert isinstance(num_pages, int)
    assert num_pages < 4 * CONTEXT_LENGTH // 4 * windowed.num_groups
    for i in range(4):
        world.submit([i, *range(2, 200)], max_new_tokens=20)
    world.run()
    assert not world.num_preemptions
