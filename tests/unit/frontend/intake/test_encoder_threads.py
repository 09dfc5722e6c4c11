"""Every job of an encoder thread is answered exactly once, for all kinds of errors on the thread."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.errors import RequestError
from aioengine.frontend.intake.encoder import Encoded, EncodeJob, Encoder
from aioengine.frontend.intake.prompts import ChatPrompt, CheckedPrompt, TextPrompt


class Panic(BaseException):
    """Has the base class of a panic of compiled code."""


class Unprintable(BaseException):
    """Its message raises another error."""

    def __str__(self) -> str:
        raise Panic("no message")


ERRORS = [Panic, Unprintable, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, StopIteration]


class Fragile:
    """A tokenizer of bytes that raises ``error`` for texts and chats with "bad" in them."""

    def __init__(self, error: type[BaseException] = Panic) -> None:
        self.error = error
        self.gate = threading.Event()
        self.gate.set()
        self.has_begun = threading.Event()

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        self.has_begun.set()
        self.gate.wait(10)
        if any("bad" in text for text in texts):
            raise self.error("it broke")
        return [list(text.encode()) for text in texts]

    def apply_chat_template(self, messages: Sequence[Mapping[str, object]], **options: object) -> str:
        text = str(messages[0]["content"])
        if "bad" in text:
            raise self.error("it broke")
        return text


class Answers:
    """Gives jobs to an encoder and records every answer."""

    def __init__(self, tokenizer: Fragile) -> None:
        self.encoder = Encoder(tokenizer)
        self.answers: dict[int, list[list[Encoded]]] = {}

    def ask(self, *prompts: CheckedPrompt, then: Callable[[], object] = list) -> None:
        """Add a job. ``then`` is called with the answer, and may raise."""
        results = self.answers[len(self.answers)] = []

        def done(encoded: list[Encoded], _seconds: float) -> None:
            results.append(encoded)
            then()

        self.encoder.encode(EncodeJob(prompts, done))

    async def all(self) -> list[list[Encoded]]:
        """Return the answers to all jobs. Each must have exactly one."""
        async with asyncio.timeout(30):
            while not all(self.answers.values()):  # noqa: ASYNC110  # jobs have no event
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)  # a second answer could arrive in this time
        assert {len(value) for value in self.answers.values()} == {1}
        return [value[0] for value in self.answers.values()]


def text(words: str) -> TextPrompt:
    return TextPrompt(words, len(words))


def chat(words: str) -> ChatPrompt:
    return ChatPrompt([{"role": "user", "content": words}], len(words))


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("kind", ["text", "chat"])
async def test_a_prompt_that_raises_any_exception_fails_alone(kind: str, error: type[BaseException]) -> None:
    answers = Answers(Fragile(error))

    def made(words: str) -> CheckedPrompt:
        return chat(words) if kind == "chat" else text(words)

    answers.ask(made("bad"))
    answers.ask(made("good"), made("bad"), text("also good"))
    answers.ask(chat("fine"))
    [[alone], [good, bad, also], [fine]] = await answers.all()
    assert (good, also, fine) == ([*b"good"], [*b"also good"], [*b"fine"])
    for refused in (alone, bad):
        assert isinstance(refused, RequestError if kind == "text" else ValueError)
        assert error.__name__ in str(refused)
    answers.ask(made("good"))
    assert (await answers.all())[-1] == [[*b"good"]]
    answers.encoder.close()


async def test_an_error_in_the_callback_of_one_job_does_not_affect_the_others() -> None:
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
    answers = Answers(Fragile())
    mistake = RuntimeError("in the answer")

    def fail() -> None:
        raise mistake

    answers.ask(text("one"))
    answers.ask(text("two"), then=fail)
    answers.ask(text("three"))
    assert await answers.all() == [[[*b"one"]], [[*b"two"]], [[*b"three"]]]
    assert reported == [mistake]
    answers.encoder.close()


@pytest.mark.parametrize("error", ERRORS)
async def test_an_error_of_a_whole_batch_fails_all_its_jobs(error: type[BaseException]) -> None:
    answers = Answers(Fragile())

    def break_down(_jobs: Sequence[EncodeJob]) -> tuple[list[list[Encoded]], float]:
        raise error("everything broke")

    thread = answers.encoder._short  # pyright: ignore[reportPrivateUsage]
    thread._encode = break_down  # pyright: ignore[reportPrivateUsage]
    answers.ask(text("one"), text("two"))
    answers.ask(text("three"))
    [first, second] = await answers.all()
    for refused in (*first, *second):
        assert isinstance(refused, RequestError)
        assert error.__name__ in str(refused)
    assert len(first) == 2
    answers.encoder.close()


async def test_closing_fails_the_jobs_that_were_not_started() -> None:
    tokenizer = Fragile()
    tokenizer.gate.clear()
    answers = Answers(tokenizer)
    for size in (40_000, 40_000, 100, 100):  # one is on the thread, one waits for it, and two were not given to it yet
        answers.ask(text("x" * size))
    await asyncio.sleep(0)
    await asyncio.to_thread(tokenizer.has_begun.wait, 10)
    answers.encoder.close()
    tokenizer.gate.set()
    [running], *others = await answers.all()
    assert running == [*b"x" * 40_000]
    assert [str(error) for [error] in others] == [str(RequestError("tokenize", "the engine was shut down"))] * 3


async def test_a_thread_that_cannot_be_started_is_an_error_of_the_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="needs another thread"):
        Encoder(Fragile())


@given(st.lists(st.lists(st.sampled_from(["good", "bad", "x" * 9000, "y" * 70_000, "bad" * 4000]), max_size=4)))
async def test_every_job_is_answered_once_and_in_order(jobs: list[list[str]]) -> None:
    answers = Answers(Fragile())
    for texts in jobs:
        answers.ask(*map(text, texts))
    for texts, encoded in zip(jobs, await answers.all() if jobs else [], strict=True):
        assert [ids if isinstance(ids, list) else "bad" for ids in encoded] == [
            "bad" if "bad" in words else [*words.encode()] for words in texts
        ]
    answers.encoder.close()


ENDLESS = """
import asyncio, time
from aioengine.supervision import tasks
from aioengine.frontend.intake.encoder import Encoder, EncodeJob
from aioengine.frontend.intake.prompts import TextPrompt

tasks.MAX_EXIT_S = 0.1

class Endless:
    def encode_batch(self, texts, *, add_special_tokens=True):
        while True:
            time.sleep(0.01)

async def main():
    encoder = Encoder(Endless())
    encoder.encode(EncodeJob([TextPrompt("text", 4)], lambda encoded, seconds: print(encoded)))
    await asyncio.sleep(0.1)
    encoder.close()
    await asyncio.sleep(0.1)

asyncio.run(main())
"""


def test_encoding_that_never_ends_does_not_prevent_the_program_from_exiting() -> None:
    subprocess.run([sys.executable, "-c", ENDLESS], timeout=60, check=True)


async def test_jobs_after_close_fail() -> None:
    answers = Answers(Fragile())
    answers.encoder.close()
    answers.ask(text("late"))
    [[refused]] = await answers.all()
    assert "the engine was shut down" in str(refused)
