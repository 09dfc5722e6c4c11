"""Long batches are checked in pieces, and long prompts are encoded on their own thread."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from aioengine.frontend.intake import requests
from aioengine.frontend.intake.encoder import LONG_BYTES, Encoded, EncodeJob, Encoder
from aioengine.frontend.intake.prompts import ChatPrompt, CheckedPrompt, IdsPrompt, PromptError, TextPrompt
from aioengine.frontend.intake.requests import MAX_BYTES_IN_PIECE, PROMPTS_IN_PIECE, CallRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MESSAGE = {"role": "user", "content": "hello"}


def ask(prompt: object = None, **options: object) -> CallRequest:
    ids = options.pop("input_ids", None)
    return requests.generate_request(prompt, None, ids, stream=False, options=options)


def chat(messages: object, **options: object) -> CallRequest:
    return requests.chat_request(messages, None, stream=False, options=options)


NUM_ROWS = PROMPTS_IN_PIECE + 3


def all_of(request: CallRequest) -> list[CheckedPrompt | PromptError]:
    """Return the prompts after all rows were checked in pieces, as on the loop."""
    while not request.is_checked:
        request.check_more()
    return request.prompts


class TestLongBatches:
    """The call checks the first rows, and a thread the others."""

    def test_a_batch_of_large_prompts_is_checked_in_pieces(self) -> None:
        request = ask(["a" * (MAX_BYTES_IN_PIECE + 1)] * 3)
        assert len(request.prompts) == 1
        assert len(all_of(request)) == 3

    @pytest.mark.parametrize("kind", [list, tuple])
    def test_texts_of_a_long_batch_are_checked_in_pieces(self, kind: type[list[str]]) -> None:
        request = ask(kind(["a"] * (NUM_ROWS - 1) + ["é" * 9]))
        assert (len(request.prompts), request.num_prompts, request.num_rows) == (PROMPTS_IN_PIECE, NUM_ROWS, NUM_ROWS)
        rows = all_of(request)
        assert rows[-2] == TextPrompt("a", 1)
        assert rows[-1] == TextPrompt("é" * 9, 18)

    def test_a_later_text_with_a_lone_surrogate_is_refused_alone(self) -> None:
        rows = ["a"] * (NUM_ROWS - 1) + ["aaaaaaa\ud800"]
        error = all_of(ask(rows, return_exceptions=True))[-1]
        assert isinstance(error, ValueError)
        assert f"prompt[{NUM_ROWS - 1}] has a lone surrogate" in str(error)

    def test_ids_of_a_long_batch_are_checked_in_pieces(self) -> None:
        ids = [[number] for number in range(NUM_ROWS - 1)] + [(1, "x")]
        rows = all_of(ask(input_ids=ids, return_exceptions=True))
        assert rows[5] == IdsPrompt([5])
        assert rows[NUM_ROWS - 2] == IdsPrompt([NUM_ROWS - 2])
        error = rows[NUM_ROWS - 1]
        assert isinstance(error, TypeError)
        assert f"input_ids[{NUM_ROWS - 1}] entries" in str(error)

    def test_chats_of_a_long_batch_are_checked_in_pieces(self) -> None:
        chats = [[MESSAGE]] * (NUM_ROWS - 1) + [[{"content": "no role"}]]
        rows = all_of(chat(chats, return_exceptions=True))
        assert rows[-2] == rows[0] == ChatPrompt([MESSAGE], len("userhello"))
        error = rows[-1]
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
    def test_later_row_without_ids_is_refused(self, wrong: object) -> None:
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
    """A tokenizer that records its threads."""

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
    ],
    ids=["text", "long text", "chat", "long chat"],
)
async def test_long_prompts_are_encoded_on_another_thread_than_short_ones(prompt: CheckedPrompt, thread: str) -> None:
    tokenizer = Threads()
    encoder = Encoder(tokenizer)
    done: asyncio.Future[list[Encoded]] = asyncio.get_running_loop().create_future()
    encoder.encode(EncodeJob([prompt], lambda encoded, _: done.set_result(encoded)))
    assert await done == [[1]]
    assert tokenizer.names == [thread]
    encoder.close()
