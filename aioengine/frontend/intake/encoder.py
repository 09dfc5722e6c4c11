"""Prompts to token ids, off the loop's thread.

Prompts that come in one turn of the loop, or while the thread is busy, are encoded together; text for a large step does
not wait for more. Long prompts have a thread of their own, so that short ones never wait behind them.
The tokenizer releases the interpreter while it works.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from aioengine.errors import EngineError, RequestError, RequestTooLargeError, describe
from aioengine.frontend.intake.prompts import (
    ChatIds,
    ChatPrompt,
    EncodeRules,
    IdsPrompt,
    PooledPrompt,
    Prompt,
    PromptError,
    TextPrompt,
)
from aioengine.supervision.tasks import WorkerThread, post

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from aioengine.frontend.intake.pool_encoder import PoolEncoder
    from aioengine.frontend.intake.prompts import Messages

LONG_BYTES = 64 * 1024
"""A prompt above it is long."""
BATCH_BYTES = 32 * 1024
"""A batch of short prompts ends here: they can be computed while the next ones are encoded."""

PIECE_CHARACTERS = 16 * 1024
MAX_SHRINKING = 3
"""Normalizing may make text shorter: three letters of Hangul, for example, become one."""
USUAL_TOKEN_BYTES = 4


class PromptTokenizer(Protocol):
    """The methods of a tokenizer that are needed here; several threads call them at once."""

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]: ...

    def apply_chat_template(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template: str | os.PathLike[str] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> str | list[int]: ...


Encoded = list[int] | ValueError | TypeError | EngineError
"""The ids of a prompt, or why it has none."""


class TextSizes(NamedTuple):
    """Finds texts that cannot fit before they were tokenized as a whole.

    ``max_tokens``: how many fit. ``longest_token``: the bytes of the longest one, where every byte of a text is in one.
    """

    max_tokens: int
    longest_token: int

    def check_bytes(self, num_bytes: int) -> None:
        """Raise RequestTooLargeError where ``num_bytes`` bytes cannot fit, whatever they are."""
        least = num_bytes // (self.longest_token * MAX_SHRINKING)
        if least > self.max_tokens:
            raise RequestTooLargeError(
                f"the prompt has at least {num_bytes} bytes, which are at least {least} tokens; {self.max_tokens} fit"
            )

    def check_pieces(self, text: str, tokenizer: PromptTokenizer) -> None:
        """Tokenize a long text in pieces until they are more than can fit; raise RequestTooLargeError then.

        A cut makes at most as many tokens more as the longest token has bytes.
        """
        least = 0
        for start in range(0, len(text), PIECE_CHARACTERS):
            piece = text[start : start + PIECE_CHARACTERS]
            [ids] = tokenizer.encode_batch([piece], add_special_tokens=False)
            least += max(0, len(ids) - self.longest_token)
            if least > self.max_tokens:
                raise RequestTooLargeError(
                    f"the first {start + len(piece)} of the prompt's {len(text)} characters are at least {least} "
                    f"tokens; {self.max_tokens} fit"
                )


def longest_token(facts: Mapping[str, object]) -> int | None:
    """The bytes of the longest token, from a tokenizer's ``decoding_facts``.

    None where a token may stand for any amount of text: only tokenizers of bytes give every byte its place.
    """
    decoder, model = facts["decoder"], facts["model"]
    if not any(word in json.dumps(decoder) for word in ('"ByteLevel"', '"ByteFallback"')):
        return None
    vocab = cast("Mapping[str, Mapping[str, int]]", model)["vocab"]
    added = [entry["content"] for entry in cast("Sequence[Mapping[str, str]]", facts["added_tokens"])]
    return max(len(token.encode(errors="replace")) for token in (*vocab, *added))


class Job(NamedTuple):
    """Prompts to encode; ``done`` gets their ids, in order, on the loop. It is called exactly once, whatever happens.

    ``check_ids`` raises ValueError for ids that were not checked at the call, being too many.
    """

    prompts: Sequence[Prompt | PromptError]
    done: Callable[[list[Encoded], float], None]
    check_ids: Callable[[list[int]], None]

    @property
    def num_bytes(self) -> int:
        """Of the prompts that the thread has to check or to encode."""
        return sum(
            prompt.num_bytes
            for prompt in self.prompts
            if not isinstance(prompt, Exception) and not (isinstance(prompt, IdsPrompt) and prompt.is_checked)
        )

    def failed(self, error: RequestError) -> list[Encoded]:
        """The same error for each of its prompts."""
        return [error] * len(self.prompts)


def checked(prompt: Prompt | PromptError, check_ids: Callable[[list[int]], None]) -> Prompt | PromptError:
    """The prompt with all of it checked, or what is wrong with it. Takes long for large ones."""
    if isinstance(prompt, Exception) or prompt.is_checked:
        return prompt
    try:
        found = prompt.checked()
        if isinstance(found, IdsPrompt):
            check_ids(found.token_ids)
    except (TypeError, ValueError) as error:
        return error
    except Exception as error:  # its parts may be objects of any class: whatever they raise is this prompt's
        return ValueError(f"{prompt.name} cannot be read: {describe(error)}")
    return found


def _checked_alone(prompt: Prompt | PromptError, check_ids: Callable[[list[int]], None]) -> Prompt | PromptError:
    """The same on a lane's thread, which no signal interrupts: whatever is raised there is this prompt's."""
    try:
        return checked(prompt, check_ids)
    except BaseException as error:
        return ValueError(f"the prompt cannot be read: {describe(error)}")


class _Batch:
    """Jobs that a lane's thread encodes together. Answered once, on the loop."""

    def __init__(self, jobs: list[Job], on_answered: Callable[[_Batch], None]) -> None:
        self.jobs = jobs
        self._loop = asyncio.get_running_loop()
        self._on_answered = on_answered

    def run(self, encode: Callable[[list[Job]], list[list[Encoded]]]) -> None:
        """Encode the jobs, on the thread; an exception there is the answer of all of them."""
        started_at = time.monotonic()
        try:
            found = encode(self.jobs)
        except BaseException as error:
            failure = RequestError("tokenize", describe(error))
            found = [job.failed(failure) for job in self.jobs]
        post(self._loop, self.answer, found, time.monotonic() - started_at)

    def answer(self, found: list[list[Encoded]], seconds: float) -> None:
        """Each job in a callback of its own: an error in one keeps nothing from the others."""
        jobs, self.jobs = self.jobs, []
        for job, encoded in zip(jobs, found if jobs else (), strict=True):
            self._loop.call_soon(job.done, encoded, seconds)
        self._on_answered(self)

    def fail(self, error: RequestError) -> None:
        self.answer([job.failed(error) for job in self.jobs], 0.0)


