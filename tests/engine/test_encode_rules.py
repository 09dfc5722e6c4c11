"""``add_special_tokens`` and ``truncate_prompt_tokens``: how texts are tokenized."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from aioengine.errors import RequestTooLargeError
from tests.engine.engine_double import CONTEXT_LENGTH, VOCAB_SIZE, CodePoints, World

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

pytestmark = pytest.mark.one_loop

FIRST = 2
SHORT = {"max_new_tokens": 1}
CHAT = [{"role": "user", "content": "Hi"}]


class WithFirst(CodePoints):
    """A tokenizer with a token per character and a BOS token."""

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        rows = super().encode_batch(texts, add_special_tokens=add_special_tokens)
        return [[FIRST, *row] if add_special_tokens else row for row in rows]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    world.tokenizer = WithFirst()
    async with world.engine:
        yield world


def ids_of(text: str) -> list[int]:
    return [ord(character) for character in text]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, [FIRST, *ids_of("abc")]),
        ({"add_special_tokens": True}, [FIRST, *ids_of("abc")]),
        ({"add_special_tokens": False}, ids_of("abc")),
        ({"truncate_prompt_tokens": 2}, ids_of("bc")),
        ({"truncate_prompt_tokens": 4}, [FIRST, *ids_of("abc")]),
        ({"truncate_prompt_tokens": 3, "add_special_tokens": False}, ids_of("abc")),
        ({"truncate_prompt_tokens": 9, "add_special_tokens": None}, [FIRST, *ids_of("abc")]),
    ],
)
async def test_special_tokens_are_added_if_requested(
    world: World, arguments: dict[str, object], expected: list[int]
) -> None:
    answers = [
        await world.engine.async_generate("abc", SHORT, return_prompt_token_ids=True, **arguments),  # type: ignore[call-overload]
        *await world.engine.async_generate(["abc", "abc"], SHORT, return_prompt_token_ids=True, **arguments),  # type: ignore[call-overload]
    ]
    stream = world.engine.async_generate("abc", SHORT, stream=True, return_prompt_token_ids=True, **arguments)  # type: ignore[call-overload]
    answers += [chunk async for chunk in stream]
    assert [answer["prompt_token_ids"] for answer in answers] == [expected] * 4
    assert answers[0]["meta_info"]["prompt_tokens"] == len(expected)


async def test_special_tokens_are_added_to_chats_only_if_requested(world: World) -> None:
    written = ids_of("<user>Hi<assistant>")
    for options, expected in [
        ({}, written),
        ({"add_special_tokens": True}, [FIRST, *written]),
        ({"truncate_prompt_tokens": 5}, written[-5:]),
    ]:
        answer = await world.engine.async_chat(CHAT, SHORT, return_prompt_token_ids=True, **options)  # type: ignore[call-overload]
        assert answer["prompt_token_ids"] == expected


@pytest.mark.parametrize("make", [list, tuple, np.array])
async def test_only_the_last_ids_are_kept_and_checked(world: World, make: type[list[int]]) -> None:
    ids = make([VOCAB_SIZE + 5, 7, 8, 9])
    answer = await world.engine.async_generate(
        input_ids=ids, sampling_params=SHORT, truncate_prompt_tokens=3, return_prompt_token_ids=True
    )
    assert answer["prompt_token_ids"] == [7, 8, 9]
    with pytest.raises(ValueError, match="outside the vocabulary"):
        world.engine.async_generate(input_ids=ids, truncate_prompt_tokens=4)


@pytest.mark.parametrize("prompt", ["x" * 100 * CONTEXT_LENGTH, CHAT[:1] * 200])
async def test_truncate_prompt_tokens_makes_long_prompts_fit(world: World, prompt: object) -> None:
    call = world.engine.async_chat if isinstance(prompt, list) else world.engine.async_generate
    with pytest.raises(RequestTooLargeError):
        await call(prompt, SHORT)  # type: ignore[operator]
    answer = await call(prompt, SHORT, truncate_prompt_tokens=9, return_prompt_token_ids=True)  # type: ignore[operator]
    end = "assistant>" if isinstance(prompt, list) else "x" * 9
    assert answer["prompt_token_ids"] == ids_of(end[-9:])
    with pytest.raises(RequestTooLargeError):
        await call(prompt, SHORT, truncate_prompt_tokens=CONTEXT_LENGTH)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"prompt": "a", "truncate_prompt_tokens": 0}, ValueError, "truncate_prompt_tokens must be an integer of at"),
        ({"prompt": "a", "truncate_prompt_tokens": -1}, ValueError, "truncate_prompt_tokens.* got -1"),
        ({"prompt": "a", "truncate_prompt_tokens": 2.0}, TypeError, "truncate_prompt_tokens"),
        ({"prompt": "a", "truncate_prompt_tokens": True}, TypeError, "truncate_prompt_tokens"),
        ({"prompt": "a", "add_special_tokens": 1}, TypeError, "add_special_tokens must be True or False, got 1"),
        ({"input_ids": [5], "add_special_tokens": True}, ValueError, "add_special_tokens=True works only for text"),
    ],
)
async def test_wrong_values_are_refused_by_the_call(
    world: World, arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        world.engine.async_generate(**arguments)  # type: ignore[call-overload]
    assert world.double.submits == []
