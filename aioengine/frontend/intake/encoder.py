"""Encoder: converts prompts to token ids, on threads of its own.

Prompts that arrive in one turn of the loop, or while the thread is busy, are encoded together, up to the size of a
large step. Long prompts have their own thread, so that short prompts never wait for them.
The tokenizer releases the GIL.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from functools import partial
from itertools import islice
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
"""Larger prompts use the thread for long prompts."""
BATCH_BYTES = 32 * 1024
"""Size of a batch of short prompts: they can be computed while the next batch is encoded."""

PIECE_CHARACTERS = 16 * 1024
MAX_SHRINKING = 3
"""Normalization may shorten text: three letters of Hangul, for example, become one."""
USUAL_TOKEN_BYTES = 4


class PromptTokenizer(Protocol):
    """The methods of a tokenizer that are used here, by several threads at once."""

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
"""The ids of a prompt, or its error."""


class TextSizes(NamedTuple):
    """Finds texts that are too long without tokenizing all of them.

    ``max_tokens``: the limit. ``longest_token``: bytes of the longest token, if every byte of a text is in a token.
    """

    max_tokens: int
    longest_token: int

    def check_bytes(self, num_bytes: int) -> None:
        """Raise RequestTooLargeError if no text of ``num_bytes`` bytes fits."""
        least = num_bytes // (self.longest_token * MAX_SHRINKING)
        if least > self.max_tokens:
            raise RequestTooLargeError(
                f"the prompt has at least {num_bytes} bytes, which are at least {least} tokens; {self.max_tokens} fit"
            )

    def check_pieces(self, text: str, tokenizer: PromptTokenizer) -> None:
        """Tokenize a long text in pieces, and raise RequestTooLargeError as soon as the limit is exceeded.

        Each cut adds at most as many tokens as the longest token has bytes.
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
    """Return the bytes of the longest token, from a tokenizer's ``decoding_facts``.

    None: a token may represent any amount of text. Only byte-level tokenizers cover every byte.
    """
    decoder, model = facts["decoder"], facts["model"]
    if not any(word in json.dumps(decoder) for word in ('"ByteLevel"', '"ByteFallback"')):
        return None
    vocab = cast("Mapping[str, Mapping[str, int]]", model)["vocab"]
    added = [entry["content"] for entry in cast("Sequence[Mapping[str, str]]", facts["added_tokens"])]
    return max(len(token.encode(errors="replace")) for token in (*vocab, *added))


class Job(NamedTuple):
    """Prompts to encode. ``done`` gets their ids, in order, and the seconds, on the loop. It is called exactly once.

    ``check_ids`` raises ValueError for ids that were not checked at the call because they are too many.
    """

    prompts: Sequence[Prompt | PromptError]
    done: Callable[[list[Encoded], float], None]
    check_ids: Callable[[list[int]], None]


def checked(prompt: Prompt | PromptError, check_ids: Callable[[list[int]], None]) -> Prompt | PromptError:
    """Check all of a prompt and return it, or its error. Takes long for large prompts."""
    if isinstance(prompt, Exception) or prompt.is_checked:
        return prompt
    try:
        whole = prompt.checked()
        if isinstance(whole, IdsPrompt):
            check_ids(whole.token_ids)
    except (TypeError, ValueError) as error:
        return error
    except Exception as error:  # parts of a prompt may be objects of any class and raise anything
        return ValueError(f"{prompt.name} cannot be read: {describe(error)}")
    return whole


class Lane:
    """One thread and the jobs that wait for it. Every job is answered exactly once. On the loop.

    Attributes:
        _given: batches of jobs that the thread has. A batch is cleared when it is answered.
    """

    def __init__(self, name: str, encode: Callable[[Sequence[Job]], list[list[Encoded]]]) -> None:
        """Start the thread now, so that a lack of threads is an error of the start and not of a request.

        Raises EngineStartupError: the thread cannot be started.
        """
        self._encode = encode
        self._thread = WorkerThread[object](f"aioengine-{name}")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self._waiting: list[Job] = []
        self._num_bytes = 0  # of the waiting jobs
        self._given: list[list[Job]] = []
        self._is_due = False

    def add(self, job: Job, num_bytes: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting.append(job)
        self._num_bytes += num_bytes
        if self._num_bytes >= BATCH_BYTES or self._is_closed:
            self._start()
        elif not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._end_round)

    def _end_round(self) -> None:
        self._is_due = False
        if not self._given:
            self._start()

    def _start(self) -> None:
        """Give the waiting jobs to the thread, after the jobs that it has."""
        batch, self._waiting, self._num_bytes = self._waiting, [], 0
        if not batch:
            return
        self._given.append(batch)
        try:
            self._thread.submit(partial(self._run, batch))
        except BaseException as error:
            self._fail(batch, RequestError("tokenize", describe(error)))
            raise
        if self._is_closed:
            self._fail(batch, _shut_down())

    def _run(self, batch: list[Job]) -> None:
        """Encode the jobs, on the thread. An exception here is the answer of all of them.

        The loop may answer and clear the batch meanwhile. This thread then keeps no job of it.
        """
        started_at = time.monotonic()
        try:
            encoded = self._encode(batch)
        except BaseException as error:
            encoded = _failed(batch, RequestError("tokenize", describe(error)))
        if self._loop is not None:
            post(self._loop, self._answer, batch, encoded, time.monotonic() - started_at)

    def _answer(self, batch: list[Job], encoded: list[list[Encoded]], seconds: float) -> None:
        if batch and self._loop is not None:
            for job, ids in zip(batch, encoded, strict=True):  # an error in one callback does not affect the others
                self._loop.call_soon(job.done, ids, seconds)
            batch.clear()
        self._given = list(filter(None, self._given))
        if not self._given:
            self._start()

    def _fail(self, batch: list[Job], error: RequestError) -> None:
        self._answer(batch, _failed(batch, error), 0.0)

    def run(self, work: Callable[[], object], done: Callable[[], object]) -> None:
        """Do other work on the thread, then call ``done`` on the loop, also if it raises or the lane is closed."""
        loop = asyncio.get_running_loop()
        self._thread.submit(work).add_done_callback(lambda _: post(loop, done))

    def close(self) -> None:
        """End the thread when it has finished its batch. Jobs without an answer get an error."""
        self._is_closed = True
        self._thread.close()
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller waits
            for batch in self._given:
                self._fail(batch, _shut_down())
            self._start()


