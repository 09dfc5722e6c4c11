"""``cache_salt``: requests with different salts share no cached prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aioengine.testing.fake_engine import fake_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioengine import Engine

pytestmark = pytest.mark.one_loop

PROMPT = "The same long beginning of many a prompt, of several pages. " * 2
PARAMS = {"temperature": 0, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def llm() -> Iterator[Engine]:
    with fake_engine() as engine:
        yield engine


def test_cached_prefix_is_shared_only_between_requests_with_the_same_salt(llm: Engine) -> None:
    assert llm.flush_cache()
    plain = llm.generate(PROMPT, PARAMS)
    cached: list[int] = []
    for salt in ("one", "two", "one", "two", "", None):
        answer = llm.generate(PROMPT, PARAMS, cache_salt=salt)
        assert (answer["text"], answer["output_ids"]) == (plain["text"], plain["output_ids"])
        cached.append(answer["meta_info"]["cached_tokens"])
    assert cached == [0, 0, *[len(PROMPT) // 16 * 16] * 4]
    assert llm.stats()["num_free_pages"] == llm.stats()["num_pages"]


def test_a_batch_takes_a_salt_for_each_prompt(llm: Engine) -> None:
    assert llm.flush_cache()
    llm.generate(PROMPT, PARAMS, cache_salt="b")
    answers = llm.generate([PROMPT, PROMPT, PROMPT], PARAMS, cache_salt=["a", "b", None])
    assert [num > 0 for num in answers["meta_info"]["cached_tokens"]] == [False, True, False]
    assert len(set(answers["text"])) == 1
    again = llm.generate([PROMPT, PROMPT], {**PARAMS, "n": 2}, cache_salt="a")
    assert all(num > 0 for num in again["meta_info"]["cached_tokens"])


def test_wrong_salts_are_refused_by_name(llm: Engine) -> None:
    with pytest.raises(TypeError, match=r"cache_salt must be a string, got 7 of type int"):
        llm.generate(PROMPT, cache_salt=7)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"cache_salt must be at most 512 bytes"):
        llm.generate(PROMPT, cache_salt="x" * 513)
    with pytest.raises(ValueError, match="lone surrogate"):
        llm.generate(PROMPT, cache_salt="\ud800")
    with pytest.raises(TypeError, match="cache_salt is a list, but there is one prompt"):
        llm.generate(PROMPT, cache_salt=["a"])
    with pytest.raises(ValueError, match="cache_salt has 1 entry for 2 prompts"):
        llm.generate([PROMPT, PROMPT], cache_salt=["a"])
    with pytest.raises(TypeError, match="cache_salt must be a string"):
        llm.generate([PROMPT, PROMPT], cache_salt=["a", 1])  # type: ignore[list-item]
