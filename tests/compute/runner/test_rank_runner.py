"""A runner that is divided among ranks answers like one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec.structs import replace
from transformers import AutoModel, AutoModelForSequenceClassification, Qwen3Config

from aioengine.constraints.grammars import Grammars
from aioengine.processes.leading_runner import RanksBrokenError, plan_for_ranks
from aioengine.protocol.messages import ALL_STATES, LAST_STATES, FinishCode, Sampling
from aioengine.protocol.packed_logprobs import LogprobRules
from aioengine.scheduler.plan import TOKENS, NewRow, Row, StepPlan
from tests.compute.models.test_hybrids import make_config
from tests.compute.rank_threads import ranked_world
from tests.compute.runner.test_pooling import PROMPTS as POOLED
from tests.compute.runner.test_pooling import PoolWorld, saved, settings_for
from tests.compute.runner_world import World, make_settings, save_model
from tests.kit.grammar_walks import FOLDER, grammar_of
from tests.kit.hybrid_models import save_hybrid
from tests.kit.processors import ADD, BROKEN, NAMES
from tests.kit.tiny_sizes import SIZES, VOCAB_SIZE

if TYPE_CHECKING:
    from pathlib import Path

    from aioengine.settings.config import Settings

SAMPLINGS = [
    Sampling(1, temperature=0.0),
    Sampling(2, temperature=0.8, top_p=0.9, top_k=40),
    Sampling(3, temperature=1.0, min_p=0.02, repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1),
    Sampling(4, temperature=0.0, bias_token_ids=(5, 7), logit_bias=(2.0, -1.0), bad_token_ids=((9,), (3, 4))),
    Sampling(5, temperature=1.0, allowed_token_ids=(11, 12, 13, 299)),
    Sampling(6, temperature=0.0, min_new_tokens=5, suppressed_token_ids=(17,), hidden_states=LAST_STATES),
    Sampling(7, temperature=1.0, grammar=grammar_of(regex="[a-d]{3,8}!")),
    Sampling(8, temperature=1.0, grammar=grammar_of(choice=["abcabcabcabcabc", "abd"])),
    Sampling(9, temperature=1.0, hidden_states=ALL_STATES),
    Sampling(10, temperature=0.0, custom_processor=ADD, custom_params=b'{"token": 21, "bias": 30.0}'),
]
PROMPTS = [[(7 * row + position) % 290 + 1 for position in range(3 + 2 * row)] for row in range(len(SAMPLINGS))]
RULES = [LogprobRules(start=0, num_top=3), LogprobRules(num_top=2, token_ids=(5,)), None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model("llama", path)
    return path


def settings_of(folder: Path, **changes: int) -> Settings:
    settings = make_settings(folder, **changes)
    return replace(settings, runner=replace(settings.runner, logits_processors=tuple(NAMES)))


def compute(world: World, preempts_every: int = 0) -> World:
    """Answer all requests together. The last has no output, only logprobs."""
    world.runner.use_grammars(Grammars(str(FOLDER), VOCAB_SIZE))
    for number, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        world.submit(prompt, sampling, logprobs=RULES[number % 3], max_new_tokens=20)
    world.submit(PROMPTS[-1], max_new_tokens=0, logprobs=LogprobRules(num_top=4))
    num_steps = 0
    while world.core.has_work:
        world.step()
        num_steps += 1
        if preempts_every and num_steps % preempts_every == 0 and world.core.requests.running:
            world.core.requests.preempt()
    return world


def check_equal(world: World, expected: World) -> None:
    assert world.outputs == expected.outputs
    for uid, extras in expected.extras.items():
        own = world.extras[uid]
        assert [(extra.kind, extra.index, len(extra.data)) for extra in own] == [
            (extra.kind, extra.index, len(extra.data)) for extra in extras
        ]
        for extra, other in zip(own, extras, strict=True):
            numbers = [np.frombuffer(data, np.float32) for data in (extra.data, other.data)]
            are_ids = [np.frombuffer(data, np.int32) for data in (extra.data, other.data)]
            is_id = are_ids[0] == are_ids[1]  # ids and logprobs are in the same rows
            np.testing.assert_allclose(numbers[0][~is_id], numbers[1][~is_id], atol=1e-4)
    assert {uid: end.code for uid, end in world.ended.items()} == {uid: end.code for uid, end in expected.ended.items()}


@pytest.fixture(scope="module")
def expected(folder: Path) -> World:
    return compute(World(settings_of(folder)))


@pytest.mark.parametrize(
    ("num_ranks", "changes", "preempts_every"),
    [
        (2, {}, 0),
        (2, {"chunk_tokens": 16}, 5),
        (2, {"chunk_tokens": 16, "depth": 1}, 7),
        (4, {"chunk_tokens": 40}, 0),
    ],
)
def test_all_options_return_the_answers_of_one_rank(
    folder: Path, expected: World, num_ranks: int, changes: dict[str, int], preempts_every: int
) -> None:
    with ranked_world(settings_of(folder, **changes), num_ranks) as world:
        check_equal(compute(world, preempts_every), expected)


def test_failed_rows_end_alone_and_leave_clean_pages(folder: Path) -> None:
    """Rows that rank 0 cannot open, embeddings that are not finite, and a processor that raises."""
    nan = np.full((9, 64), np.nan, dtype=np.float32).tobytes()
    broken = Sampling(1, custom_processor=BROKEN, custom_params=b'{"how": "raise"}')
    unknown = Sampling(2, temperature=0.0, grammar=grammar_of(regex="[a-d]+"))

    def outputs(world: World) -> list[list[int]]:
        """The runner has no grammars here, so it refuses the row."""
        uids = [world.submit(PROMPTS[4]), world.submit([1] * 9, embeds=nan), world.submit(PROMPTS[3], broken)]
        uids += [world.submit(PROMPTS[2], unknown), world.submit(PROMPTS[5])]
        world.run()
        uids += [world.submit(prompt) for prompt in PROMPTS]
        world.run()
        failed = [uid for uid, end in world.ended.items() if end.code is FinishCode.FAILED]
        assert sorted(failed) == uids[1:4]
        return [world.outputs[uid] for uid in uids]

    settings = settings_of(folder, num_pages=40)
    with ranked_world(settings, 2) as world:
        assert outputs(world) == outputs(World(settings))


def test_a_failed_step_breaks_the_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests of the step do not end, because the process ends with all other ranks."""
    with ranked_world(settings_of(folder), 2) as world:
        uid = world.submit(PROMPTS[0])
        with monkeypatch.context() as patch:
            patch.setattr(world.runner, "_open_and_close", lambda plan: 1 / 0)
            with pytest.raises(RanksBrokenError, match="ZeroDivisionError"):
                world.step()
    assert uid not in world.ended


