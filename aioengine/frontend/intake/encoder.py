"""Encoder: converts prompts to token ids, on threads of its own.

Prompts that arrive in one iteration of the loop, or while the thread is busy, are encoded together, about
``BATCH_BYTES`` at a time. Long prompts have their own thread, so that short prompts never wait for them. This thread
also checks the rows of long batches. The tokenizer releases the GIL.
"""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from aioengine.errors import EngineError, RequestError, RequestTooLargeError, describe
from aioengine.frontend.intake.prompts import (
    ChatIds,
    ChatPrompt,
    CheckedPrompt,
    EncodeRules,
    IdsPrompt,
    PooledPrompt,
    PromptError,
    TextPrompt,
)
from aioengine.supervision.tasks import WorkerThread, post

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from aioengine.protocol.messages import PairIds
    from aioengine.settings.config import PoolingSettings
    from aioengine.tokenization.tokenizer import Tokenizer

LONG_BYTES = 64 * 1024
"""Larger prompts use the thread for long prompts."""
BATCH_BYTES = 32 * 1024
"""Size at which waiting short prompts are given to the thread. The scheduler can compute them while the next ones are
encoded."""

PIECE_CHARACTERS = 16 * 1024
MAX_SHRINKING = 3
"""Normalization may shorten text: three letters of Hangul, for example, become one."""
USUAL_TOKEN_BYTES = 4

MARGIN = 512
"""A cut text has this many tokens more than ``max_tokens``, because its tokens near the cut are wrong."""

