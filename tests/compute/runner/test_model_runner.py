"""The runner with the real scheduler: greedy tokens equal transformers, and batches do not change them."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from aioengine.protocol.messages import FinishCode, Grammar, Sampling
from aioengine.runner.build import build
from aioengine.runner.request_row import RequestRow, why_no_token
from aioengine.scheduler.plan import NOTHING, TOKENS, NewRow, Row, StepPlan
from tests.compute.runner_world import FAMILIES, World, make_settings, save_model
from tests.kit.grids import grid
from tests.kit.tiny_sizes import CONTEXT_LENGTH, VOCAB_SIZE

if TYPE_CHECKING:
    from pathlib import Path

    from aioengine.attention._base import ForwardBatch, StepAttention
    from aioengine.models._base import ModelInputs
    from aioengine.runner.model_runner import ModelRunner

PROMPTS = [random.Random(i).choices(range(1, VOCAB_SIZE), k=length) for i, length in enumerate((1, 5, 19, 33, 64))]
SAMPLINGS = [
    Sampling(3),
    Sampling(4, temperature=0.0, repetition_penalty=1.2),
    Sampling(5, temperature=1.3, top_p=0.8, frequency_penalty=0.4),
    Sampling(6, top_k=7, presence_penalty=0.5, bad_token_ids=((11,), (3, 4), (120, 7, 9))),
    Sampling(7, min_p=0.05, bias_token_ids=(9,), logit_bias=(3.0,), allowed_token_ids=tuple(range(250))),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: tmp_path_factory.mktemp(family) for family in FAMILIES}


@pytest.fixture(scope="module")
def references(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    """The greedy tokens of transformers for PROMPTS, by family."""
    answers = {}
    for family, folder in folders.items():
        model = save_model(family, folder)
        answers[family] = [
            model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
            for prompt in PROMPTS
        ]
    return answers


@pytest.fixture
def qwen(folders: dict[str, Path], references: dict[str, list[list[int]]]) -> Path:
    assert references
    return folders["qwen3"]


@pytest.mark.parametrize(
    ("family", "page_size", "chunk_tokens"), grid([(family,) for family in FAMILIES], [(1, 9), (4, 512), (16, 32)])
)
def test_greedy_tokens_equal_transformers(
    family: str, page_size: int, chunk_tokens: int, folders: dict[str, Path], references: dict[str, list[list[int]]]
) -> None:
    settings = make_settings(
        folders[family], page_size=page_size, num_pages=1024 // page_size, chunk_tokens=chunk_tokens
    )
    world = World(settings)
    assert world.answers(PROMPTS) == references[family]
    again = [world.answers([prompt])[0] for prompt in PROMPTS]  # alone, and with hits of the prefix cache
    assert again == references[family]
    assert max(world.num_cached.values()) > 0


def bad_token_ids(answers: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    """Return some tokens, pairs and triples of these answers."""
    return tuple(tuple(answer[start : start + 1 + start % 3]) for answer in answers for start in (1, 2, 4, 6))


def test_bad_words_equal_transformers(qwen: Path, references: dict[str, list[list[int]]]) -> None:
    bad = bad_token_ids(references["qwen3"])
    model = AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.float32)
    expected = [
        model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, bad_words_ids=[list(ids) for ids in bad]
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]
    greedy = Sampling(0, temperature=0.0, bad_token_ids=bad)
    samplings = [greedy, greedy, SAMPLINGS[0], greedy, greedy, greedy]
    prompts = [*PROMPTS[:2], PROMPTS[0], *PROMPTS[2:]]
    for depth in (0, 1):
        answers = World(make_settings(qwen, depth=depth)).answers(prompts, samplings)
        assert answers[:2] + answers[3:] == expected
        assert answers[2] == World(make_settings(qwen)).answers(PROMPTS[:1], SAMPLINGS[:1])[0]
    assert expected != references["qwen3"]


def test_only_allowed_tokens_are_sampled(qwen: Path) -> None:
    allowed = Sampling(3, allowed_token_ids=(5, 9, 200))
    greedy = Sampling(0, temperature=0.0, allowed_token_ids=(5, 9))
    world = World(make_settings(qwen))
    stuck = world.submit([5], Sampling(0, allowed_token_ids=(9,), bad_token_ids=((9, 9),)))
    answers = world.answers(PROMPTS[:3], [allowed, greedy, SAMPLINGS[0]])
    assert set(answers[0]) <= {5, 9, 200}
    assert set(answers[1]) <= {5, 9}
    assert answers[2] == World(make_settings(qwen)).answers(PROMPTS[2:3], SAMPLINGS[:1])[0]
    assert (world.outputs[stuck], world.ended[stuck].code) == ([9], FinishCode.FAILED)
    assert world.ended[stuck].message.startswith(
        "no token is allowed by allowed_token_ids and bad_words together; or the model produced non-finite values"
    )


def test_error_of_a_request_without_allowed_tokens_names_its_parameters() -> None:
    grammar = Grammar("regex", "a", parameter="regex='a'")
    request = RequestRow(0, 0, Sampling(0, allowed_token_ids=(9,), grammar=grammar), 1, None, [])
    reason = why_no_token(request, is_empty=False)
    assert reason.startswith("no token is allowed by allowed_token_ids and regex='a' together; or ")


def test_preemption_and_resumption_change_nothing(qwen: Path) -> None:
    expected = World(make_settings(qwen)).answers(PROMPTS, SAMPLINGS, max_new_tokens=40)
    short_of_pages = World(make_settings(qwen, num_pages=40))
    assert short_of_pages.answers(PROMPTS, SAMPLINGS, max_new_tokens=40) == expected
    assert short_of_pages.num_preemptions > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_in_flight_change_nothing(qwen: Path, depth: int) -> None:
    expected = World(make_settings(qwen)).answers(PROMPTS, SAMPLINGS)
    assert World(make_settings(qwen, depth=depth, chunk_tokens=20)).answers(PROMPTS, SAMPLINGS) == expected


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_arrivals_and_aborts_do_not_change_other_requests(qwen: Path, depth: int) -> None:
    """Requests that are not aborted return the same tokens as without aborts."""
    rng = random.Random(depth)
    shared = PROMPTS[3]
    prompts = [shared[: rng.randrange(1, 30)] + PROMPTS[4][: rng.randrange(1, 30)] for _ in range(24)]
    samplings = [msgspec.structs.replace(rng.choice(SAMPLINGS), seed=i) for i in range(24)]
    expected = World(make_settings(qwen)).answers(prompts, samplings)

    world = World(make_settings(qwen, num_pages=60, chunk_tokens=21, depth=depth))
    aborted: set[int] = set()
    for prompt, sampling in zip(prompts, samplings, strict=True):
        uid = world.submit(prompt, sampling)
        for _ in range(rng.randrange(3)):
            world.step()
        if rng.random() < 0.25:
            victim = rng.randrange(uid + 1)
            if victim not in world.ended:
                aborted.add(victim)
                world.core.requests.abort([victim])
    world.run()
    assert aborted
    for uid, answer in enumerate(expected):
        if uid in aborted:
            assert world.outputs[uid] == answer[: len(world.outputs[uid])]
        else:
            assert world.outputs[uid] == answer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampled_tokens_do_not_depend_on_the_batch(qwen: Path, dtype: str) -> None:
    world = World(make_settings(qwen, dtype=dtype))
    alone = [world.answers([prompt], [sampling])[0] for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)]
    assert world.answers(PROMPTS, SAMPLINGS) == alone
    crowd = [random.Random(i).choices(range(1, VOCAB_SIZE), k=7 + i) for i in range(20)]
    neighbours = [Sampling(i, temperature=i / 10, top_p=1 - i / 40, frequency_penalty=i / 20) for i in range(20)]
    together = World(make_settings(qwen, dtype=dtype, chunk_tokens=48)).answers(
        crowd[:10] + PROMPTS + crowd[10:], neighbours[:10] + SAMPLINGS + neighbours[10:]
    )
    assert together[10:15] == alone


def test_another_seed_gives_other_tokens(qwen: Path) -> None:
    answers = World(make_settings(qwen)).answers([PROMPTS[1]] * 4, [Sampling(seed) for seed in (1, 2, 3, 1)])
    assert answers[0] == answers[3]
    assert answers[0] != answers[1] != answers[2]


def test_prompt_with_invalid_token_id_fails_alone(qwen: Path) -> None:
    expected = World(make_settings(qwen)).answers(PROMPTS, SAMPLINGS)
    for wrong in (VOCAB_SIZE, -1, 2**40):
        world = World(make_settings(qwen))
        bad = world.submit([1, 2, wrong, 4])
        assert world.answers(PROMPTS, SAMPLINGS) == expected
        assert world.ended[bad].code is FinishCode.FAILED
        assert str(wrong) in world.ended[bad].message
        assert world.outputs[bad] == []


def poison_token(runner: ModelRunner, token_id: int) -> None:
    """Make the hidden states of a token NaN. A checkpoint with such numbers is refused, so it comes after loading."""
    runner._model._embedding.weight[token_id] = torch.nan  # pyright: ignore


@pytest.mark.parametrize("chunk_tokens", [8, 512])
def test_nan_logits_fail_only_their_request(tmp_path: Path, chunk_tokens: int) -> None:
    save_model("llama", tmp_path)
    poison = 77
    prompts = [[token for token in prompt if token != poison] for prompt in PROMPTS[1:]]
    expected = World(make_settings(tmp_path)).answers(prompts)
    assert poison not in {token for answer in expected for token in answer}

    world = World(make_settings(tmp_path, num_pages=45, chunk_tokens=chunk_tokens))
    poison_token(world.runner, poison)
    for _ in range(3):
        bad = world.submit([5, poison, *range(100, 130)])
        assert world.answers(prompts) == expected
        assert world.ended[bad].code is FinishCode.FAILED
        assert "non-finite" in world.ended[bad].message
        assert world.core.scheduler.cache.clear()  # so that later requests get the pages with NaNs


@pytest.mark.parametrize("wrong", [-1, -(1 << 63), 10_000, (1 << 63) - 1])
def test_a_row_with_a_token_id_outside_the_vocabulary_fails_alone(qwen: Path, wrong: int) -> None:
    runner = build(make_settings(qwen), lambda _: None)
    opened = [NewRow(uid, Sampling(0, temperature=0.0), 3, [1, 2, 3], [uid]) for uid in (1, 2)]
    good = runner.collect(runner.launch(StepPlan([Row(1, 0, 3, TOKENS, [1, 2, 3])], opened)))
    rows = [Row(2, 0, 3, TOKENS, [1, wrong, 3]), Row(1, 0, 3, TOKENS, [1, 2, 3])]
    result = runner.collect(runner.launch(StepPlan(rows)))
    assert result.tokens.token_ids == [-1, *good.tokens.token_ids]
    assert result.failed.keys() == {2}
    assert f"token id {wrong} is outside the vocabulary" in result.failed[2]


def test_failure_of_a_closed_request_is_forgotten(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    runner = build(make_settings(tmp_path), lambda _: None)
    poison_token(runner, 77)
    plan = StepPlan([Row(1, 0, 2, TOKENS, [5, 77])], [NewRow(1, Sampling(0), 2, [5, 77], [0])])
    in_flight = runner.launch(plan)
    runner.launch(StepPlan([], closed=[1]))
    assert "non-finite" in runner.collect(in_flight).failed[1]
    again = runner.collect(runner.launch(StepPlan([Row(1, 0, 1, TOKENS, [5])], [NewRow(1, Sampling(0), 1, [5], [1])])))
    assert again.failed == {}


@pytest.mark.parametrize("outputs", [TOKENS, NOTHING])
def test_freed_pages_of_a_failed_row_are_clean_for_their_next_owner(tmp_path: Path, outputs: int) -> None:
    """The pages are allocated again before the host knows the failure."""
    save_model("llama", tmp_path)
    runner = build(make_settings(tmp_path), lambda _: None)
    poison_token(runner, 77)
    greedy = Sampling(0, temperature=0.0)
    expected = runner.collect(
        runner.launch(StepPlan([Row(4, 0, 2, TOKENS, [5, 6])], [NewRow(4, greedy, 2, [5, 6], [9])]))
    ).tokens.token_ids
    opened = [NewRow(uid, greedy, 3, [5, 77, 6], [uid]) for uid in (1, 2)]
    bad = [Row(1, 0, 3, outputs, [5, 77, 6]), Row(2, 0, 1, TOKENS, [5])]
    in_flight = runner.launch(StepPlan(bad, opened, closed=[4]))
    before = runner._pools[0].tensors[0][:, :, 1 + 2].clone()
    opened = [NewRow(3, greedy, 2, [5, 6], [1])]  # two of the four slots of the page
    next_one = runner.launch(StepPlan([Row(3, 0, 2, TOKENS, [5, 6])], opened, closed=[1, 2]))
    assert "non-finite" in runner.collect(in_flight).failed[1]
    result = runner.collect(next_one)
    assert (result.tokens.token_ids, result.failed) == (expected, {})
    assert runner._pools[0].tensors[0].isfinite().all()
    assert torch.equal(runner._pools[0].tensors[0][:, :, 1 + 2], before), "the pages of other rows are unchanged"


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_request_may_fill_the_context_exactly(qwen: Path, depth: int, page_size: int) -> None:
    world = World(make_settings(qwen, depth=depth, page_size=page_size, num_pages=CONTEXT_LENGTH))
    [answer] = world.answers([[5] * (CONTEXT_LENGTH - 8)], max_new_tokens=8)
    assert len(answer) == 8
    assert {end.code for end in world.ended.values()} == {FinishCode.LENGTH}
    assert world.runner._table.page_tables.tables.shape[2] == -(-CONTEXT_LENGTH // page_size)


def test_plan_without_rows_returns_no_tokens(qwen: Path) -> None:
    runner = build(make_settings(qwen), lambda _: None)
    result = runner.collect(runner.launch(StepPlan([], closed=[7])))
    assert (result.tokens.token_ids, result.failed) == ([], {})


def test_the_padded_part_of_the_vocabulary_is_never_sampled(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    (tmp_path / "tokenizer.json").write_text(
        '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0, "b": 49}, "merges": []}, '
        '"added_tokens": [{"id": 50, "content": "<x>"}]}'
    )
    settings = make_settings(tmp_path)
    from_all = World(settings).answers(PROMPTS, [Sampling(i) for i in range(5)])
    assert max(max(answer) for answer in from_all) > 50
    known = type(settings.text)(tokenizer_path=str(tmp_path))
    world = World(type(settings)(**{**{f: getattr(settings, f) for f in settings.__struct_fields__}, "text": known}))
    assert max(max(answer) for answer in world.answers(PROMPTS, [Sampling(i) for i in range(5)])) <= 50


def test_facts_and_progress(qwen: Path) -> None:
    seen = []
    runner = build(make_settings(qwen, num_pages=None), seen.append)
    facts = runner.facts
    assert facts["num_pages"] == 32 * CONTEXT_LENGTH // 4
    assert facts["max_total_tokens"] == 32 * CONTEXT_LENGTH
    assert facts["page_size"] == 4
    assert facts["dtype"] == "float32"
    assert facts["device"] == "cpu"
    assert facts["attention_backend"] == "torch"
    bytes_per_token = 2 * 2 * 2 * 16 * 4  # keys and values, layers, kv heads, head size, bytes
    assert facts["kv_pool_bytes"] == (32 * CONTEXT_LENGTH + 4) * bytes_per_token  # with the padding page
    assert facts["weights_bytes"] == seen[-1].total == seen[-1].done > 0
    parts = [facts[f"start_{part}_s"] for part in ("device", "attention", "weights", "largest_step", "kv_pool")]
    assert sum(parts) == pytest.approx(facts["load_s"], abs=0.01)
    assert facts["load_s"] > 0
    assert [progress.done for progress in seen] == sorted(progress.done for progress in seen)
    assert seen[0].done == 0
    assert {progress.unit for progress in seen} == {"B"}
    runner.close()
    runner.close()


def test_errors_of_build_name_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        build(make_settings(tmp_path), lambda _: None)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"config\.json.*got `array`"):
        build(make_settings(tmp_path), lambda _: None)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json.* cannot be read"):
        build(make_settings(tmp_path), lambda _: None)


def test_a_gpu_without_triton_is_refused(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("aioengine.runner.build.find_spec", lambda name: None)
    settings = make_settings(qwen)
    settings = msgspec.structs.replace(settings, runner=msgspec.structs.replace(settings.runner, device="cuda"))
    with pytest.raises(ValueError, match="device='cuda' needs the package triton"):
        build(settings, lambda _: None)


class Graphs:
    """Replaces graphs of steps with prompts: returns zeros, and records the number of tokens."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.replayed: list[int] = []

    def fits(self, batch: ForwardBatch, num_outputs: int) -> bool:
        return num_outputs <= self.max_rows

    def replay(self, inputs: ModelInputs, batch: ForwardBatch, num_outputs: int) -> torch.Tensor:
        self.replayed.append(len(inputs.positions))
        return torch.zeros(num_outputs, 64)


