"""Starts the rows of calls: tokenizes prompts and sends ``Submit`` messages, a bounded number at a time.

Also ends the rows that will not start.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Final, cast

from msgspec.structs import replace

from aioengine.api.answers import RowError
from aioengine.api.params import SamplingParams, drawn_seed
from aioengine.errors import EngineOverloadedError, RequestError, RequestTooLargeError, describe
from aioengine.frontend.calls.call import Call, CallRow, NotifyOn, UnstartedEnd
from aioengine.frontend.calls.call_ids import CallIds
from aioengine.frontend.calls.overload import QueueLimits
from aioengine.frontend.calls.row_types import row_type
from aioengine.frontend.intake.encoder import Encoded, EncodeJob
from aioengine.frontend.intake.image_prompts import check_no_images
from aioengine.frontend.intake.pooling import Pooled
from aioengine.frontend.intake.prompt_options import check_lengths
from aioengine.frontend.intake.prompts import (
    ChatIds,
    ChatPrompt,
    CheckedPrompt,
    EmbedsIds,
    IdsPrompt,
    MediaIds,
    PromptError,
    TextPrompt,
)
from aioengine.frontend.intake.request_checks import RequestChecks
from aioengine.frontend.sessions.sessions import Sessions
from aioengine.protocol.messages import SEED_MASK, End, FinishCode, Limits, PairIds, RequestKind, Submit
from aioengine.supervision.tasks import post
from aioengine.text.detokenizer import NUM_CONTEXT_TOKENS

MAX_ROWS_AT_ONCE: Final = 64
"""Rows of a call that are started in one iteration of the loop."""

MAX_ROWS_ENDED_AT_ONCE: Final = 512
"""Rows that are ended in one iteration of the loop. Each takes up to 10 microseconds."""

MAX_BYTES_AT_ONCE: Final = 4 * 1024 * 1024
"""Bytes of messages that are sent in one iteration of the loop. The message of each row contains the whole prompt, even
for samples of one prompt."""

MIN_PREFIX_BYTES: Final = 1024
"""If the first message of a scored call is larger, its other rows start in the next iteration of the loop. If their
prompts begin like the first one, they may find that beginning in the prefix cache."""


class Submitter:
    """Starts the rows of calls. On the engine's loop.

    Attributes:
        checking: calls with unchecked rows.
        after_checks: callbacks; each is called once, when the checks of one of these calls have ended.
    """

    def __init__(
        self,
        checks: RequestChecks,
        ids: CallIds,
        rows: dict[int, CallRow],
        lock: threading.RLock,
        limits: QueueLimits,
        sessions: Sessions,
        close_if_over: Callable[[Call], None],
    ) -> None:
        """``rows``: ``Calls.rows``. ``close_if_over`` closes a call that is over."""
        self.checks = checks
        self._model = checks.model
        self._settings = checks.parts.settings
        self._encoder = checks.encoder
        self._images = checks.images
        self._lock = lock
        self._limits = limits
        self._sessions = sessions
        self._ids = ids
        self._rows = rows
        self._send = checks.parts.processes.send
        self._close_if_over = close_if_over
        self._loop = asyncio.get_running_loop()
        self._num_uids = 0
        self._num_seeds = 0
        self.checking: set[Call] = set()
        self.after_checks: list[Callable[[], None]] = []
        self._ending: deque[Call] = deque()

    # ------------------------------------------------------------ checks of long batches

    def check_rest(self, call: Call) -> None:
        """Check more rows of a long batch on the tokenizer's thread, until all are checked.

        A wrong row may fail the whole call.
        """
        self.checking.add(call)
        self._encoder.run(partial(self.checks.check_more, call.request), partial(self._add_checked, call))

    def _add_checked(self, call: Call, work: Future[None]) -> None:
        """Register the ids of checked rows, and check the next ones. When all are checked, start more rows."""
        error: Exception | None = None
        if call.may_start_rows:
            try:
                work.result()
                with self._lock:
                    self._ids.add(call)
                if not call.request.is_checked:
                    self.check_rest(call)
                    return
            except (TypeError, ValueError) as raised:
                error = raised
            except BaseException as raised:
                error = RequestError("submit", describe(raised))
        self.checking.discard(call)
        for act in self.after_checks:
            self._loop.call_soon(act)
        self.after_checks.clear()
        if error is None:
            self.submit_next(call)
        else:
            self._fail(call, error)

    # ------------------------------------------------------------ rows

    def submit_next(self, call: Call) -> None:
        """Start as many rows of the call as may be open at a time: some now, more in the next iterations of the loop.

        An exception ends the call. Usually the loop calls this as a callback, and would only log the exception.
        """
        request, next_rows = call.request, call.next_rows
        if next_rows.are_pending or not call.may_start_rows:
            return
        try:
            with self._lock:
                # Twice as many as can run, so that rows wait in the scheduler when others end.
                num_startable = 2 * self._settings.scheduler.max_running - call.num_unread_rows
                if request.logprobs is not None:
                    num_startable = self._num_startable_with_logprobs(call, num_startable)
                if call.notify_on is not NotifyOn.EACH_READ:
                    call.notify_on = NotifyOn.END_READ if num_startable <= 0 else NotifyOn.NOTHING
            next_rows.num_startable = min(num_startable, MAX_ROWS_AT_ONCE)
            if num_startable <= 0:
                return
            if next_rows.encoded:
                self._start_rows(call, next_rows.encoded, next_rows.tokenize_s)
                return
            first = call.num_started // request.num_samples
            max_prompts = max(1, next_rows.num_startable // request.num_samples)
            prompts = request.prompts[first : min(first + max_prompts, request.num_registered)]
            if not prompts:
                return
            if self._images is not None and (request.images is not None or isinstance(prompts[0], ChatPrompt)):
                prompts = prompts[:1]  # a prompt waits for its images, so it starts alone
            known = [*map(self._ids_if_known, prompts)]
            if None not in known:
                self._place_images(call, cast("list[Encoded]", known), 0.0)
            else:  # all go to the thread, so that rows start in order
                next_rows.are_pending = True
                prompts = [
                    ids if isinstance(ids, Exception) else prompt for prompt, ids in zip(prompts, known, strict=True)
                ]
                self._encoder.encode(EncodeJob(prompts, partial(self._place_images, call)))
        except BaseException as error:
            self._fail(call, RequestError("submit", describe(error)))
            raise

    def _num_startable_with_logprobs(self, call: Call, limit: int) -> int:
        """Return how many more rows with logprobs may start now, at most ``limit``.

        The length of a prompt is not known yet, so each row counts an upper bound for the memory of its logprobs.
        """
        request = call.request
        num_free_bytes, num_rows = self._limits.num_free_logprob_bytes, 0
        prompt_index = call.num_started // request.num_samples
        while num_rows < min(limit, MAX_ROWS_AT_ONCE) and prompt_index < request.num_registered:
            if (rules := request.logprobs_of(prompt_index)) is not None:
                num_positions, num_output = self._model.context_length, request.params_of(prompt_index).max_new_tokens
                if rules.start < 0 and num_output is not None:
                    num_positions = max(1, min(num_output, num_positions))
                num_free_bytes -= request.num_samples * rules.position_bytes * num_positions
            if num_free_bytes < 0:
                break
            num_rows += request.num_samples
            prompt_index += 1
        # The rows of the first prompt are always tried: they start, or are refused.
        return min(limit, max(num_rows, 0 if call.num_unread_rows else request.num_samples))

    def _ids_if_known(self, prompt: CheckedPrompt | PromptError) -> list[int] | PromptError | None:
        """Return the ids of a prompt that needs no tokenizer, or its error. None: it must be tokenized.

        A text that is certainly too long gets its error here and is not tokenized.
        """
        if isinstance(prompt, Exception):
            return prompt
        if isinstance(prompt, IdsPrompt):
            return prompt.token_ids
        if isinstance(prompt, TextPrompt) and prompt.rules.keep_last is None and self._encoder.sizes:
            try:
                self._encoder.sizes.check_bytes(prompt.num_bytes)
            except RequestTooLargeError as error:
                return error
        return None

    def _place_images(self, call: Call, encoded: list[Encoded], tokenize_s: float) -> None:
        """Start the rows of the next prompts. A single prompt first gets its images."""
        if self._images is None or len(encoded) != 1 or not call.may_start_rows:
            self._start_rows(call, encoded, tokenize_s)
            return

        def placed(ids: Encoded, more_s: float) -> None:
            self._start_rows(call, [ids], tokenize_s + more_s)

        call.next_rows.are_pending = True
        self._images.place(call, encoded[0], placed)

    def _start_rows(self, call: Call, encoded: list[Encoded], tokenize_s: float) -> None:
        """Start ``NextRows.num_startable`` rows of the next prompts, whose ids are known, then the next rows, later.

        After ``MAX_BYTES_AT_ONCE``, or after a large first row of a scored call, the other rows start later.
        """
        request, next_rows, num_bytes = call.request, call.next_rows, 0
        next_rows.are_pending = False
        if not call.may_start_rows:
            return
        submits: list[Submit] = []
        first = call.num_started // request.num_samples
        end = min((first + len(encoded)) * request.num_samples, call.num_started + next_rows.num_startable)
        try:
            with self._lock:
                while call.num_started < end and not call.is_over:
                    num_submits = len(submits)
                    self._start_row(call, encoded[call.num_started // request.num_samples - first], tokenize_s, submits)
                    if len(submits) > num_submits and call.num_started < end:
                        num_bytes += _size(submits[-1])
                        others_wait_for_prefix = (
                            call.num_started == 1
                            and num_bytes > MIN_PREFIX_BYTES
                            and submits[0].kind is RequestKind.SCORE
                        )
                        if num_bytes >= MAX_BYTES_AT_ONCE or others_wait_for_prefix:
                            break
                # A call with grammars is accepted when they are compiled. If rows may be refused because they
                # would be late (``refuse_late``), the call is accepted with its first chunk.
                if not call.compiling and not (request.refuses_late and submits):
                    call.accept()
            if submits:
                self._send(submits)
        except BaseException as error:
            self._fail(call, RequestError("submit", describe(error)))
            raise
        next_rows.encoded = encoded[call.num_started // request.num_samples - first :]
        next_rows.tokenize_s = tokenize_s
        if call.is_over:
            self._close_if_over(call)
        elif call.has_unstarted:
            self._loop.call_soon(self.submit_next, call)

    def _start_row(self, call: Call, encoded: Encoded, tokenize_s: float, submits: list[Submit]) -> None:
        """Create the next row of a call. Add its message to ``submits``, or end the row."""
        request, index = call.request, call.num_started
        prompt_index, sample = divmod(index, request.num_samples)
        params = request.params_of(prompt_index)
        if request.adapters is not None:
            encoded = request.adapters.error_of(prompt_index) or encoded
        try:
            if isinstance(encoded, list) and (self._images is not None or isinstance(encoded, ChatIds)):
                if self._images is None:
                    raise ValueError("the messages have images, and this model accepts only text")
                check_no_images(encoded, self._images)
            if request.pooled is not None:
                encoded = _fitting(encoded, request.pooled, self._model.context_length, self.checks.check_ids)
            session = None if request.sessions is None else request.sessions.of(prompt_index)
            if session is not None and isinstance(encoded, list):
                encoded = self._sessions.begin(session, encoded, call, partial(self.checks.output_limit, params))
        except (ValueError, EngineOverloadedError) as error:
            encoded = error
        if params.sampling_seed is not None:
            seed = params.sampling_seed
        else:
            if sample == 0:
                self._num_seeds += 1
                call.next_rows.drawn_seed = drawn_seed(self._settings.random_seed + self._num_seeds)
            seed = call.next_rows.drawn_seed
        ids = encoded if isinstance(encoded, list) else []
        row = self._add_row(call, ids, seed=(seed + sample) & SEED_MASK, tokenize_s=tokenize_s)
        if not isinstance(encoded, list):
            _refuse_row(row, encoded)
        elif index in call.aborted:
            _end_row(row, FinishCode.ABORT)
        elif call.deadlines and (expired := call.expired_deadline(time.monotonic())):
            _end_row(row, FinishCode.DEADLINE, matched=expired)
        else:
            try:
                submit = self._register(row, prompt_index, params)
            except (ValueError, EngineOverloadedError) as error:
                _refuse_row(row, error)
                return
            if submit is None:
                _end_row(row, FinishCode.LENGTH)
            else:
                submits.append(submit)

    def _add_row(self, call: Call, ids: list[int], *, seed: int = 0, tokenize_s: float = 0.0) -> CallRow:
        """Create the next row of a call. ``ids``: its prompt; empty: it will not be submitted."""
        request, index = call.request, call.num_started
        call.num_started += 1
        prompt_index = index // request.num_samples
        has_extras = request.logprobs is not None or request.hidden_states is not None
        row = row_type(request)(
            call,
            index,
            seed,
            ids,
            tokenize_s,
            hidden_states=request.hidden_states_of(prompt_index) if has_extras else "",
            decoders=request.decoders_of(prompt_index, len(ids), self._model.hidden_size) if has_extras else (),
            drafts={} if self._settings.scheduler.max_drafts else None,
        )
        call.add_row(row)
        return row

    def _register(self, row: CallRow, prompt_index: int, params: SamplingParams) -> Submit | None:
        """Register a row and return the message that starts it; None: it generates nothing.

        Raises:
            ValueError, EngineOverloadedError: the row does not fit.
        """
        call, ids = row.call, row.prompt_token_ids
        request, num_prompt_tokens = call.request, len(ids)
        session = 0 if request.sessions is None else self._sessions.attach(row)
        if not ids:
            raise ValueError("the prompt has no tokens; give at least one character or token id")
        max_new_tokens = 0 if request.pooled is not None else self.checks.output_limit(params, num_prompt_tokens)
        rules = None if request.logprobs is None else request.logprobs.of(prompt_index)
        if rules is not None:
            has_ids = not isinstance(ids, EmbedsIds)
            check_lengths(rules, num_prompt_tokens=num_prompt_tokens, num_output=max_new_tokens, has_ids=has_ids)
        if row.hidden_states:
            self.checks.check_hidden_states(row.hidden_states, num_prompt_tokens, max_new_tokens)
        if rules is not None:
            num_positions = rules.num_prompt_positions(num_prompt_tokens) + max(1, max_new_tokens)
            num_bytes = rules.position_bytes * num_positions
            self._limits.reserve_logprobs(call.reservation, num_bytes)
            row.num_logprob_bytes = num_bytes
        elif max_new_tokens == 0 and request.pooled is None:
            return None
        message_parts = request.message_parts[id(params)]
        if call.is_stream and message_parts.sampling.grammar is not None:
            call.compiling |= {row.index}
        row.uid = self._num_uids
        self._num_uids += 1
        self._limits.add_row(call.reservation, prompt_index, num_prompt_tokens)
        self._rows[row.uid] = row
        processor = "" if request.processors is None else request.processors.of(prompt_index)
        salt, embeds = "" if request.salts is None else request.salts.of(prompt_index), b""
        context = ids[-NUM_CONTEXT_TOKENS:]
        if isinstance(ids, EmbedsIds):
            salt, embeds, context = ids.salt, ids.embeds, []
        return Submit(  # all by name would take 1.3 us more
            row.uid,
            list(ids) if embeds else ids,
            replace(message_parts.sampling, seed=row.seed, custom_processor=processor, hidden_states=row.hidden_states),
            Limits(
                max_new_tokens,
                min(params.min_new_tokens, max_new_tokens),
                message_parts.stop_ids,
                call.deadlines,
                request.refuses_late,
            ),
            replace(
                message_parts.text,
                context_token_ids=tuple(context),
                stream=call.is_stream,
                logprobs=rules if rules is not None and rules.with_text else None,
            ),
            priority=request.priority,
            arrived_at=call.called_at,
            tenant=request.tenant,
            kind=RequestKind.POOL if request.pooled else RequestKind.GENERATE if max_new_tokens else RequestKind.SCORE,
            second_text=ids.second_text if isinstance(ids, PairIds) else 0,
            cache_salt=salt,
            session=session,
            logprobs=rules,
            embeds=embeds,
            adapter=None if request.adapters is None else request.adapters.of(prompt_index),
            media=ids.media if isinstance(ids, MediaIds) else [],
            replica=request.replica,
        )

    def _fail(self, call: Call, error: Exception) -> None:
        with self._lock:
            call.fail(error)
        self._close_if_over(call)

    # ------------------------------------------------------------ rows that will not start

    def end_unstarted(self, call: Call, end: UnstartedEnd) -> None:
        """Start no more rows of the call, and end the rows that were not started.

        They end in the next iterations of the loop, because a large batch would block it. If the call is ending
        already, nothing changes.
        """
        if call.end_of_unstarted is None and call.has_unstarted:
            call.end_of_unstarted = end
            self._ending.append(call)
            if len(self._ending) == 1:
                post(self._loop, self.end_some)
        with self._lock:
            call.accept()

    async def wait_unstarted(self) -> None:
        """Wait until all rows of ``end_unstarted`` have ended."""
        while self._ending:  # noqa: ASYNC110  # the number of turns is bounded
            await asyncio.sleep(0)

    def end_some(self, max_rows: int = MAX_ROWS_ENDED_AT_ONCE) -> None:
        """End some rows of ``end_unstarted``, one call after the other, and more in the next iteration of the loop."""
        try:
            while self._ending and max_rows > 0:
                call = self._ending[0]
                with self._lock:
                    try:
                        while not call.is_over and call.has_unstarted and max_rows > 0:
                            _end_row(self._add_row(call, []), *cast("UnstartedEnd", call.end_of_unstarted))
                            max_rows -= 1
                    except Exception as error:
                        call.fail(RequestError("submit", describe(error)))
                max_rows -= 1  # a call without rows takes time too
                if call.is_over or not call.has_unstarted:
                    self._ending.popleft()
                    self._close_if_over(call)
        finally:
            if self._ending:
                post(self._loop, self.end_some)


def _refuse_row(row: CallRow, error: RowError) -> None:
    is_too_large = isinstance(error, RequestTooLargeError)
    _end_row(row, FinishCode.TOO_LARGE if is_too_large else FinishCode.FAILED, error=error)


def _end_row(row: CallRow, code: FinishCode, matched: str | None = None, error: RowError | None = None) -> None:
    """End a row that never reached the scheduler."""
    now = time.monotonic()
    message = "" if error is None else str(error)
    end = End(uid=-1, code=code, matched=matched, stage="tokenize", message=message, ended_at=now)
    row.call.end_row(row, end, now, error)


def _size(submit: Submit) -> int:
    """Estimate the bytes of a message."""
    num_ids = len(submit.prompt_token_ids) + len(submit.limits.stop_token_ids)
    sampling, text = submit.sampling, submit.text
    num_ids += 0 if submit.logprobs is None else 2 * len(submit.logprobs.token_ids)
    num_ids += 3 * len(sampling.logit_bias) + len(sampling.suppressed_token_ids) + len(sampling.allowed_token_ids)
    num_ids += sum(map(len, sampling.bad_token_ids))
    num_bytes = len(submit.embeds) + sum(map(len, text.stop)) + sum(map(len, text.stop_regex))
    return 4 * num_ids + num_bytes + (0 if sampling.grammar is None else len(sampling.grammar.text))


def _fitting(encoded: Encoded, pooled: Pooled, max_tokens: int, check_ids: Callable[[list[int]], None]) -> Encoded:
    """Return the ids of a text, cut to ``max_tokens`` if the call truncates, or the error of a text that is too long.

    A text with images is never cut. ``check_ids`` raises ValueError for ids outside the vocabulary. It was not called
    yet for prompts with too many ids.
    """
    if not isinstance(encoded, list) or len(encoded) <= max_tokens:
        return encoded
    if isinstance(encoded, MediaIds):
        return RequestTooLargeError(
            f"the prompt has {len(encoded)} tokens, including {encoded.num_image_tokens} for images; "
            f"at most {max_tokens} are allowed; give smaller or fewer images"
        )
    if pooled.truncates:
        cut = encoded[:max_tokens]
        try:
            check_ids(cut)
        except ValueError as error:
            return error
        return cut
    return RequestTooLargeError(
        f"input_ids has {len(encoded)} tokens; at most {max_tokens} are allowed; truncate=True cuts the end"
    )