def _failed(jobs: Sequence[Job], error: RequestError) -> list[list[Encoded]]:
    """Return the same error for each prompt."""
    return [[error] * len(job.prompts) for job in jobs]


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
        """``sizes`` None: all texts are tokenized completely. ``pool_encoder``: encodes texts to pool.

        in_text: converts a prompt before it is tokenized, as ``ImageFamily.in_text``.
        """
        self.sizes = sizes
        self._in_text = in_text
        self._tokenizer = tokenizer
        self._pool_encoder = pool_encoder
        self._short = Lane("encode", self._encode_jobs)
        self._long = Lane("encode-long", self._encode_jobs)

    def encode(self, job: Job) -> None:
        num_bytes = 0
        for prompt in job.prompts:
            if not isinstance(prompt, Exception) and not (isinstance(prompt, IdsPrompt) and prompt.is_checked):
                num_bytes += prompt.num_bytes
        (self._long if num_bytes > LONG_BYTES else self._short).add(job, num_bytes)

    def run(self, work: Callable[[], object], done: Callable[[], object]) -> None:
        """Do other work on the thread of long prompts, then call ``done`` on the loop (see ``Lane.run``)."""
        self._long.run(work, done)

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize a few short texts now. Raises ValueError if the tokenizer cannot read one."""
        try:
            return self._tokenizer.encode_batch(texts, add_special_tokens=False)
        except RuntimeError as error:
            raise ValueError(f"the tokenizer cannot read {texts!r:.200}: {describe(error)}") from error

    def close(self) -> None:
        self._short.close()
        self._long.close()

    # ------------------------------------------------------------ on the threads

    def _encode_jobs(self, jobs: Sequence[Job]) -> list[list[Encoded]]:
        prompts: list[Prompt | PromptError] = []
        for job in jobs:
            for prompt in job.prompts:
                whole = prompt
                if not isinstance(prompt, Exception) and not prompt.is_checked:
                    try:
                        whole = checked(prompt, job.check_ids)
                    except BaseException as error:  # no signal interrupts this thread: the prompt raised it
                        whole = ValueError(f"the prompt cannot be read: {describe(error)}")
                prompts.append(whole)
        encoded = iter(self._encode(prompts))
        return [list(islice(encoded, len(job.prompts))) for job in jobs]

    def _encode(self, prompts: list[Prompt | PromptError]) -> list[Encoded]:
        """Encode the prompts; all texts with the same rules in one batch."""
        encoded: dict[int, Encoded] = {}
        texts: dict[EncodeRules, dict[int, str]] = {}
        pooled: dict[int, PooledPrompt] = {}
        for place, prompt in enumerate(prompts):
            if isinstance(prompt, IdsPrompt):
                encoded[place] = prompt.token_ids
            elif isinstance(prompt, Exception):
                encoded[place] = prompt
            elif isinstance(prompt, PooledPrompt):
                pooled[place] = prompt
            else:
                rendered = prompt.text if isinstance(prompt, TextPrompt) else self._render(prompt)
                if isinstance(rendered, str):  # templates may also return token ids
                    rules = prompt.rules
                    if rules.add_special_tokens is None:  # templates of chats write them
                        rules = EncodeRules(isinstance(prompt, TextPrompt), rules.keep_last)
                    texts.setdefault(rules, {})[place] = self._in_text(rendered)
                else:
                    encoded[place] = rendered
        for rules, by_place in texts.items():
            for place, ids in zip(by_place, self._encode_texts(list(by_place.values()), rules), strict=True):
                prompt, cut = prompts[place], ids
                if rules.keep_last and isinstance(ids, list):
                    cut = ids[-rules.keep_last :]
                if isinstance(prompt, ChatPrompt) and prompt.images and isinstance(cut, list):
                    cut = ChatIds(cut, prompt.images)
                encoded[place] = cut
        if pooled and self._pool_encoder is not None:
            encoded |= zip(pooled, self._pool_encoder.encode(list(pooled.values())), strict=True)
        return list(map(encoded.__getitem__, range(len(prompts))))

    def _render(self, prompt: ChatPrompt) -> str | list[int] | ValueError:
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
        except BaseException as error:  # templates are code of the model's author and may raise anything
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
        except BaseException as error:  # a bad text fails alone, also if compiled code panics
            if len(texts) == 1:
                if isinstance(error, RequestTooLargeError):
                    return [error]
                return [RequestError("tokenize", describe(error))]
            return [self._encode_texts([text], rules)[0] for text in texts]
