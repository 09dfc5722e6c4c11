"""Values of the rows of a batch that take long to check are checked in several pieces."""

from __future__ import annotations

import pytest

from aioengine.frontend.intake.prompt_options import MAX_TOKEN_IDS
from aioengine.frontend.intake.requests import generate_request


def test_long_lists_of_tokens_with_logprobs_are_checked_in_several_pieces() -> None:
    options = {"return_logprob": True, "token_ids_logprob": [list(range(3_000)), None, [70_000]] * 40}
    request = generate_request(["a"] * 120, None, None, stream=False, options=options)
    pieces = [len(request.prompts)]
    while not request.is_checked:
        request.check_more()
        pieces.append(len(request.prompts) - sum(pieces))
    assert max(pieces) <= 3 * (MAX_TOKEN_IDS // 3_000 + 1)
    assert sum(pieces) == 120
    rules = [request.logprobs_of(prompt) for prompt in range(120)]
    assert [len(each.token_ids) for each in rules if each is not None] == [3_000, 0, 1] * 40


def test_a_list_that_is_too_long_is_named_at_the_call() -> None:
    options = {"return_logprob": True, "token_ids_logprob": [[1], [2] * (MAX_TOKEN_IDS + 1)]}
    with pytest.raises(ValueError, match=f"at most {MAX_TOKEN_IDS} entries"):
        generate_request(["a"] * 2, None, None, stream=False, options=options)