def test_steps_with_prompts_that_fit_are_replayed(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(make_settings(qwen))
    graphs = Graphs(max_rows=2)
    monkeypatch.setattr(world.runner, "prompt_graphs", graphs)
    for prompts in ([[1]], [[2] * 9], [[3] * 5, [4] * 7], [[5] * 4] * 3):
        world.answers(prompts)
    assert graphs.replayed == [9, 12], "a prompt of one token is a decode step, and three rows do not fit"


def test_row_counts_are_padded_to_the_size_of_a_graph(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[6] * 5, [7] * 9, [8] * 3]
    world = World(make_settings(qwen))
    expected = World(make_settings(qwen)).answers(prompts)
    num_rows: list[int] = []
    model = world.runner._model
    plain, plain_forward = model.compute_logits, model.forward

    def compute_logits(hidden: torch.Tensor) -> torch.Tensor:
        num_rows.append(len(hidden))
        return plain(hidden)

    def forward(inputs: ModelInputs, attention: StepAttention) -> torch.Tensor:
        num_rows.append(4 if inputs.outputs is None else len(inputs.outputs))
        return plain_forward(inputs, attention)

    monkeypatch.setattr(model, "compute_logits", compute_logits)
    monkeypatch.setattr(model, "forward", forward)
    graphs = SimpleNamespace(fits=lambda rows, has_drafts: False, padded=lambda num: max(num, 4))
    monkeypatch.setattr(world.runner, "_graphs", graphs)
    assert world.answers(prompts) == expected
    assert set(num_rows) == {4}
