"""Prompts too large to be checked while the loop waits are checked on the tokenizer's thread, and judged alike."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from aioengine.frontend.intake import prompts, requests
from aioengine.frontend.intake.encoder import LONG_BYTES, Encoded, EncodeJob, Encoder, checked
from aioengine.frontend.intake.prompts import ChatPrompt, IdsPrompt, Prompt, PromptError, TextPrompt
from aioengine.frontend.intake.requests import PROMPTS_IN_PIECE, CallRequest

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


def seen(prompt: Prompt | PromptError) -> Prompt | PromptError:
    """A prompt that was left for later, as it is when it has been checked."""
    assert not isinstance(prompt, Exception)
    assert not prompt.is_checked
    return checked(prompt, accept)


class TestIds:
    @pytest.mark.parametrize("kind", [list, tuple])
    def test_many_ids_are_checked_after_the_call(self, kind: type[list[int]]) -> None:
        [small] = ask(input_ids=kind(MANY_IDS[:-1])).prompts
        [large] = ask(input_ids=kind(MANY_IDS)).prompts
        assert small == IdsPrompt(MANY_IDS[:-1])
        assert seen(large) == IdsPrompt(MANY_IDS)
        assert isinstance(large, IdsPrompt)
        assert large.num_bytes == 8 * len(MANY_IDS)

    @pytest.mark.parametrize(("wrong", "kind"), [("x", TypeError), (True, TypeError), (1.0, TypeError)])
    def test_a_wrong_id_is_an_error_of_the_prompt(self, wrong: object, kind: type[Exception]) -> None:
        [prompt] = ask(input_ids=[*MANY_IDS, wrong]).prompts
        error = seen(prompt)
        assert isinstance(error, kind)
        assert "input_ids entries" in str(error)

    def test_entries_that_raise_when_checked_are_refused(self) -> None:
        class Broken:
            def __index__(self) -> int:
                raise ZeroDivisionError("no number")

        error = seen(ask(input_ids=[*MANY_IDS, Broken()]).prompts[0])
        assert isinstance(error, ValueError)
        assert str(error) == "input_ids cannot be read: ZeroDivisionError: no number"

    def test_ids_outside_the_vocabulary_are_refused_after_the_call(self) -> None:
        [prompt] = ask(input_ids=MANY_IDS).prompts
        error = checked(prompt, below_1000)
        assert isinstance(error, ValueError)
        assert "outside the vocabulary" in str(error)

    def test_ids_of_all_rows_of_a_batch_count_together(self) -> None:
        rows = [MANY_IDS[: prompts.MAX_IDS_AT_CALL // 2]] * 3
        found = ask(input_ids=rows).prompts
        assert [isinstance(prompt, IdsPrompt) and prompt.is_checked for prompt in found] == [True, True, False]
        assert seen(found[2]) == found[0]

    def test_a_large_array_is_not_even_copied_at_the_call(self) -> None:
        rows = ask(input_ids=[np.arange(prompts.MAX_IDS_AT_CALL), array := np.arange(9)]).prompts
        assert isinstance(rows[1], IdsPrompt)
        assert rows[1].ids is array
        assert seen(rows[1]) == IdsPrompt([*range(9)])

    def test_of_an_array_only_slices_become_lists(self) -> None:
        lengths: list[int] = []

        class Recorded(np.ndarray):
            def tolist(self) -> object:
                lengths.append(len(self))
                return super().tolist()

        many = np.arange(10 * prompts.IDS_IN_SLICE).view(Recorded)
        [last] = ask(input_ids=many, truncate_prompt_tokens=5).prompts
        assert last == IdsPrompt(many[-5:].tolist())
        assert seen(ask(input_ids=many).prompts[0]) == IdsPrompt([*range(len(many))])
        assert lengths == [5, 5, *[prompts.IDS_IN_SLICE] * 10]

    def test_an_array_that_has_no_slices_is_read_whole(self) -> None:
        class Ids:
            def __len__(self) -> int:
                return 3

            def tolist(self) -> list[int]:
                return [7, 8, 9]

        assert ask(input_ids=Ids(), truncate_prompt_tokens=2).prompts == [IdsPrompt([8, 9])]


class TestText:
    def test_long_text_is_checked_later_unless_it_is_ascii(self) -> None:
        [small] = ask(LONG_TEXT[:-4]).prompts
        [large] = ask(LONG_TEXT + "漢" * 3).prompts
        [ascii_text] = ask("a" * len(LONG_TEXT) * 2).prompts
        assert small == TextPrompt(LONG_TEXT[:-4], 3 * len(LONG_TEXT) - 12)
        assert seen(large) == TextPrompt(LONG_TEXT + "漢" * 3, 3 * len(LONG_TEXT) + 9)
        assert isinstance(ascii_text, TextPrompt)
        assert ascii_text.is_checked

    def test_a_lone_surrogate_at_the_end_of_a_long_text_is_refused(self) -> None:
        [prompt] = ask(f"{LONG_TEXT}漢漢漢\ud800").prompts
        error = seen(prompt)
        assert isinstance(error, ValueError)
        assert f"prompt has a lone surrogate at position {len(LONG_TEXT) + 3}" in str(error)

    def test_texts_of_a_batch_count_together(self) -> None:
        found = ask([LONG_TEXT[: len(LONG_TEXT) // 2]] * 3).prompts
        assert [isinstance(prompt, TextPrompt) and prompt.is_checked for prompt in found] == [True, True, False]


class TestChats:
    @pytest.mark.parametrize(
        "messages",
        [
            MANY_MESSAGES,
            [{"role": "user", "content": LONG_TEXT + "漢漢漢"}],
            [{"role": "user", "content": [{"type": "text", "text": "a"}] * (prompts.MAX_MESSAGES_AT_CALL + 1)}],
        ],
        ids=["messages", "text", "parts"],
    )
    def test_long_chats_are_checked_after_the_call(self, messages: list[dict[str, object]]) -> None:
        [prompt] = chat(messages).prompts
        assert seen(prompt) == ChatPrompt(messages, num_characters(messages))

    def test_short_chats_are_checked_at_the_call(self) -> None:
        messages = MANY_MESSAGES[:-1]
        assert chat(messages).prompts == [ChatPrompt(messages, num_characters(messages))]

    def test_chats_of_a_batch_count_together(self) -> None:
        found = chat([MANY_MESSAGES[: prompts.MAX_MESSAGES_AT_CALL // 2]] * 3).prompts
        assert [isinstance(prompt, ChatPrompt) and prompt.is_checked for prompt in found] == [True, True, False]
        assert seen(found[2]) == found[0]

    @pytest.mark.parametrize("num_messages", [1, len(MANY_MESSAGES)])
    def test_messages_that_are_nested_too_deeply_or_hold_themselves(self, num_messages: int) -> None:
        endless: list[object] = []
        endless.append(endless)
        messages = [{**MESSAGE, "more": endless}] * num_messages
        if num_messages == 1:
            with pytest.raises(ValueError, match="messages is nested too deeply, or holds itself"):
                chat(messages)
        else:
            error = seen(chat(messages).prompts[0])
            assert isinstance(error, ValueError)
            assert "nested too deeply" in str(error)

    def test_a_wrong_message_of_a_long_chat_is_an_error_of_the_prompt(self) -> None:
        [prompt] = chat([*MANY_MESSAGES, {"content": "no role"}]).prompts
        error = seen(prompt)
        assert isinstance(error, ValueError)
        assert f"messages[{len(MANY_MESSAGES)}] has no role" in str(error)


NUM_ROWS = PROMPTS_IN_PIECE + 3


def all_of(request: CallRequest) -> list[Prompt | PromptError]:
    """The prompts, when all rows were checked as far as the loop does it."""
    while not request.is_checked:
        request.check_more()
    return request.prompts


class TestLongBatches:
    """The call checks the first rows; of the others the loop checks the kind, and the thread the rest."""

    @pytest.mark.parametrize("kind", [list, tuple])
    def test_texts_of_a_long_batch_are_checked_in_pieces(self, kind: type[list[str]]) -> None:
        request = ask(kind(["a"] * (NUM_ROWS - 1) + ["é" * 9]))
        assert (len(request.prompts), request.num_prompts, request.num_rows) == (PROMPTS_IN_PIECE, NUM_ROWS, NUM_ROWS)
        rows = all_of(request)
        assert rows[-2] == TextPrompt("a", 1)
        assert seen(rows[-1]) == TextPrompt("é" * 9, 18)

    def test_a_later_text_with_a_lone_surrogate_is_refused_alone(self) -> None:
        error = seen(all_of(ask(["a"] * (NUM_ROWS - 1) + ["aaaaaaa\ud800"]))[-1])
        assert isinstance(error, ValueError)
        assert f"prompt[{NUM_ROWS - 1}] has a lone surrogate" in str(error)

    def test_ids_of_a_long_batch_are_checked_in_pieces(self) -> None:
        rows = all_of(ask(input_ids=[[number] for number in range(NUM_ROWS - 1)] + [(1, "x")]))
        assert rows[5] == IdsPrompt([5])
        assert seen(rows[NUM_ROWS - 2]) == IdsPrompt([NUM_ROWS - 2])
        error = seen(rows[NUM_ROWS - 1])
        assert isinstance(error, TypeError)
        assert f"input_ids[{NUM_ROWS - 1}] entries" in str(error)

    def test_chats_of_a_long_batch_are_checked_in_pieces(self) -> None:
        rows = all_of(chat([[MESSAGE]] * (NUM_ROWS - 1) + [[{"content": "no role"}]]))
        assert seen(rows[-2]) == rows[0] == ChatPrompt([MESSAGE], num_characters(MESSAGE))
        error = seen(rows[-1])
        assert isinstance(error, ValueError)
        assert f"messages[{NUM_ROWS - 1}][0] has no role" in str(error)

    @pytest.mark.parametrize("wrong", ["", 7, None, ["a"]])
    def test_later_row_that_is_not_a_string_is_refused(self, wrong: object) -> None:
        request = ask(["a"] * (NUM_ROWS - 1) + [wrong])
        with pytest.raises((TypeError, ValueError), match=rf"prompt\[{NUM_ROWS - 1}\]"):
            all_of(request)
        rows = all_of(ask(["a"] * (NUM_ROWS - 1) + [wrong], return_exceptions=True))
        assert isinstance(rows[-1], TypeError | ValueError)

    @pytest.mark.parametrize("wrong", [[], 7, None, "a"])
    def test_a_later_row_that_holds_no_ids_is_refused(self, wrong: object) -> None:
        request = ask(input_ids=[[1]] * (NUM_ROWS - 1) + [wrong])
        with pytest.raises((TypeError, ValueError), match=rf"input_ids\[{NUM_ROWS - 1}\]"):
            all_of(request)

    def test_a_later_row_with_wrong_parameters_is_refused_alone(self) -> None:
        params: list[object] = [None] * (NUM_ROWS - 1) + [{"top_p": 7}]
        options = {"return_exceptions": True}
        rows = all_of(requests.generate_request(["a"] * NUM_ROWS, params, None, stream=False, options=options))
        assert isinstance(rows[-1], ValueError)
        assert rows[-2] == TextPrompt("a", 1)

    def test_rows_with_different_n_are_refused(self) -> None:
        params: list[object] = [{"n": 2}] * (NUM_ROWS - 1) + [{"n": 3}]
        request = requests.generate_request(
            ["a"] * NUM_ROWS, params, None, stream=False, options={"return_exceptions": True}
        )
        with pytest.raises(ValueError, match="n must be the same in all sampling_params of a batch, got 2 and 3"):
            all_of(request)


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
    ("prompt", "thread"),
    [
        (TextPrompt("a", 1), "aioengine-encode"),
        (TextPrompt("a" * LONG_BYTES * 2, LONG_BYTES * 2), "aioengine-encode-long"),
        (ChatPrompt([MESSAGE], 1), "aioengine-encode"),
        (ChatPrompt([{"role": "user", "content": "a" * LONG_BYTES * 2}], LONG_BYTES * 2), "aioengine-encode-long"),
        (chat(MANY_MESSAGES * 100).prompts[0], "aioengine-encode-long"),
    ],
    ids=["text", "long text", "chat", "long chat", "chat of many messages"],
)
async def test_long_prompts_are_encoded_on_another_thread_than_short_ones(prompt: Prompt, thread: str) -> None:
    tokenizer = Threads()
    encoder = Encoder(tokenizer)
    done: asyncio.Future[list[Encoded]] = asyncio.get_running_loop().create_future()
    encoder.encode(EncodeJob([prompt], lambda encoded, _: done.set_result(encoded), accept))
    assert await done == [[1]]
    assert tokenizer.names == [thread]
    encoder.close()


@pytest.mark.parametrize(
    ("messages", "num_text"),
    [
        ([{"role": "user", "content": "x" * 4096}] * prompts.MAX_MESSAGES_AT_CALL + [MESSAGE] * 99_000, 4 << 20),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}] * 99_000}], 0),
        ([MESSAGE] * 99_000, 0),
    ],
)
def test_the_size_of_an_unchecked_conversation_is_not_overestimated(
    messages: list[dict[str, object]], num_text: int
) -> None:
    """Else all other calls are refused until it is found to be too large."""
    request = chat(messages)
    assert not isinstance(request.prompts[0], Exception)
    assert not request.prompts[0].is_checked
    assert LONG_BYTES < request.num_bytes < num_text + 300 * 100_000