def test_other_ranks_get_no_failed_rows_and_only_temperatures() -> None:
    sampling = Sampling(3, top_p=0.5, hidden_states=LAST_STATES, custom_processor="a:B")
    plan = StepPlan(
        rows=[Row(1, 0, 2, TOKENS, [5, 6]), Row(2, 0, 2, TOKENS, [7, 8]), Row(3, 0, 1, TOKENS, [9])],
        new_rows=[
            NewRow(1, sampling, 2, [5, 6], logprobs=LogprobRules(num_top=2)),
            NewRow(2, sampling, 2, [7, 8]),
            NewRow(3, sampling, 1, [9], logprobs=LogprobRules(start=0)),
        ],
        closed=[0],
        snapshots=[(1, 4), (2, 5)],
        needs_logits=True,
    )
    simple = Sampling(3, hidden_states=LAST_STATES)
    assert plan_for_ranks(plan, {2}) == StepPlan(
        rows=[plan.rows[0], plan.rows[2]],
        new_rows=[NewRow(1, simple, 2, [5, 6]), NewRow(3, simple, 1, [9], logprobs=LogprobRules(start=0))],
        closed=[0],
        snapshots=[(1, 4)],
        needs_logits=True,
    )


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "qwen3_next"])
def test_other_families_continue_after_preemptions_and_prefix_hits(family: str, tmp_path: Path) -> None:
    """Experts, windows, latent attention, and states with snapshots."""
    if family == "qwen3_next":
        save_hybrid(make_config(vocab_size=VOCAB_SIZE), tmp_path)
    else:
        save_model(family, tmp_path)
    settings = make_settings(tmp_path, chunk_tokens=24)
    scheduler = replace(settings.scheduler, snapshot_tokens=16 if family == "qwen3_next" else 0)
    settings = replace(settings, scheduler=scheduler)

    def outputs(world: World) -> list[list[int]]:
        first = [world.submit(prompt * 3) for prompt in PROMPTS[4:]]
        for number in range(60):
            world.step()
            if number % 6 == 5 and world.core.requests.running:
                world.core.requests.preempt()
        world.run()
        later = [world.submit(prompt * 3 + [7, 8]) for prompt in PROMPTS[4:]]
        world.run()
        assert world.num_preemptions
        assert any(world.num_cached[uid] for uid in later)
        return [world.outputs[uid] for uid in (*first, *later)]

    with ranked_world(settings, 2) as world:
        assert outputs(world) == outputs(World(settings))


@pytest.mark.parametrize("task", ["embed", "classify"])
def test_vectors_and_scores_equal_those_of_one_rank(task: str, tmp_path: Path) -> None:
    auto = AutoModel if task == "embed" else AutoModelForSequenceClassification
    saved(Qwen3Config(**{**SIZES, "head_dim": 16}), tmp_path, auto)
    settings = settings_for(tmp_path, task, "last", splits=True)
    expected = PoolWorld(settings).vectors_of(POOLED)
    with ranked_world(settings, 2, PoolWorld) as world:
        for vector, other in zip(world.vectors_of(POOLED), expected, strict=True):
            np.testing.assert_allclose(vector, other, atol=1e-5)
