"""Prompts too large to be looked at where the loop waits are looked at on the tokenizer's thread, and judged alike."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from aioengine.frontend import prompts, requests
from aioengine.frontend.encoder import LONG_BYTES, Encoded, Encoder, Job, look_at
from aioengine.frontend.prompts import ChatPrompt, IdsPrompt, LargePrompt, Prompt, RefusedPrompt, TextPrompt
from aioengine.frontend.requests import CallRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MANY_IDS = list(range(prompts.MAX_IDS_AT_CALL + 1))
LONG_TEXT = "漢" * (prompts.MAX_CHARACTERS_AT_CALL + 1)
MESSAGE = {"role": "user", "content": "hello"}
MANY_MESSAGES = [MESSAGE] * (prompts.MAX_MESSAGES_AT_CALL + 1)


def ask(prompt: object = None, **options: object) -> CallRequest:
    ids = options.pop("input_ids", None)
    return requests.generate_request(prompt, None, ids, stream=False, options=options)


def chat(messages: object) -> CallRequest:
    return requests.chat_request(messages, None, stream=False, options={})


def num_characters(value: object) -> int:
    """Of all strings in it."""
    if isinstance(value, dict):
        value = list(value.values())
    return len(value) if isinstance(value, str) else sum(map(num_characters, value))  # type: ignore[arg-type]


def below_1000(token_ids: list[int]) -> None:
    if max(token_ids) >= 1000:
        raise ValueError("outside the vocabulary")


def accept(token_ids: list[int]) -> None:
    """All ids are right."""


def seen(prompt: Prompt) -> Prompt:
    assert isinstance(prompt, LargePrompt)
    return look_at(prompt, accept)


class TestIds:
    @pytest.mark.parametrize("kind", [list, tuple])
    def test_many_are_looked_at_later(self, kind: type[list[int]]) -> None:
        [small] = ask(input_ids=kind(MANY_IDS[:-1])).prompts
        [large] = ask(input_ids=kind(MANY_IDS)).prompts
        assert small == IdsPrompt(MANY_IDS[:-1])
        assert seen(large) == IdsPrompt(MANY_IDS)
        assert large.num_bytes == 8 * len(MANY_IDS)

    @pytest.mark.parametrize(("wrong", "kind"), [("x", TypeError), (True, TypeError), (1.0, TypeError)])
    def test_what_is_wrong_with_one_of_them(self, wrong: object, kind: type[Exception]) -> None:
        [prompt] = ask(input_ids=[*MANY_IDS, wrong]).prompts
        looked_at = seen(prompt)
        assert isinstance(looked_at, RefusedPrompt)
        assert isinstance(looked_at.error, kind)
        assert "input_ids entries" in str(looked_at.error)

    def test_entries_that_break_when_they_are_looked_at_are_refused_too(self) -> None:
        class Broken:
            def __index__(self) -> int:
                raise ZeroDivisionError("no number")

        looked_at = seen(ask(input_ids=[*MANY_IDS, Broken()]).prompts[0])
        assert isinstance(looked_at, RefusedPrompt)
        assert str(looked_at.error) == "input_ids cannot be read: ZeroDivisionError: no number"

    def test_the_vocabulary_is_checked_then_too(self) -> None:
        [prompt] = ask(input_ids=MANY_IDS).prompts
        looked_at = look_at(prompt, below_1000)
        assert isinstance(looked_at, RefusedPrompt)
        assert "outside the vocabulary" in str(looked_at.error)

    def test_rows_of_a_batch_count_together(self) -> None:
        rows = [MANY_IDS[: prompts.MAX_IDS_AT_CALL // 2]] * 3
        found = ask(input_ids=rows).prompts
        assert [type(prompt) for prompt in found] == [IdsPrompt, IdsPrompt, LargePrompt]
        assert seen(found[2]) == found[0]


class TestText:
    def test_long_text_is_looked_at_later_unless_it_is_ascii(self) -> None:
        [small] = ask(LONG_TEXT[:-1]).prompts
        [large] = ask(LONG_TEXT).prompts
        [ascii_text] = ask("a" * len(LONG_TEXT)).prompts
        assert small == TextPrompt(LONG_TEXT[:-1], 3 * len(LONG_TEXT) - 3)
        assert seen(large) == TextPrompt(LONG_TEXT, 3 * len(LONG_TEXT))
        assert isinstance(ascii_text, TextPrompt)

    def test_a_lone_surrogate_at_its_end(self) -> None:
        [prompt] = ask(f"{LONG_TEXT}\ud800").prompts
        looked_at = seen(prompt)
        assert isinstance(looked_at, RefusedPrompt)
        assert f"a lone surrogate at position {len(LONG_TEXT)}" in str(looked_at.error)


class TestChats:
    @pytest.mark.parametrize(
        "messages",
        [
            MANY_MESSAGES,
            [{"role": "user", "content": LONG_TEXT}],
            [{"role": "user", "content": [{"type": "text", "text": "a"}] * (prompts.MAX_MESSAGES_AT_CALL + 1)}],
        ],
        ids=["messages", "text", "parts"],
    )
    def test_long_ones_are_looked_at_later(self, messages: list[dict[str, object]]) -> None:
        [prompt] = chat(messages).prompts
        assert seen(prompt) == ChatPrompt(messages, num_characters(messages))

    def test_short_ones_at_once(self) -> None:
        messages = MANY_MESSAGES[:-1]
        assert list(chat(messages).prompts) == [ChatPrompt(messages, num_characters(messages))]

    @pytest.mark.parametrize("num_messages", [1, len(MANY_MESSAGES)])
    def test_what_is_nested_too_deeply_or_holds_itself(self, num_messages: int) -> None:
        endless: list[object] = []
        endless.append(endless)
        messages = [{**MESSAGE, "more": endless}] * num_messages
        if num_messages == 1:
            with pytest.raises(ValueError, match="messages is nested too deeply, or holds itself"):
                chat(messages)
        else:
            looked_at = seen(chat(messages).prompts[0])
            assert isinstance(looked_at, RefusedPrompt)
            assert "nested too deeply" in str(looked_at.error)

    def test_what_is_wrong_with_one_message(self) -> None:
        [prompt] = chat([*MANY_MESSAGES, {"content": "no role"}]).prompts
        looked_at = seen(prompt)
        assert isinstance(looked_at, RefusedPrompt)
        assert f"messages[{len(MANY_MESSAGES)}] has no role" in str(looked_at.error)


NUM_LATER = 3
NUM_ROWS = prompts.MAX_ROWS_AT_CALL + NUM_LATER


class TestLongBatches:
    """Of rows behind the first ones the call sees the kind alone."""

    @pytest.mark.parametrize("kind", [list, tuple])
    def test_texts_are_made_when_they_begin(self, kind: type[list[str]]) -> None:
        rows = ask(kind(["a"] * (NUM_ROWS - 1) + ["é"])).prompts
        assert (len(rows), len(rows.first)) == (NUM_ROWS, prompts.MAX_ROWS_AT_CALL)
        assert rows[-2] == TextPrompt("a", 1)
        assert seen(rows[-1]) == TextPrompt("é", 2)
        assert [type(one) for one in rows[NUM_ROWS - 3 :]] == [TextPrompt, TextPrompt, LargePrompt]

    def test_a_later_text_that_is_none_is_refused_alone(self) -> None:
        refused = seen(ask(["a"] * (NUM_ROWS - 1) + ["\ud800"]).prompts[NUM_ROWS - 1])
        assert isinstance(refused, RefusedPrompt)
        assert f"prompt[{NUM_ROWS - 1}] has a lone surrogate" in str(refused.error)

    def test_ids_are_looked_at_when_they_begin(self) -> None:
        rows = ask(input_ids=[[number] for number in range(NUM_ROWS - 1)] + [(1, "x")]).prompts
        assert rows[5] == IdsPrompt([5])
        assert seen(rows[NUM_ROWS - 2]) == IdsPrompt([NUM_ROWS - 2])
        refused = seen(rows[NUM_ROWS - 1])
        assert isinstance(refused, RefusedPrompt)
        assert f"input_ids[{NUM_ROWS - 1}] entries" in str(refused.error)

    @pytest.mark.parametrize("wrong", ["", 7, None, ["a"]])
    def test_a_wrong_kind_is_found_at_the_call(self, wrong: object) -> None:
        with pytest.raises((TypeError, ValueError), match=rf"prompt\[{NUM_ROWS - 1}\]"):
            ask(["a"] * (NUM_ROWS - 1) + [wrong])
        rows = ask(["a"] * (NUM_ROWS - 1) + [wrong], return_exceptions=True).prompts
        assert isinstance(rows[-1], RefusedPrompt)

    @pytest.mark.parametrize("wrong", [[], 7, None, "a"])
    def test_a_wrong_kind_of_row_too(self, wrong: object) -> None:
        with pytest.raises((TypeError, ValueError), match=rf"input_ids\[{NUM_ROWS - 1}\]"):
            ask(input_ids=[[1]] * (NUM_ROWS - 1) + [wrong])

    def test_a_row_whose_parameters_are_wrong(self) -> None:
        params: list[object] = [None] * (NUM_ROWS - 1) + [{"top_p": 7}]
        options = {"return_exceptions": True}
        rows = requests.generate_request(["a"] * NUM_ROWS, params, None, stream=False, options=options).prompts
        assert isinstance(rows[-1], RefusedPrompt)
        assert rows[-2] == TextPrompt("a", 1)


class Threads:
    """A tokenizer that notes the threads on which it works."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        self.names.append(threading.current_thread().name)
        return [[1] for _ in texts]

    def apply_chat_template(self, messages: Sequence[Mapping[str, object]], **options: object) -> str:
        return "a chat"


@pytest.mark.parametrize(
    ("prompt", "lane"),
    [
        (TextPrompt("a", 1), "aioengine-encode"),
        (TextPrompt("a" * LONG_BYTES * 2, LONG_BYTES * 2), "aioengine-encode-long"),
        (ChatPrompt([MESSAGE], 1), "aioengine-encode"),
        (ChatPrompt([{"role": "user", "content": "a" * LONG_BYTES * 2}], LONG_BYTES * 2), "aioengine-encode-long"),
        (chat(MANY_MESSAGES * 100).prompts[0], "aioengine-encode-long"),
    ],
    ids=["text", "long text", "chat", "long chat", "chat of many messages"],
)
async def test_long_prompts_keep_out_of_the_way_of_short_ones(prompt: Prompt, lane: str) -> None:
    tokenizer = Threads()
    encoder = Encoder(tokenizer)
    done: asyncio.Future[list[Encoded]] = asyncio.get_running_loop().create_future()
    encoder.encode(Job([prompt], lambda encoded, _: done.set_result(encoded), accept))
    assert await done == [[1]]
    assert tokenizer.names == [lane]
    encoder.close()
