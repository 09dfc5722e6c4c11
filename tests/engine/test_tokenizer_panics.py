"""A panic of the compiled tokenizer is not an Exception. It fails only the request that caused it."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from aioengine.errors import RequestError
from aioengine.protocol.messages import ToScheduler
from aioengine.testing import fake_engine
from aioengine.testing.byte_tokenizer import BYTE_MODEL
from aioengine.testing.fake_engine import fake_async_engine
from aioengine.tokenization.tokenizer import Tokenizer
from tests.engine.engine_double import World

pytestmark = pytest.mark.one_loop

PANICS = "ab"
"""With a normalizer that puts nothing in front of a text, the library miscounts texts of several characters."""
SHORT = {"max_new_tokens": 4}


class Panic(BaseException):
    """Has the base class of a panic."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a model folder whose tokenizer panics."""
    shutil.copytree(BYTE_MODEL, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["normalizer"] = {"type": "Prepend", "prepend": ""}
    path.write_text(json.dumps(content))
    return tmp_path


def test_the_library_still_panics(folder: Path) -> None:
    """Otherwise the tests below check nothing."""
    tokenizer = Tokenizer(folder)
    with pytest.raises(BaseException, match=".") as caught:
        tokenizer._fast.encode_batch_fast([PANICS])  # pyright: ignore[reportPrivateUsage]
    assert not isinstance(caught.value, Exception)


def test_tokenizer_panic_is_an_ordinary_error(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    whole = tokenizer.encode("a")
    for _ in range(3):
        with pytest.raises(RuntimeError, match="^the tokenizers library panicked: index out of bounds"):
            tokenizer.encode(PANICS)
        assert tokenizer.encode("a") == whole


async def test_panic_of_the_library_fails_only_its_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_engine, "BYTE_MODEL", folder)
    async with asyncio.timeout(30), fake_async_engine(processes=False) as engine:
        for _ in range(3):
            bad = [
                engine.async_generate(PANICS, SHORT),
                engine.async_generate(["a", PANICS], SHORT),
                engine.async_chat([{"role": "user", "content": PANICS}], SHORT),
            ]
            good = [engine.async_generate(letter, SHORT) for letter in "cde"]
            mixed = await engine.async_generate(["a", PANICS, "b"], SHORT, return_exceptions=True)
            assert [isinstance(row, RequestError) for row in mixed] == [False, True, False]
            result = await asyncio.gather(*bad, return_exceptions=True)
            for error in result:
                assert isinstance(error, RequestError)
                assert error.stage == "tokenize"
            assert [len(out["output_ids"]) for out in await asyncio.gather(*good)] == [4, 4, 4]
        assert engine.stats()["num_streams"] == 0


async def test_base_exception_of_a_tokenizer_fails_only_its_request(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = world.tokenizer.encode

    def encode(text: str, *, add_special_tokens: bool = True) -> list[int]:
        if "bad" in text:
            raise Panic("out of bounds")
        return plain(text)

    monkeypatch.setattr(world.tokenizer, "encode", encode)
    async with asyncio.timeout(30):
        for _ in range(3):
            good, bad = world.engine.async_generate("good", SHORT), world.engine.async_generate("bad", SHORT)
            with pytest.raises(RequestError, match="Panic: out of bounds"):
                await bad
            assert len((await good)["output_ids"]) == 4
    assert world.engine.stats()["num_streams"] == 0


@pytest.mark.parametrize("rows", [1, 200])
async def test_error_while_rows_are_started_ends_only_their_call(world: World, rows: int) -> None:
    """The loop would only log an exception of its callbacks."""
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    world.double.is_held = True
    frontend = world.engine._frontend_here()  # pyright: ignore[reportPrivateUsage]
    submitter = frontend.calls.submitter  # pyright: ignore[reportPrivateUsage]
    plain = submitter._send  # pyright: ignore[reportPrivateUsage]

    def fail(messages: list[ToScheduler]) -> None:
        raise MemoryError("no place for it")

    async with asyncio.timeout(30):
        submitter._send = fail  # type: ignore[assignment]
        bad = world.engine.async_generate(["bad"] * rows, SHORT)
        with pytest.raises(RequestError, match="MemoryError: no place for it"):
            await bad
        submitter._send = plain
        world.double.resume()
        assert len((await world.engine.async_generate("good", SHORT))["output_ids"]) == 4
    assert world.engine.stats()["num_streams"] == 0
