"""Tokens that end a request, and requests that are refused at once."""

from __future__ import annotations

import pytest

from aioengine.protocol.messages import End, FinishCode, Limits, Sampling, Submit, TextRules
from aioengine.scheduler.request import Request, end_of, refusal_of


def request_with(output: list[int], limits: Limits) -> Request:
    submit = Submit(1, [10, 11], Sampling(seed=0), limits, TextRules())
    request = Request(submit, number=1, max_tokens=2 + limits.max_new_tokens)
    request.token_ids += output
    return request


@pytest.mark.parametrize(
    ("output", "limits", "end"),
    [
        ([5], Limits(max_new_tokens=3, stop_token_ids=(7,)), None),
        ([5, 7], Limits(max_new_tokens=3, stop_token_ids=(6, 7)), End(1, FinishCode.STOP, 7)),
        ([5, 5, 5], Limits(max_new_tokens=3, stop_token_ids=(7,)), End(1, FinishCode.LENGTH)),
        ([5, 5, 7], Limits(max_new_tokens=3, stop_token_ids=(7,)), End(1, FinishCode.STOP, 7)),
        ([7], Limits(max_new_tokens=3), None),
        ([7], Limits(max_new_tokens=3, min_new_tokens=1, stop_token_ids=(7,)), None),
        ([7, 7], Limits(max_new_tokens=3, min_new_tokens=1, stop_token_ids=(7,)), End(1, FinishCode.STOP, 7)),
        ([7], Limits(max_new_tokens=1, min_new_tokens=1, stop_token_ids=(7,)), End(1, FinishCode.LENGTH)),
        ([0], Limits(max_new_tokens=3, stop_token_ids=(0,)), End(1, FinishCode.STOP, 0)),
    ],
)
def test_a_stop_token_beats_the_length_and_waits_for_the_minimum(
    output: list[int], limits: Limits, end: End | None
) -> None:
    assert end_of(request_with(output, limits)) == end


@pytest.mark.parametrize(
    ("num_prompt", "words"),
    [
        (7, ""),
        (8, "8 tokens; prompt and output together may have at most 8 (the KV pool)"),
        (20, "together may have at most 16 (the context)"),
    ],
)
def test_prompts_that_are_too_long_are_refused(num_prompt: int, words: str) -> None:
    submit = Submit(1, [1] * num_prompt, Sampling(seed=0), Limits(max_new_tokens=1), TextRules())
    refusal = refusal_of(submit, context_length=16, pool_tokens=8)
    assert (refusal.code if refusal else None) == (FinishCode.TOO_LARGE if words else None)
    assert words in (refusal.message if refusal else "")
