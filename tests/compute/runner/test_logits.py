"""Compare logits processors with transformers and with their definition."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

from aioengine.protocol.messages import Sampling
from aioengine.runner import logits as logits_processors
from aioengine.runner.logits import token_processors
from aioengine.runner.logits.grammar import GrammarMask
from aioengine.runner.logits.token_processors import AllowedTokenIds, BadWords, Bias, MinNewTokens, Penalties
from aioengine.runner.request_row import LogitsRow, RequestRow
from aioengine.runner.token_lists import token_lists

WIDTH = 320


def row(index: int, sampling: Sampling, tokens: list[int], num_prompt: int) -> LogitsRow:
    history = torch.tensor([*tokens, 0, 0, 0])  # free entries at the end must not count
    lists = token_lists(sampling, WIDTH, torch.from_numpy)
    recent = torch.full((8,), -1, dtype=torch.int32)
    for position, token_id in enumerate(tokens):
        recent[position % 8] = token_id
    request = RequestRow(index, index, sampling, num_prompt, history, lists=lists, recent=recent)
    return LogitsRow(index, request, len(tokens))


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3)) * 4


def test_order_of_the_processors() -> None:
    kinds = [type(processor) for processor in logits_processors.in_order()]
    assert kinds == [MinNewTokens, Penalties, Bias, AllowedTokenIds, BadWords, GrammarMask]


@pytest.mark.parametrize("penalty", [0.7, 1.2, 2.0])
def test_repetition_penalty_equals_transformers(logits: torch.Tensor, penalty: float) -> None:
    tokens = [[5, 6, 7, 7, 5], [1, 300, 2, 2, 2]]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor(tokens), logits[:2].clone())
    sampling = Sampling(0, repetition_penalty=penalty)
    before = logits.clone()
    Penalties().apply(logits, [row(0, sampling, tokens[0], 3), row(1, sampling, tokens[1], 1)], torch.from_numpy)
    assert torch.equal(logits[:2], expected)
    assert torch.equal(logits[2:], before[2:])


def test_frequency_and_presence_count_only_output_tokens(logits: torch.Tensor) -> None:
    before = logits.clone()
    penalties = Penalties()
    for _ in range(2):  # the processor keeps no counts
        logits.copy_(before)
        penalties.apply(
            logits,
            [
                row(1, Sampling(0, frequency_penalty=0.5, presence_penalty=0.25), [9, 9, 4, 4, 4, 8], 2),
                row(3, Sampling(0, presence_penalty=-1.0), [1, 1, 2, 1], 2),
                row(2, Sampling(0, frequency_penalty=2.0), [1, 1, 2, 1], 4),
            ],
            torch.from_numpy,
        )
        expected = before.clone()
        expected[1, 4] -= 3 * 0.5 + 0.25
        expected[1, 8] -= 0.5 + 0.25
        expected[3, [1, 2]] += 1.0
        assert torch.equal(logits, expected)


def test_counts_come_before_repetition(logits: torch.Tensor) -> None:
    logits[0, 4] = 1.0
    sampling = Sampling(0, frequency_penalty=2.0, repetition_penalty=2.0)
    Penalties().apply(logits, [row(0, sampling, [9, 4], 1)], torch.from_numpy)
    assert logits[0, 4] == (1.0 - 2.0) * 2.0  # the frequency penalty made it negative, so it is multiplied


def test_bias_and_suppression_change_only_their_rows(logits: torch.Tensor) -> None:
    before = logits.clone()
    Bias().apply(
        logits, [row(2, Sampling(0, bias_token_ids=(3, 0), logit_bias=(1.5, -100.0)), [1], 1)], torch.from_numpy
    )
    suppressing = Sampling(0, min_new_tokens=2, suppressed_token_ids=(10, 11))
    MinNewTokens().apply(logits, [row(0, suppressing, [1, 2], 1), row(1, suppressing, [1, 2, 3], 1)], torch.from_numpy)
    expected = before.clone()
    expected[2, 3] += 1.5
    expected[2, 0] -= 100.0
    expected[0, [10, 11]] = -1e30
    assert torch.equal(logits, expected)


BAD_TOKEN_IDS = ((5,), (7, 9), (6, 7, 9), (7, 10), (1, 2, 3, 4, 5, 6, 7, 8), (8, 9), (6, 7, 11))


@pytest.mark.parametrize("tokens", [[7], [6, 7], [5, 6, 7], [1, 2, 3, 4, 5, 6, 7], [8, 8, 8]])
@pytest.mark.parametrize("num_prompt", [1, 0])
def test_bad_words_equal_transformers(logits: torch.Tensor, tokens: list[int], num_prompt: int) -> None:
    theirs = NoBadWordsLogitsProcessor([list(ids) for ids in BAD_TOKEN_IDS])
    expected = logits.clone()
    expected[1:2] = theirs(torch.tensor([tokens]), logits[1:2].clone())
    BadWords().apply(logits, [row(1, Sampling(0, bad_token_ids=BAD_TOKEN_IDS), tokens, num_prompt)], torch.from_numpy)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("most", [1 << 20, 5])  # maximum tokens compared at once
def test_bad_words_of_several_rows_follow_the_definition(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(token_processors, "_MAX_TOKENS", most)
    draw = random.Random(most)
    for _ in range(30):
        logits = torch.zeros(6, WIDTH)
        expected = logits.clone()
        rows: list[LogitsRow] = []
        for index in draw.sample(range(6), 4):
            tokens = draw.choices(range(3), k=draw.randrange(1, 20))
            bad = {tuple(draw.choices(range(3), k=draw.randrange(1, 8))) for _ in range(draw.randrange(1, 12))}
            rows.append(row(index, Sampling(0, bad_token_ids=tuple(bad)), tokens, 1))
            for ids in bad:
                if len(ids) <= len(tokens) + 1 and tokens[len(tokens) - len(ids) + 1 :] == list(ids[:-1]):
                    expected[index, ids[-1]] = -torch.inf
        BadWords().apply(logits, rows, torch.from_numpy)
        assert torch.equal(logits, expected)


def test_only_allowed_tokens_keep_their_logits(logits: torch.Tensor) -> None:
    expected = logits.clone()
    for index, ids in [(0, (3, 5)), (2, (9,))]:
        mask = torch.ones(WIDTH, dtype=torch.bool)
        mask[list(ids)] = False
        expected[index, mask] = -torch.inf
    rows = [row(2, Sampling(0, allowed_token_ids=(9,)), [1], 1), row(0, Sampling(0, allowed_token_ids=(3, 5)), [1], 1)]
    AllowedTokenIds().apply(logits, rows, torch.from_numpy)
    assert torch.equal(logits, expected)


def test_custom_processors_run_before_masks() -> None:
    custom = Bias()
    assert logits_processors.in_order([custom])[3] is custom


def test_plain_sampling_needs_no_logits_processor() -> None:
    plain = Sampling(0, temperature=0.7, top_p=0.5, min_new_tokens=5)
    assert not any(processor.wants(plain) for processor in logits_processors.in_order())