class Lane:
    """One thread and the jobs that wait for it. Every job that was added is answered exactly once. On the loop."""

    def __init__(self, name: str, encode: Callable[[list[Job]], list[list[Encoded]]]) -> None:
        """Start the thread: where the system allows no more of them, that is known now and not at a request.

        Raises EngineStartupError: the thread cannot be started.
        """
        self._encode = encode
        self._thread = WorkerThread[object](f"aioengine-{name}")
        self._is_closed = False
        self._waiting: list[Job] = []
        self._num_bytes = 0  # of those that wait
        self._given: list[_Batch] = []  # to the thread, and not answered
        self._is_due = False

    def add(self, job: Job) -> None:
        self._waiting.append(job)
        self._num_bytes += job.num_bytes
        if self._num_bytes >= BATCH_BYTES or self._is_closed:
            self._start()
        elif not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._end_round)

    def _end_round(self) -> None:
        self._is_due = False
        if not self._given:
            self._start()

    def _start(self) -> None:
        """Give the thread the jobs that wait, behind those that it has."""
        jobs, self._waiting, self._num_bytes = self._waiting, [], 0
        if not jobs:
            return
        batch = _Batch(jobs, self._answered)
        self._given.append(batch)
        try:
            self._submit(batch)
        except BaseException as error:
            batch.fail(RequestError("tokenize", describe(error)))
            raise
        if self._is_closed:
            batch.fail(_shut_down())

    def _submit(self, batch: _Batch) -> None:
        self._thread.submit(partial(batch.run, self._encode))

    def run(self, work: Callable[[], object], done: Callable[[], object]) -> None:
        """Do other work on the thread, then call ``done`` on the loop, also if it raises or the lane is closed."""
        loop = asyncio.get_running_loop()
        self._thread.submit(work).add_done_callback(lambda _: post(loop, done))

    def _answered(self, batch: _Batch) -> None:
        if batch in self._given:
            self._given.remove(batch)
        if not self._given:
            self._start()

    def close(self) -> None:
        """End the thread when it has finished its batch. Jobs without an answer get an error."""
        self._is_closed = True
        self._thread.close()
        with contextlib.suppress(RuntimeError):  # no loop runs any more, on which a job could be answered
            for batch in list(self._given):
                batch.fail(_shut_down())
            self._start()


def _shut_down() -> RequestError:
    return RequestError("tokenize", "the engine was shut down")