CHARACTERS_PER_TOKEN = 8
GROWTH = 4


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
        self._check_tokens(num_bytes // (self.longest_token * MAX_SHRINKING))

    def check_pieces(self, text: str, tokenizer: Tokenizer) -> None:
        """Tokenize a long text in pieces, and raise RequestTooLargeError as soon as the limit is exceeded.

        Each cut adds at most as many tokens as the longest token has bytes.
        """
        min_tokens = 0
        for start in range(0, len(text), PIECE_CHARACTERS):
            piece = text[start : start + PIECE_CHARACTERS]
            [ids] = tokenizer.encode_batch([piece], add_special_tokens=False)
            min_tokens += max(0, len(ids) - self.longest_token)
            self._check_tokens(min_tokens)

    def _check_tokens(self, min_tokens: int) -> None:
        if min_tokens > self.max_tokens:
            limit = f"at most {self.max_tokens} are allowed (the smaller of context_length and max_total_tokens)"
            raise RequestTooLargeError(f"the prompt has at least {min_tokens} tokens; {limit}")


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


class EncodeJob(NamedTuple):
    """Prompts to encode. ``done`` is called on the loop with their ids, in order, and the seconds of their batch."""

    prompts: Sequence[CheckedPrompt | PromptError]
    done: Callable[[list[Encoded], float], None]


class EncoderThread:
    """One thread and the jobs that wait for it. On the loop."""

    def __init__(self, name: str, encode: Callable[[Sequence[EncodeJob]], tuple[list[list[Encoded]], float]]) -> None:
        """Start the thread now, so that a lack of threads is an error of the start and not of a request.

        Raises EngineStartupError: the thread cannot be started.
        """
        self._encode = encode
        self._thread = WorkerThread[Any](f"aioengine-{name}")
        self._waiting: list[EncodeJob] = []
        self._num_bytes = 0  # of the waiting jobs
        self._num_batches = 0  # that the thread has
        self._is_due = False  # the loop will call ``_start`` soon

    def add(self, job: EncodeJob, num_bytes: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting.append(job)
        self._num_bytes += num_bytes
        if self._num_bytes >= BATCH_BYTES:
            self._start()
        elif not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._start)

    def _start(self) -> None:
        """Give the waiting jobs to the thread, unless it is busy and they are smaller than a batch."""
        self._is_due = False
        if not self._waiting or (self._num_batches and self._num_bytes < BATCH_BYTES):
            return
        batch, self._waiting, self._num_bytes = self._waiting, [], 0
        self._num_batches += 1
        work = self._thread.submit(partial(self._encode, batch))
        work.add_done_callback(partial(post, self._loop, self._answer, batch))

    def _answer(self, batch: list[EncodeJob], work: Future[tuple[list[list[Encoded]], float]]) -> None:
        self._num_batches -= 1
        try:
            encoded, seconds = work.result()
        except BaseException as error:
            reason = "the engine was shut down" if work.cancelled() else describe(error)
            failures: list[Encoded] = [RequestError("tokenize", reason)]
            encoded, seconds = [failures * len(job.prompts) for job in batch], 0.0
        for job, ids in zip(batch, encoded, strict=True):  # an error in one callback does not affect the others
            self._loop.call_soon(job.done, ids, seconds)
        batch.clear()  # the thread may still have it
        if self._waiting:
            self._start()

    def run(self, work: Callable[[], object], done: Callable[[Future[Any]], object]) -> None:
        """Do other work on the thread, then call ``done`` on the loop with its result."""
        self._thread.submit(work).add_done_callback(partial(post, asyncio.get_running_loop(), done))

    def close(self) -> None:
        """End the thread when it has finished its batch. Jobs that it has not begun get an error."""
        self._thread.close()
        self._start()


class PoolEncoder(NamedTuple):
    """Tokenizes the texts of ``encode`` and the pairs of texts of ``rerank``, up to ``max_tokens`` tokens each.

    Only the beginning of a long text is tokenized. On the tokenizer's threads. ``in_text``: as in ``Encoder``.
    """

    tokenizer: Tokenizer
    settings: PoolingSettings
    max_tokens: int
    in_text: Callable[[str], str] = str

    def encode(self, prompts: list[PooledPrompt]) -> list[PairIds | ValueError | RequestError]:
        """Return the ids of each prompt, or its error."""
        try:
            pairs = [self._texts(prompt) for prompt in prompts]
            encoded = self.tokenizer.encode_pairs(pairs)
            return [self._fitting(prompt, pair, ids) for prompt, pair, ids in zip(prompts, pairs, encoded, strict=True)]
        except BaseException as error:  # a wrong prompt fails alone, also if compiled code panics
            if len(prompts) == 1:
                return [RequestError("tokenize", describe(error))]
            return [self.encode([prompt])[0] for prompt in prompts]

    def _texts(self, prompt: PooledPrompt) -> tuple[str, str | None]:
        """Return the first text after its prompt, and the second text. Long texts are cut."""
        settings, name = self.settings, prompt.options.prompt_name
        before = settings.prompts.get(settings.default_prompt if name is None else name, "")
        first = self.in_text(before + prompt.first.text)
        second = None if prompt.second is None else prompt.second.text
        if settings.lowers_text:
            first, second = first.lower(), None if second is None else second.lower()
        return self._beginning(first), None if second is None else self._beginning(second)

    def _beginning(self, text: str) -> str:
        """Return the beginning of a text, with more tokens than the limit."""
        wanted = self.max_tokens + MARGIN
        length = CHARACTERS_PER_TOKEN * wanted
        while length < len(text):
            [ids] = self.tokenizer.encode_batch([text[:length]], add_special_tokens=False)
            if len(ids) >= wanted:
                return text[:length]
            length *= GROWTH
        return text

    def _fitting(self, prompt: PooledPrompt, pair: tuple[str, str | None], ids: PairIds) -> PairIds | ValueError:
        """Return the ids. If there are too many, truncate the text, or return the error."""
        if len(ids) <= self.max_tokens:
            return ids
        if prompt.options.truncates:
            return self.tokenizer.encode_cut(*pair, self.max_tokens)
        kind = "text" if prompt.second is None else "pair of texts"
        return RequestTooLargeError(
            f"the {kind} has at least {len(ids)} tokens; at most {self.max_tokens} are allowed; "
            "truncate=True cuts its end"
        )


class Encoder:
    """The two threads, for short and for long prompts. On the engine's loop."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        sizes: TextSizes | None = None,
        pool_encoder: PoolEncoder | None = None,
        in_text: Callable[[str], str] = str,
    ) -> None:
        """``tokenizer`` None: all prompts are token ids. ``sizes`` None: all texts are tokenized completely.

        ``pool_encoder``: encodes texts to pool. ``in_text``: converts a prompt before it is tokenized, as
        ``ImageFamily.in_text``.
        """
        self.has_tokenizer = tokenizer is not None
        self.sizes = sizes
        self._in_text = in_text
        self._tokenizer = cast("Tokenizer", tokenizer)  # ``RequestChecks`` refuses texts if there is none
        self._pool_encoder = pool_encoder
        self._short = EncoderThread("encode", self._encode)
        self._long = EncoderThread("encode-long", self._encode)

    def encode(self, job: EncodeJob) -> None:
        num_bytes = 0
        for prompt in job.prompts:
            if not isinstance(prompt, Exception | IdsPrompt):
                num_bytes += prompt.num_bytes
        (self._long if num_bytes > LONG_BYTES else self._short).add(job, num_bytes)

    def run(self, work: Callable[[], object], done: Callable[[Future[Any]], object]) -> None:
        """Do other work on the thread of long prompts, then call ``done`` on the loop with its result."""
        self._long.run(work, done)

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize a few short texts now. Raises ValueError if the tokenizer cannot read one."""
        try:
            return self._tokenizer.encode_batch(texts, add_special_tokens=False)
        except RuntimeError as error:
            raise ValueError(f"the tokenizer cannot read {texts!r:.200}: {describe(error)}") from error

    def close(self) -> None:
        """End the threads. From any thread."""
        self._short.close()
        self._long.close()

    # ------------------------------------------------------------ on the threads

    def _encode(self, jobs: Sequence[EncodeJob]) -> tuple[list[list[Encoded]], float]:
        """Encode the prompts of all jobs, texts with the same rules in one batch. Return their ids, and the seconds."""
        began_at = time.monotonic()
        encoded: list[Encoded] = []  # of all jobs
        texts: dict[EncodeRules, list[tuple[int, CheckedPrompt, str]]] = {}
        pooled: dict[int, PooledPrompt] = {}
        for job in jobs:
            for prompt in job.prompts:
                index = len(encoded)
                encoded.append([])
                if isinstance(prompt, IdsPrompt):
                    encoded[index] = prompt.token_ids
                elif isinstance(prompt, Exception):
                    encoded[index] = prompt
                elif isinstance(prompt, PooledPrompt):
                    pooled[index] = prompt
                else:
                    text = prompt.text if isinstance(prompt, TextPrompt) else self._render(prompt)
                    if not isinstance(text, str):  # templates may also return token ids
                        encoded[index] = text
                        continue
                    rules = prompt.rules
                    if rules.add_special_tokens is None:  # templates of chats write them
                        rules = EncodeRules(isinstance(prompt, TextPrompt), rules.keep_last)
                    texts.setdefault(rules, []).append((index, prompt, self._in_text(text)))
        for rules, batch in texts.items():
            all_ids = self._encode_texts([text for *_, text in batch], rules)
            for (index, prompt, _), ids in zip(batch, all_ids, strict=True):
                if rules.keep_last and isinstance(ids, list):
                    ids = ids[-rules.keep_last :]
                if isinstance(prompt, ChatPrompt) and prompt.images and isinstance(ids, list):
                    ids = ChatIds(ids, prompt.images)
                encoded[index] = ids
        if pooled and self._pool_encoder is not None:
            for index, pair in zip(pooled, self._pool_encoder.encode([*pooled.values()]), strict=True):
                encoded[index] = pair
        ids_of_all = iter(encoded)
        return [[*islice(ids_of_all, len(job.prompts))] for job in jobs], time.monotonic() - began_at

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

    def _encode_texts(self, texts: list[str], rules: EncodeRules) -> list[Encoded]:
        try:
            if rules.keep_last is None and self.sizes is not None:
                for text in texts:
                    if len(text) > max(LONG_BYTES, self.sizes.max_tokens * USUAL_TOKEN_BYTES):
                        self.sizes.check_bytes(len(text))
                        self.sizes.check_pieces(text, self._tokenizer)
            return list(self._tokenizer.encode_batch(texts, add_special_tokens=bool(rules.add_special_tokens)))
        except BaseException as error:  # a bad text fails alone, also if compiled code panics
            if len(texts) == 1:
                if isinstance(error, RequestTooLargeError):
                    return [error]
                return [RequestError("tokenize", describe(error))]
            return [self._encode_texts([text], rules)[0] for text in texts]
