"""Prompts given as embeddings return the same tokens and numbers as their token ids, in any batch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from aioengine.protocol.columns import HIDDEN_STATES, PROMPT_STATES
from aioengine.protocol.messages import ALL_STATES, FinishCode, Sampling
from aioengine.protocol.packed_logprobs import OUTPUT_LOGPROBS, LogprobRules
from tests.compute.runner_world import World, make_settings, save_model
from tests.kit.tiny_sizes import VOCAB_SIZE

PROMPTS = [[(7 * i * i + 3 * i + k) % VOCAB_SIZE for i in range(length)] for k, length in enumerate((41, 1, 9, 30))]
PLAIN = Sampling(3, temperature=0.0)
SAMPLINGS = [
    Sampling(1, temperature=0.0, hidden_states=ALL_STATES),
    Sampling(2, temperature=0.9),
    Sampling(4, frequency_penalty=0.4),
    Sampling(5, temperature=0.0, bad_token_ids=((11,), (3, 4))),
]


class Saved(NamedTuple):
    """A model in fp32: its folder, and the embeddings [V, D] of its tokens."""

    folder: Path
    table: torch.Tensor

    def embeds(self, token_ids: list[int]) -> bytes:
        return self.table[token_ids].float().numpy().tobytes()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("qwen3")
    return Saved(folder, save_model("qwen3", folder).get_input_embeddings().weight.detach())


def run(saved: Saved, world: World, *, embeds: bool, max_new_tokens: int = 12) -> tuple[list[list[int]], list[object]]:
    """Return the tokens and extras of prompts given as ids or as embeddings."""
    rules = LogprobRules(num_top=3)
    uids = [
        world.submit(
            [0] * len(prompt) if embeds else prompt,
            sampling,
            max_new_tokens=max_new_tokens,
            logprobs=rules,
            embeds=saved.embeds(prompt) if embeds else b"",
        )
        for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)
    ]
    world.run()
    extras = [[(extra.index, extra.kind, extra.data) for extra in world.extras[uid]] for uid in uids]
    return [world.outputs[uid] for uid in uids], [sorted(extras_of_row) for extras_of_row in extras]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("chunk_tokens", "depth"), [(512, 0), (7, 0), (16, 1)])
def test_embeddings_return_the_same_bits_as_token_ids(saved: Saved, chunk_tokens: int, depth: int, dtype: str) -> None:
    settings = make_settings(saved.folder, chunk_tokens=chunk_tokens, depth=depth, dtype=dtype)
    by_ids = run(saved, World(settings), embeds=False)
    world = World(settings)
    plain = world.submit(PROMPTS[0], PLAIN)
    assert run(saved, world, embeds=True) == by_ids
    assert world.outputs[plain] == World(settings).answers(PROMPTS[:1], [PLAIN])[0]
    assert {kind for extras_of_row in by_ids[1] for _, kind, _ in extras_of_row} == {
        HIDDEN_STATES,
        PROMPT_STATES,
        OUTPUT_LOGPROBS,
    }  # type: ignore[attr-defined]
    assert set(world.num_cached.values()) == {0}


def test_embeddings_survive_preemption(saved: Saved) -> None:
    settings = make_settings(saved.folder, num_pages=44, chunk_tokens=24)
    expected = run(saved, World(make_settings(saved.folder)), embeds=False, max_new_tokens=40)
    world = World(settings)
    assert run(saved, world, embeds=True, max_new_tokens=40) == expected
    assert world.num_preemptions > 0


def test_penalties_count_only_output_tokens(saved: Saved) -> None:
    penalized = Sampling(6, temperature=0.0, repetition_penalty=1.5)
    world = World(make_settings(saved.folder))
    [plain] = world.answers([PROMPTS[0]], [PLAIN], max_new_tokens=2)
    uid = world.submit([0] * 41, penalized, max_new_tokens=1, embeds=saved.embeds(PROMPTS[0]))
    world.run()
    assert world.outputs[uid] == plain[:1]


def test_embeddings_of_wrong_width_fail_only_their_request(saved: Saved) -> None:
    world = World(make_settings(saved.folder))
    bad = world.submit([0] * 4, PLAIN, embeds=bytes(4 * 10))
    assert world.answers(PROMPTS[:1], [PLAIN]) == World(make_settings(saved.folder)).answers(PROMPTS[:1], [PLAIN])
    assert world.ended[bad].code is FinishCode.FAILED
