"""Hidden states of the runner equal a forward pass of transformers, with any chunks, batch and prefix hits."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from aioengine.api.answers import HiddenStateDecoder
from aioengine.protocol.columns import (
    BLOCK_BYTES,
    HIDDEN_STATES,
    PROMPT_STATES,
    Extra,
    TokenColumns,
    block_extras,
)
from aioengine.protocol.messages import ALL_STATES, LAST_STATES, MAX_PART_BYTES, Sampling, StepOutput
from aioengine.protocol.packed_logprobs import LogprobRules
from tests.compute.runner_world import World, make_settings, save_model
from tests.kit.tiny_sizes import VOCAB_SIZE

PROMPT = [(7 * i * i + 3 * i) % VOCAB_SIZE for i in range(41)]
PLAIN = Sampling(3, temperature=0.0)
ALL = Sampling(4, temperature=0.8, hidden_states=ALL_STATES)
LAST = Sampling(5, temperature=0.0, hidden_states=LAST_STATES)


class Saved(NamedTuple):
    """A model in fp32: its folder, and the model of transformers."""

    folder: Path
    theirs: torch.nn.Module

    def expected(self, token_ids: list[int]) -> torch.Tensor:
        """[T, D] after the last norm."""
        with torch.inference_mode():
            return self.theirs.model(torch.tensor([token_ids])).last_hidden_state[0]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp(request.param)
    return Saved(folder, save_model(request.param, folder))


def check(saved: Saved, world: World, uid: int, prompt: list[int], *, returns_all: bool) -> None:
    """Check that each token has one extra with the hidden state of the model."""
    output = world.outputs[uid]
    expected = saved.expected(prompt + output)
    starts = {HIDDEN_STATES: len(prompt) - 1, PROMPT_STATES: 0}
    positions: list[int] = []
    for extra in world.extras[uid]:
        actual = torch.from_numpy(np.frombuffer(extra.data, np.float32).reshape(-1, expected.shape[1]).copy())
        start = starts[extra.kind] + extra.index
        positions += range(start, start + len(actual))
        torch.testing.assert_close(actual, expected[start : start + len(actual)], atol=1e-4, rtol=1e-4)
    first = 0 if returns_all else len(prompt) - 1
    assert sorted(positions) == list(range(first, len(prompt) + len(output) - 1))


@pytest.mark.parametrize(("chunk_tokens", "depth"), [(512, 0), (7, 0), (16, 1)])
def test_hidden_states_equal_transformers_in_a_mixed_batch(saved: Saved, chunk_tokens: int, depth: int) -> None:
    world = World(make_settings(saved.folder, chunk_tokens=chunk_tokens, depth=depth))
    plain = world.answers([PROMPT, [5, 6]], [PLAIN, Sampling(9)])
    prompts = [PROMPT, [8], PROMPT[:20], PROMPT]
    uids = [world.submit(prompt, sampling) for prompt, sampling in zip(prompts, [ALL, ALL, LAST, LAST], strict=True)]
    assert world.answers([PROMPT, [5, 6]], [PLAIN, Sampling(9)]) == plain
    for uid, prompt, returns_all in zip(uids, prompts, [True, True, False, False], strict=True):
        check(saved, world, uid, prompt, returns_all=returns_all)
    assert (world.num_cached[uids[0]], world.num_cached[uids[3]]) == (0, 40)
    assert all(world.extras[uid] == [] for uid in world.extras.keys() - set(uids))
    world.answers([[5, 6]], [PLAIN])  # its plan reports the end of the requests before it
    assert world.runner._table.num_with_hidden_states == 0  # type: ignore[attr-defined]


def test_hidden_states_survive_preemption(saved: Saved) -> None:
    world = World(make_settings(saved.folder, num_pages=34, chunk_tokens=24))
    prompts = [PROMPT[:30], PROMPT[5:35], PROMPT[9:30]]
    uids = [world.submit(prompt, ALL, max_new_tokens=40) for prompt in prompts]
    world.run()
    assert world.num_preemptions > 0
    for uid, prompt in zip(uids, prompts, strict=True):
        assert len(world.outputs[uid]) == 40
        check(saved, world, uid, prompt, returns_all=True)


def test_hidden_states_and_logprobs_of_the_same_prompt(saved: Saved) -> None:
    world = World(make_settings(saved.folder, chunk_tokens=16))
    both = world.submit(PROMPT, ALL, logprobs=LogprobRules(start=0, num_top=2))
    alone = world.submit(PROMPT, ALL)
    world.run()
    states = [extra.data for extra in world.extras[both] if extra.kind in (HIDDEN_STATES, PROMPT_STATES)]
    assert states == [extra.data for extra in world.extras[alone]]
    assert len(world.extras[both]) == len(world.extras[alone]) * 2


def test_a_message_with_large_extras_is_sent_in_parts() -> None:
    size = MAX_PART_BYTES // 2 + 1
    extras = [Extra(uid, 0, HIDDEN_STATES, bytes(size)) for uid in range(4)]
    output = StepOutput(TokenColumns([0, 1, 2, 3], [7, 7, 7, 7], None, extras), preempted=[1])
    parts = output.parts()
    assert [len(part.tokens.extras) for part in parts] == [1, 1, 1, 1]
    assert [part.tokens.token_ids for part in parts] == [[7], [7], [7], [7]]
    assert [part.preempted for part in parts] == [[], [1], [], []]
    assert StepOutput(TokenColumns([1], [7], None, extras[:1])).parts()[0].tokens.extras == extras[:1]


@pytest.mark.parametrize(("num_positions", "hidden_size"), [(1, 4), (5, BLOCK_BYTES), (40_000, 24), (4_096, 512)])
def test_prompt_states_arrive_in_blocks_in_any_order(num_positions: int, hidden_size: int) -> None:
    states = np.arange(num_positions * hidden_size, dtype=np.float32).reshape(-1, hidden_size)
    blocks = block_extras(3, PROMPT_STATES, states[:-1].tobytes(), 4 * hidden_size)
    assert all(len(block.data) <= max(BLOCK_BYTES, 4 * hidden_size) for block in blocks)
    decoder = HiddenStateDecoder(num_positions, hidden_size)
    for extra in [*blocks[::2], Extra(3, 0, HIDDEN_STATES, states[-1].tobytes()), *reversed(blocks)]:
        decoder.decode(extra)
    (result,) = decoder.lists(0, 1, keeps=False)["hidden_states"]  # type: ignore[misc]
    assert np.array_equal(result, states)
    assert result.flags.writeable
