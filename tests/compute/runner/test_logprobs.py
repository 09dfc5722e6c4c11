"""Logprobs of the runner equal a forward pass of transformers, with any chunks, batch and prefix hits."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import NamedTuple, cast

import msgspec
import pytest
import torch

from aioengine.kernels.token_logprobs import SEGMENT, top_tokens
from aioengine.protocol.messages import FinishCode, Sampling
from aioengine.protocol.packed_logprobs import LogprobDecoder, LogprobRules
from aioengine.runner.logprobs import CPU_ROWS
from aioengine.settings.config import Settings
from tests.compute.runner_world import World, make_settings, save_model
from tests.kit.grids import grid
from tests.kit.tiny_sizes import VOCAB_SIZE

PROMPT = [(7 * i * i + 3 * i) % VOCAB_SIZE for i in range(41)]
CLOSE = 1e-4


class Saved(NamedTuple):
    """A model in fp32: its folder, and the model of transformers."""

    folder: Path
    theirs: torch.nn.Module

    def expected(self, token_ids: list[int]) -> torch.Tensor:
        """Return the logprobs [T, V] of the next token after each token."""
        with torch.inference_mode():
            return torch.log_softmax(self.theirs(torch.tensor([token_ids])).logits[0].float(), -1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("llama")
    return Saved(folder, save_model("llama", folder))


def settings_of(saved: Saved, *, mode: str = "raw", **options: int) -> Settings:
    settings = make_settings(saved.folder, **options)
    return msgspec.structs.replace(settings, runner=msgspec.structs.replace(settings.runner, logprobs_mode=mode))


def lists_of(world: World, uid: int, rules: LogprobRules, num_prompt: int) -> dict[str, list]:
    decoder = LogprobDecoder(rules, num_prompt)
    for extra in world.extras[uid]:
        decoder.decode(extra)
    return cast("dict[str, list]", decoder.lists(0, len(world.extras[uid]), keeps=False))


def check_position(lists: dict[str, list], side: str, place: int, token_id: int, expected: torch.Tensor) -> None:
    """Check the entries of one position. expected: [V]."""
    value, found_id, text = lists[f"{side}_token_logprobs"][place]
    assert (found_id, text) == (token_id, None)
    assert value == pytest.approx(float(expected[token_id]), abs=CLOSE)
    check_lists(lists, side, place, expected)


def check_lists(lists: dict[str, list], side: str, place: int, expected: torch.Tensor) -> None:
    for name in ("top", "token_ids"):
        for value, token_id, text in lists.get(f"{side}_{name}_logprobs", [[]] * (place + 1))[place]:
            assert value == pytest.approx(float(expected[token_id]), abs=CLOSE)
            assert text is None
    if top := lists.get(f"{side}_top_logprobs"):
        values = [value for value, _, _ in top[place]]
        assert values == sorted(values, reverse=True)
        assert values == pytest.approx(expected.topk(len(values)).values.tolist(), abs=CLOSE)
        assert len({token_id for _, token_id, _ in top[place]}) == len(values)


def check(world: World, uid: int, rules: LogprobRules, saved: Saved, prompt: list[int] = PROMPT) -> None:
    """Check that all logprobs of a request equal a forward pass over its tokens."""
    output = world.outputs[uid]
    expected = saved.expected([*prompt, *output])
    lists = lists_of(world, uid, rules, len(prompt))
    assert len(lists["output_token_logprobs"]) == len(output)
    for place, token_id in enumerate(output):
        check_position(lists, "output", place, token_id, expected[len(prompt) + place - 1])
    if rules.start < 0:
        assert lists["input_token_logprobs"] == []
        return
    assert len(lists["input_token_logprobs"]) == len(prompt) - rules.start
    for place, position in enumerate(range(rules.start, len(prompt))):
        if position:
            check_position(lists, "input", place, prompt[position], expected[position - 1])
        else:
            assert lists["input_token_logprobs"][0] == (None, prompt[0], None)
            others = [lists[name] for name in ("input_top_logprobs", "input_token_ids_logprobs") if name in lists]
            assert [other[0] for other in others] == [None] * len(others)


RULES = [
    LogprobRules(),
    LogprobRules(num_top=5),
    LogprobRules(token_ids=(3, 299, 3)),
    LogprobRules(start=0, num_top=3, token_ids=(7,)),
    LogprobRules(start=17, num_top=1),
    LogprobRules(start=40),
    LogprobRules(start=41, num_top=2),
    LogprobRules(start=9, num_top=VOCAB_SIZE),
]


@pytest.mark.parametrize(("chunk_tokens", "depth"), grid([(512,), (7,)], [(0,), (1,)]))
def test_logprobs_equal_a_plain_forward(saved: Saved, chunk_tokens: int, depth: int) -> None:
    world = World(settings_of(saved, chunk_tokens=chunk_tokens, depth=depth))
    samplings = [Sampling(3, temperature=temperature) for temperature in (0.0, 0.8)]
    asked = [(world.submit(PROMPT, sampling, logprobs=rules), rules) for sampling, rules in product(samplings, RULES)]
    plain = world.submit(PROMPT, samplings[1])
    world.run()
    for uid, rules in asked:
        check(world, uid, rules, saved)
    assert world.outputs[plain] == world.outputs[asked[-1][0]]
    assert world.extras[plain] == []


def test_prompt_logits_are_computed_in_pieces(saved: Saved) -> None:
    world = World(settings_of(saved))
    compute, sizes = world.runner._logprobs._compute_logits, list[int]()

    def compute_logits(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return compute(hidden)

    world.runner._logprobs._compute_logits = compute_logits
    rules = LogprobRules(start=0)
    uids = [world.submit(PROMPT * 4, logprobs=rules, max_new_tokens=1) for _ in range(2)]
    world.run()
    assert sum(sizes) == 2 * (4 * len(PROMPT) - 1)
    assert max(sizes) == CPU_ROWS
    for uid in uids:
        check(world, uid, rules, saved, PROMPT * 4)


def test_logprobs_have_the_same_bits_in_any_batch_chunk_and_cache(saved: Saved) -> None:
    rules = LogprobRules(start=5, num_top=4, token_ids=(11,))
    alone = World(settings_of(saved))
    uid = alone.submit(PROMPT, logprobs=rules)
    alone.run()
    expected = alone.extras[uid]
    assert len(expected) == 13
    again = alone.submit(PROMPT, logprobs=rules)
    alone.run()
    other = World(settings_of(saved, chunk_tokens=11))
    among = [other.submit(PROMPT, logprobs=rule) for rule in (RULES[-1], rules, None, RULES[3])]
    other.run()
    for world, actual in ((alone, again), (other, among[1])):
        assert [(extra.index, extra.kind, extra.data) for extra in world.extras[actual]] == [
            (extra.index, extra.kind, extra.data) for extra in expected
        ]


def test_prefix_hit_ends_at_the_start_of_the_logprobs(saved: Saved) -> None:
    world = World(settings_of(saved))
    world.submit(PROMPT)
    world.run()
    uids = {start: world.submit(PROMPT, logprobs=LogprobRules(start=start)) for start in (-1, 0, 1, 16, 17, 18, 41)}
    world.run()
    assert {start: world.num_cached[uid] for start, uid in uids.items()} == {
        -1: 40, 0: 0, 1: 0, 16: 12, 17: 16, 18: 16, 41: 40,
    }  # fmt: skip
    for start, uid in uids.items():
        check(world, uid, LogprobRules(start=start), saved)


def test_preempted_requests_return_each_logprob_once(saved: Saved) -> None:
    world = World(settings_of(saved, num_pages=40, chunk_tokens=20))
    rules = [LogprobRules(start=start, num_top=2) for start in (0, 3, -1, 20)]
    prompts = [[*PROMPT[:30], seed] for seed in range(4)]
    uids = [world.submit(prompt, logprobs=rule, max_new_tokens=40) for prompt, rule in zip(prompts, rules, strict=True)]
    world.run()
    assert world.num_preemptions
    for uid, rule, prompt in zip(uids, rules, prompts, strict=True):
        indices = [(extra.kind, extra.index) for extra in world.extras[uid]]
        assert len(indices) == len(set(indices)) == 40 + (rule.start >= 0)
        check(world, uid, rule, saved, prompt)


def test_score_request_returns_the_distribution_after_the_prompt(saved: Saved) -> None:
    world = World(settings_of(saved, chunk_tokens=16))
    rules = [
        LogprobRules(num_top=3, token_ids=(5, 1)),
        LogprobRules(start=0, num_top=1),
        LogprobRules(start=41, num_top=2),
    ]
    uids = [world.submit(PROMPT, logprobs=rule, max_new_tokens=0) for rule in rules]
    world.run()
    expected = saved.expected(PROMPT)
    for uid, rule in zip(uids, rules, strict=True):
        assert world.outputs[uid] == []
        assert world.ended[uid].code is FinishCode.LENGTH
        lists = lists_of(world, uid, rule, len(PROMPT))
        assert lists["output_token_logprobs"] == []
        assert len(lists["output_top_logprobs"]) == 1
        check_lists(lists, "output", 0, expected[-1])
        assert len(lists["input_token_logprobs"]) == rule.num_prompt_positions(len(PROMPT))
    assert [token_id for _, token_id, _ in lists_of(world, uids[0], rules[0], 41)["output_token_ids_logprobs"][0]] == [
        5,
        1,
    ]


@pytest.mark.parametrize("depth", [0, 1])
def test_nan_prompt_logprob_fails_only_its_request(tmp_path: Path, depth: int) -> None:
    """All layers have windows of four tokens, so a NaN at the start of a prompt does not reach its end."""
    save_model("mistral", tmp_path, sliding_window=4)
    poison, rules = 77, LogprobRules(start=0, num_top=2)
    prompts = [[token for token in PROMPT if token != poison], [5, poison, *range(100, 140)]]

    def world_of() -> World:
        return World(make_settings(tmp_path, depth=depth))

    alone = world_of()
    expected = alone.submit(prompts[0], logprobs=rules)
    alone.run()
    world = world_of()
    world.runner._model._embedding.weight[poison] = torch.nan  # pyright: ignore
    bad, good = world.submit(prompts[1], logprobs=rules), world.submit(prompts[0], logprobs=rules)
    scored = world.submit(prompts[1], logprobs=rules, max_new_tokens=0)
    world.run()
    for uid in (bad, scored):
        assert world.ended[uid].code is FinishCode.FAILED
        assert "non-finite" in world.ended[uid].message
        assert (world.outputs[uid], world.extras[uid]) == ([], [])
    assert world.ended[good].code is FinishCode.LENGTH
    assert world.outputs[good] == alone.outputs[expected]
    assert [extra.data for extra in world.extras[good]] == [extra.data for extra in alone.extras[expected]]


def test_processed_logprobs_equal_the_sampled_distribution(saved: Saved) -> None:
    world = World(settings_of(saved, mode="processed"))
    rules = LogprobRules(num_top=3)
    bias = {"bias_token_ids": (7, 9), "logit_bias": (4.0, -2.0)}
    samplings = [
        Sampling(1, temperature=0.5, top_k=4, **bias),
        Sampling(1, temperature=0.0, **bias),
        Sampling(1, temperature=2.0),
        Sampling(1, temperature=0.0, repetition_penalty=1.5),
    ]
    uids = [world.submit(PROMPT, sampling, logprobs=rules) for sampling in samplings]
    world.run()
    for uid, sampling in zip(uids, samplings, strict=True):
        output = world.outputs[uid]
        lists = lists_of(world, uid, rules, len(PROMPT))
        with torch.inference_mode():
            logits = saved.theirs(torch.tensor([[*PROMPT, *output]])).logits[0]
        for place, token_id in enumerate(output):
            scores = logits[len(PROMPT) + place - 1].clone()
            if sampling.bias_token_ids:
                scores[list(sampling.bias_token_ids)] += torch.tensor(sampling.logit_bias)
            if sampling.repetition_penalty != 1.0:
                seen = list({*PROMPT, *output[:place]})
                scores[seen] = torch.where(scores[seen] > 0, scores[seen] / 1.5, scores[seen] * 1.5)
            temperature = sampling.temperature or 1.0
            check_position(lists, "output", place, token_id, torch.log_softmax(scores / temperature, -1))


@pytest.mark.parametrize("width", [1, 5, SEGMENT, 12 * SEGMENT, 12 * SEGMENT + 1, 4000, 4095])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_tokens_are_sorted_and_ties_prefer_the_lower_id(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    logits = torch.randn(6, width, generator=generator).to(dtype)
    logits[1] = logits[1].round()
    logits[2] = 0.0
    logits[3, : width // 2] = -torch.inf
    logits[4] = -logits[4].abs() - 1.0
    logits[5, -1] = 9.0
    for count in {1, min(2, width), min(9, width), width}:
        expected = [sorted(range(width), key=lambda i: (-row[i], i))[:count] for row in logits.tolist()]
        assert top_tokens(logits, count).tolist() == expected
