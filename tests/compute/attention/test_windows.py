"""Models with sliding windows through the whole runner: chunks, prefix hits and preemption, against transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.compute.runner_world import World, make_settings, save_model

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
}
START = [(7 * i) % 250 + 1 for i in range(60)]
PROMPTS = [START[:9], START, [*START[:45], *range(100, 120)], [*range(30, 100)], [*START, *range(5, 50)]]
NUM_NEW = 60


@pytest.fixture(scope="module", params=MODELS)
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A folder, and what transformers answers to ``PROMPTS``."""
    family, fields = MODELS[request.param]
    folder = tmp_path_factory.mktemp("windowed")
    model = save_model(family, folder, **fields)
    answers: list[list[int]] = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        output = model.generate(ids, max_new_tokens=NUM_NEW, do_sample=False)  # type: ignore[operator]
        answers.append(output[0, len(prompt) :].tolist())
    return folder, answers


@pytest.mark.parametrize(("page_size", "chunk_tokens"), [(16, 23), (1, 60)])
def test_answers_are_those_of_transformers(
    windowed: tuple[Path, list[list[int]]], page_size: int, chunk_tokens: int
) -> None:
    folder, expected = windowed
    world = World(make_settings(folder, page_size=page_size, num_pages=1000 // page_size, chunk_tokens=chunk_tokens))
    assert world.answers(PROMPTS, max_new_tokens=NUM_NEW) == expected
    again = [world.answers([prompt], max_new_tokens=NUM_NEW)[0] for prompt in PROMPTS]
    assert again == expected, "each finds pages of the first time"
    assert any(world.num_cached.values())


def test_answers_of_preempted_requests_are_the_same(windowed: tuple[Path, list[list[int]]]) -> None:
    folder, expected = windowed
    world = World(make_settings(folder, page_size=4, num_pages=50, chunk_tokens=40))
    assert world.answers(PROMPTS, max_new_tokens=NUM_NEW) == expected
    assert world.num_preemptions
