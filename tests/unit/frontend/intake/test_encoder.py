"""Texts that are too long are refused before they are tokenized completely."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import aioengine
from aioengine.errors import RequestTooLargeError
from aioengine.frontend.intake.encoder import (
    BATCH_BYTES,
    PIECE_CHARACTERS,
    Encoded,
    EncodeJob,
    Encoder,
    TextSizes,
    longest_token,
)
from aioengine.frontend.intake.prompts import EncodeRules, TextPrompt
from aioengine.tokenization.tokenizer import Tokenizer

DEMO = Path(aioengine.__file__).parent / "demo"


class Pairs:
    """A tokenizer with one token for every two characters."""

    def __init__(self) -> None:
        self.num_characters = 0

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        self.num_characters += sum(map(len, texts))
        return [[0] * ((len(text) + 1) // 2) for text in texts]

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True
    ) -> str:
        raise NotImplementedError


def facts(decoder: object, *tokens: str) -> dict[str, object]:
    return {
        "decoder": decoder,
        "model": {"vocab": {token: place for place, token in enumerate(tokens)}},
        "added_tokens": [{"content": "<end>"}],
    }


@pytest.mark.parametrize(
    ("decoder", "expected"),
    [
        ({"type": "ByteLevel"}, 7),
        ({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}, 7),
        ({"type": "WordPiece"}, None),
        (None, None),
    ],
)
def test_longest_token_of_a_tokenizer(decoder: object, expected: int | None) -> None:
    assert longest_token(facts(decoder, "a", "seven.7", "é" * 3)) == expected
    if expected is not None:
        assert longest_token(facts(decoder, "a")) == len("<end>")
        assert longest_token(facts(decoder, "é" * 5)) == 10


def test_texts_with_too_many_bytes_are_refused_before_encoding() -> None:
    sizes = TextSizes(max_tokens=100, longest_token=4)
    sizes.check_bytes(100 * 4 * 3)
    with pytest.raises(RequestTooLargeError, match="at least 166 tokens; at most 100 are allowed"):
        sizes.check_bytes(2000)


def test_texts_with_too_many_tokens_are_refused_after_encoding_a_part() -> None:
    tokenizer = Pairs()
    text = "x" * (10 * PIECE_CHARACTERS)
    TextSizes(max_tokens=len(text) // 2, longest_token=2).check_pieces(text, tokenizer)
    assert tokenizer.num_characters == len(text)
    tokenizer.num_characters = 0
    with pytest.raises(RequestTooLargeError, match="at most 20000 are allowed"):
        TextSizes(max_tokens=20_000, longest_token=2).check_pieces(text, tokenizer)
    assert tokenizer.num_characters == 3 * PIECE_CHARACTERS


def test_only_long_texts_are_checked_before_encoding() -> None:
    tokenizer = Pairs()
    encoder = Encoder(tokenizer, TextSizes(max_tokens=1000, longest_token=100))
    assert [len(ids) for ids in tokenizer.encode_batch(["x" * 100])] == [50]
    tokenizer.num_characters = 0
    encoded = encoder._encode_texts(["x" * 4000, "x" * 200_000], EncodeRules())  # pyright: ignore[reportPrivateUsage]
    assert isinstance(encoded[0], list)
    assert isinstance(encoded[1], RequestTooLargeError)
    encoder.close()


class Watched(Pairs):
    """Records its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []
        self.has_begun = threading.Event()

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        self.batches.append(len(texts))
        self.has_begun.set()
        return super().encode_batch(texts)


async def test_a_full_batch_of_texts_is_encoded_while_more_arrive() -> None:
    tokenizer = Watched()
    encoder = Encoder(tokenizer)
    results: list[int] = []
    ended = asyncio.Event()

    def done(encoded: list[Encoded], _seconds: float) -> None:
        results.extend(len(ids) for ids in encoded if isinstance(ids, list))
        if len(results) == 10:
            ended.set()

    def ask(size: int) -> None:
        encoder.encode(EncodeJob([TextPrompt("x" * size, size)], done))

    for number in range(8):
        ask(BATCH_BYTES // 4 + number)
    assert tokenizer.has_begun.wait(10)  # there was no iteration of the loop since
    ask(100)
    ask(102)
    await ended.wait()
    assert tokenizer.batches == [4, 4, 2]
    assert results == [*((BATCH_BYTES // 4 + number + 1) // 2 for number in range(8)), 50, 51]
    encoder.close()


async def test_texts_of_one_loop_iteration_are_encoded_together() -> None:
    tokenizer = Watched()
    encoder = Encoder(tokenizer)
    done = [asyncio.get_running_loop().create_future() for _ in range(5)]
    for future in done:
        encoder.encode(EncodeJob([TextPrompt("x", 1)], lambda _, seconds, future=future: future.set_result(seconds)))
    assert tokenizer.batches == []
    await asyncio.gather(*done)
    assert tokenizer.batches == [5]
    encoder.close()


async def test_loop_runs_while_a_long_text_is_tokenized() -> None:
    encoder = Encoder(Tokenizer(DEMO))
    done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    text = "Once upon a time there was a word, and 12 more. " * 2_000
    encoder.encode(EncodeJob([TextPrompt(text, len(text))], lambda _encoded, seconds: done.set_result(seconds)))
    num_turns = 0
    while not done.done():
        await asyncio.sleep(0)
        num_turns += 1
    encoder.close()
    assert num_turns > 20  # there would be only a few if it ran on the loop's thread or held the GIL
