"""Slow checks of the rows of a batch are divided into pieces."""

from __future__ import annotations

import pytest

from aioengine.frontend.intake.prompt_options import MAX_TOKEN_IDS
from aioengine.frontend.intake.requests import generate_request


def test_list_that_is_too_long_is_refused_by_the_call() -> None:
    options = {"return_logprob": True, "token_ids_logprob": [[1], [2] * (MAX_TOKEN_IDS + 1)]}
    with pytest.raises(ValueError, match=f"at most {MAX_TOKEN_IDS} entries"):
        generate_request(["a"] * 2, None, None, stream=False, options=options)
