"""Requests of all kinds in one batch return the same as alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import pytest

from aioengine.protocol.messages import ALL_STATES, LAST_STATES, Sampling
from aioengine.protocol.packed_logprobs import LogprobRules
from tests.compute.runner_world import World, make_settings, save_model
from tests.kit.processors import ADD, FORCE, NAMES
from tests.kit.tiny_sizes import VOCAB_SIZE

if TYPE_CHECKING:
    from pathlib import Path

    from aioengine.settings.config import Settings

PROMPT = [(7 * i * i + 3 * i) % VOCAB_SIZE for i in range(33)]


def params(**values: object) -> bytes:
    return json.dumps(values).encode()


class Kind(NamedTuple):
    """A kind of request. ``is_embeds``: its prompt is given as embeddings."""

    sampling: Sampling
    logprobs: LogprobRules | None = None
    is_embeds: bool = False


KINDS = [
    Kind(Sampling(1, temperature=0.0)),
    Kind(Sampling(2, top_p=0.9, repetition_penalty=1.2)),
    Kind(Sampling(3, hidden_states=ALL_STATES, bad_token_ids=((5,), (7, 9), (1, 2, 3)))),
    Kind(Sampling(4, hidden_states=LAST_STATES, allowed_token_ids=tuple(range(3, 90)), min_p=0.05)),
    Kind(Sampling(5, custom_processor=ADD, custom_params=params(token=11, bias=2.5), frequency_penalty=0.5)),
    Kind(Sampling(6, custom_processor=FORCE, custom_params=params(token=17), hidden_states=ALL_STATES)),
    Kind(Sampling(7, temperature=0.7, repetition_penalty=1.3), LogprobRules(num_top=3), is_embeds=True),
    Kind(Sampling(8, hidden_states=ALL_STATES), LogprobRules(start=0, num_top=2, token_ids=(4, 8))),
    Kind(Sampling(9, bad_token_ids=((8, 8), (20,)), hidden_states=ALL_STATES), is_embeds=True),
]

Given = tuple[list[int], list[tuple[int, str, bytes]]]


class Saved(NamedTuple):
    folder: Path
    embeds: bytes

    def settings(self, **changes: int) -> Settings:
        settings = make_settings(self.folder, **changes)
        runner = msgspec.structs.replace(settings.runner, logits_processors=tuple(NAMES))
        return msgspec.structs.replace(settings, runner=runner)

    def run(self, kinds: list[Kind], world: World) -> list[Given]:
        """Return the tokens and extras of each request."""
        uids = [
            world.submit(
                [0] * len(PROMPT) if kind.is_embeds else PROMPT,
                kind.sampling,
                max_new_tokens=30,
                logprobs=kind.logprobs,
                embeds=self.embeds if kind.is_embeds else b"",
            )
            for kind in kinds
        ]
        world.run()
        extras = {uid: {(extra.index, extra.kind): extra.data for extra in world.extras[uid]} for uid in uids}
        return [
            (world.outputs[uid], [(index, kind, data) for (index, kind), data in sorted(extras[uid].items())])
            for uid in uids
        ]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("llama")
    table = save_model("llama", folder).get_input_embeddings().weight.detach()
    return Saved(folder, table[PROMPT].numpy().tobytes())


@pytest.fixture(scope="module")
def alone(saved: Saved) -> list[Given]:
    return [saved.run([kind], World(saved.settings()))[0] for kind in KINDS]


@pytest.mark.parametrize(
    ("num_pages", "chunk_tokens", "depth"),
    [
        (512, 24, 1),
        (70, 16, 1),
        pytest.param(512, 512, 0, marks=pytest.mark.slow),
        pytest.param(70, 24, 0, marks=pytest.mark.slow),
    ],
)
def test_mixed_requests_equal_the_same_requests_alone(
    saved: Saved, alone: list[Given], num_pages: int, chunk_tokens: int, depth: int
) -> None:
    world = World(saved.settings(num_pages=num_pages, chunk_tokens=chunk_tokens, depth=depth))
    assert saved.run(KINDS + KINDS[::-1], world) == alone + alone[::-1]
    assert (world.num_preemptions > 0) is (num_pages < 100)
    assert all(len(output) == 30 for output, _ in alone)
