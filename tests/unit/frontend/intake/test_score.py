"""Scores with many labels and with long queries."""

from __future__ import annotations

import time

import pytest

from aioengine.frontend.intake.score import MAX_LABELS, ScoreRequest, _add_prompts, _checked_labels

GENEROUS_S = 10.0
"""Of the time of a thread; where each label is compared with each other one it takes a minute."""


def test_time_of_probabilities_is_linear_in_the_number_of_labels() -> None:
    begun_at = time.thread_time()
    scores = ScoreRequest(temperature=2.0).scores_of([float(label % 7) for label in range(MAX_LABELS)])
    assert time.thread_time() - begun_at < GENEROUS_S
    assert sum(scores) == pytest.approx(1.0)


def test_duplicate_label_is_refused_quickly() -> None:
    begun_at = time.thread_time()
    with pytest.raises(ValueError, match="label_token_ids has 7 twice"):
        _checked_labels("label_token_ids", [*range(MAX_LABELS - 1), 7], MAX_LABELS)
    assert time.thread_time() - begun_at < GENEROUS_S


def test_total_size_of_score_prompts_is_not_limited() -> None:
    request = ScoreRequest()
    _add_prompts(request, "q" * 1_000_000, ["i"] * 100, is_item_first=False, may_be_empty=False)
    assert [len(prompt) for prompt in request.prompts] == [1_000_001] * 100