class Encoder:
    """The two lanes, for short and for long prompts. On the engine's loop."""

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        sizes: TextSizes | None = None,
        pool_encoder: PoolEncoder | None = None,
        in_text: Callable[[str], str] = str,
    ) -> None:
        """``sizes`` None: every text is tokenized as a whole. ``pool_encoder``: for texts to be pooled.

        in_text: gives what is tokenized in place of a prompt, as ``ImageFamily.in_text``.
        """
        self.sizes = sizes
        self._in_text = in_text
        self._tokenizer = tokenizer
        self._pool_encoder = pool_encoder
        self._short = Lane("encode", self._encode_jobs)
        self._long = Lane("encode-long", self._encode_jobs)

    def encode(self, job: Job) -> None:
        (self._long if job.num_bytes > LONG_BYTES else self._short).add(job)

    def run(self, work: Callable[[], object], done: Callable[[], object]) -> None:
        """Do other work on the thread of long prompts, then call ``done`` on the loop (see ``Lane.run``)."""
        self._long.run(work, done)

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of a few short texts that are no prompts, at once. Raises ValueError where one cannot be read."""
        try:
            return self._tokenizer.encode_batch(texts, add_special_tokens=False)
        except RuntimeError as error:
            raise ValueError(f"the tokenizer cannot read {texts!r:.200}: {describe(error)}") from error

    def close(self) -> None:
        self._short.close()
        self._long.close()

    # ------------------------------------------------------------ on the threads

    def _encode_jobs(self, jobs: list[Job]) -> list[list[Encoded]]:
        prompts = [_checked_alone(prompt, job.check_ids) for job in jobs for prompt in job.prompts]
        encoded = iter(self._encode(prompts))
        return [[next(encoded) for _ in job.prompts] for job in jobs]

    def _encode(self, prompts: list[Prompt | PromptError]) -> list[Encoded]:
        """All texts with the same rules in one batch."""
        found: list[Encoded] = [[] for _ in prompts]
        texts: dict[EncodeRules, dict[int, str]] = {}
        pooled: dict[int, PooledPrompt] = {}
        for place, prompt in enumerate(prompts):
            if isinstance(prompt, IdsPrompt):
                found[place] = prompt.token_ids
            elif isinstance(prompt, Exception):
                found[place] = prompt
            elif isinstance(prompt, PooledPrompt):
                pooled[place] = prompt
            else:
                rendered = self._render(prompt)
                if isinstance(rendered, str):  # as a plain one: special tokens are never added to ``ChatText``
                    texts.setdefault(_rules_of(prompt), {})[place] = self._in_text(rendered)
                else:
                    found[place] = rendered
        for rules, by_place in texts.items():
            for place, ids in zip(by_place, self._encode_texts(list(by_place.values()), rules), strict=True):
                cut = rules.keep_last
                found[place] = _with_images(prompts[place], ids[-cut:] if cut and isinstance(ids, list) else ids)
        if pooled and self._pool_encoder is not None:
            for place, ids in zip(pooled, self._pool_encoder.encode(list(pooled.values())), strict=True):
                found[place] = ids
        return found

    def _render(self, prompt: TextPrompt | ChatPrompt) -> str | list[int] | ValueError:
        if isinstance(prompt, TextPrompt):
            return prompt.text
        options = prompt.options
        try:
            return self._tokenizer.apply_chat_template(
                prompt.messages,
                tools=options.tools,
                chat_template=options.template,
                chat_template_kwargs=options.variables,
            )
        except ValueError as error:
            return error
        except TypeError as error:  # a value that the message names
            return ValueError(str(error))
        except BaseException as error:  # templates are code of the model's author: all that they raise is this chat's
            return ValueError(f"the chat template refused the messages: {describe(error)}")

    def _check_sizes(self, texts: list[str]) -> None:
        if self.sizes is None:
            return
        for text in texts:
            if len(text) > max(LONG_BYTES, self.sizes.max_tokens * USUAL_TOKEN_BYTES):
                self.sizes.check_bytes(len(text))
                self.sizes.check_pieces(text, self._tokenizer)

    def _encode_texts(self, texts: list[str], rules: EncodeRules) -> list[Encoded]:
        try:
            if rules.keep_last is None:
                self._check_sizes(texts)
            return list(self._tokenizer.encode_batch(texts, add_special_tokens=bool(rules.add_special_tokens)))
        except BaseException as error:  # one bad text fails alone, also where compiled code panics
            if len(texts) == 1:
                if isinstance(error, RequestTooLargeError):
                    return [error]
                return [RequestError("tokenize", describe(error))]
            return [self._encode_texts([text], rules)[0] for text in texts]


def _with_images(prompt: Prompt | PromptError, ids: Encoded) -> Encoded:
    """The ids of a text, with the images of the chat that it was."""
    if isinstance(prompt, ChatPrompt) and prompt.images and isinstance(ids, list):
        return ChatIds(ids, prompt.images)
    return ids


def _rules_of(prompt: TextPrompt | ChatPrompt) -> EncodeRules:
    """Its rules, with None for special tokens resolved: a text gets them, the template of a chat has written them."""
    is_chat, rules = isinstance(prompt, ChatPrompt), prompt.rules
    return EncodeRules(not is_chat, rules.keep_last) if rules.add_special_tokens is None else rules
