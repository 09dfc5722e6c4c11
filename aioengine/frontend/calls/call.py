"""Call and CallRow: one call of the user with its rows, written by the engine's loop and read by one ``Reader``.

Each row merges its unread output into one piece. So a slow reader never slows the engine, and needs only memory for
the unread text. The lock of the engine protects all calls. The writer takes the lock a few times per frame, and no code
waits while it holds the lock.

A call is open, or *over* (``Call.is_over``) for one of three reasons. The last two columns show what its reader gets
after the ready chunks:

    state      when                                               a stream      a whole answer
    open       rows have no end yet (``num_open``)                waits         waits
    finished   all rows have their ends                           its end       the answer
    failed     ``error`` is set                                   the error     the error
    left       ``is_left``: the rest has no reader                its end       RequestError

A reader is open or closed. It is closed after it left, or after another reader attached to the call. A closed reader
of a stream gets the end immediately, even if chunks are ready. These methods of ``Reader`` end a call early, and may be
repeated:

    method                 used for                              effect
    abort                  abort()                               rows end with reason "abort"; the reader stays open
    leave                  aclose(), close(), end of ``with``,   closes the reader; the call is left: its rows end
                           finalizers, exceptions in a wait      without a reason, and unread chunks are freed
    leave_if_interrupted   an exception in ``take``              ``leave``, unless it is the error of the call itself

An attachable call (``resume_ttl``) is not left with its reader: it continues, and another reader may attach.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import ClassVar, NamedTuple, cast

from msgspec import Struct

from aioengine.api import answers
from aioengine.api.answers import Answer, Chunk, ChunkInfo, ExtraDecoder, RowError, Timings
from aioengine.frontend.calls.overload import Reservation
from aioengine.frontend.intake.encoder import Encoded
from aioengine.frontend.intake.prompts import MediaIds
from aioengine.frontend.intake.requests import CallRequest
from aioengine.protocol.columns import DRAFTS, HIDDEN_STATES, WEIGHT_VERSION, Extra
from aioengine.protocol.messages import LAST_STATES, End, FinishCode, FirstToken

MAX_UNJOINED_TEXTS = 64
"""A row joins its unread texts when it has this many of them; if they are long, when it has more."""


@dataclass(eq=False)  # not a Struct, whose attributes take three times as long to set
class CallRow:
    """One row of a call, with its unread output. Under the engine's lock."""

    call: Call
    index: int
    seed: int = 0
    prompt_token_ids: list[int] = field(default_factory=list)
    tokenize_s: float = 0.0  # seconds that the tokenizer worked on the batch with its prompt
    hidden_states: str = ""  # which hidden states it returns (``Sampling.hidden_states``)
    decoders: tuple[ExtraDecoder, ...] = ()  # convert its logprobs and hidden states
    num_logprob_bytes: int = 0  # its part of ``Reservation.num_logprob_bytes``

    # reported by the processes
    uid: int = -1  # the engine's number of the row; -1: not submitted
    info: ChunkInfo = field(init=False)  # the ``meta_info`` so far; each chunk gets a copy
    first_token: FirstToken | None = None  # when and how the row began; None: it has no token yet
    drafts: dict[int, Extra] | None = None  # for ``meta_info``, by token index; None: the engine does not speculate
    versions: dict[int, str] | None = None  # token index -> weights from this token on; None: they have never changed
    final_info: ChunkInfo | None = None  # the ``meta_info`` after its end; None: it has no end yet
    error: RowError | None = None  # why it has no answer

    # unread output
    has_unread: bool = field(init=False)  # if so, it is in ``Call.ready``; always true if the call is no stream
    text: str = ""
    more_texts: list[str] = field(default_factory=list)  # they continue ``text``
    # A single id is an int: a new list for each row of a frame would trigger garbage collections.
    token_ids: int | list[int] = field(default_factory=list)
    # By token index and kind, without the extras that one of ``decoders`` converts. If an extra arrives twice, the
    # second one replaces the first.
    extras: dict[tuple[int, str], Extra] = field(default_factory=dict)

    # read output
    text_offset: int = 0  # number of characters that were read
    token_offset: int = 0  # number of ids that were read
    newest_hidden_state: Extra | None = None  # if the row returns only the last one

    keeps_output: ClassVar[bool] = False
    """Whether output is kept after it was read, for later readers."""

    def __post_init__(self) -> None:
        self.has_unread = not self.call.is_stream
        self.info = {  # type: ignore[typeddict-item]  # keys that the call asks for are added later
            "id": self.call.row_rid(self.index),
            "finish_reason": None,
            "prompt_tokens": len(self.prompt_token_ids),
            "completion_tokens": 0,
            "reasoning_tokens": 0,
            "weight_version": self.call.weight_version,
            "dp_rank": None,
            "seed": self.seed,
            "cached_tokens": 0,
            "num_preemptions": 0,
            "num_retractions": 0,
        }
        if self.hidden_states:
            self.info["hidden_states"] = []
        if isinstance(self.prompt_token_ids, MediaIds):
            self.info["image_tokens"] = self.prompt_token_ids.num_image_tokens

    # ------------------------------------------------------------ written by the engine

    def note_first_token(self, first_token: FirstToken) -> None:
        """Record that its prompt is computed."""
        self.first_token = first_token
        self.info["cached_tokens"] = first_token.num_cached
        self.info["weight_version"] = first_token.weight_version
        self.info["dp_rank"] = first_token.replica

    def count_preemption(self) -> None:
        """Count a preemption, under both names of the public contract."""
        self.info["num_preemptions"] += 1
        self.info["num_retractions"] += 1

    def put(self, text: str, new: int | list[int]) -> bool:
        """Add output before the end of the row; return whether to wake the reader (``Call.wake``).

        ``new``: one id, or a list that the row keeps and changes.
        """
        if self.has_unread:
            self._merge(text, new)
            return False
        self.text, self.token_ids = text, new
        self.has_unread = True
        self.call.ready.append(self)
        return True

    def put_extra(self, extra: Extra) -> None:
        """Add an extra, unless its token was read. An extra of the prompt belongs to the first token."""
        for decoder in self.decoders:
            if extra.kind in decoder.kinds:
                decoder.decode(extra)
                return
        if extra.kind == DRAFTS:
            if self.drafts is not None:
                self.drafts[extra.index] = extra
            return
        if extra.kind == WEIGHT_VERSION:
            # later tokens were lost with a process, and are computed again
            earlier = {index: version for index, version in (self.versions or {}).items() if index < extra.index}
            self.versions = earlier | {extra.index: extra.data.decode()}
            return
        if extra.index >= self.token_offset or not self.token_offset:
            self.extras[extra.index, extra.kind] = extra
        if self.hidden_states == LAST_STATES:
            drop_old_hidden_states(self.extras, self.num_output)

    @property
    def prompt_index(self) -> int:
        """Index of its prompt."""
        return self.index // self.call.request.num_samples

    @property
    def num_output(self) -> int:
        """Number of its output tokens, read or not."""
        num_unread = 1 if isinstance(self.token_ids, int) else len(self.token_ids)
        return self.token_offset + (num_unread if self.has_unread else 0)

    def failure(self, end: End) -> RowError | None:
        """Return the error of a row with this end; None: the row has an answer."""
        return answers.error(end)

    def keep_logprobs(self, num_kept: int) -> None:
        """Free the memory reserved for its logprobs, except ``num_kept`` bytes."""
        num_bytes = max(0, self.num_logprob_bytes - num_kept)
        self.num_logprob_bytes -= num_bytes
        self.call.reservation.free_logprobs(num_bytes)

    def _merge(self, text: str, new: int | list[int]) -> None:
        """Append to the unread output."""
        unread = self.token_ids if isinstance(self.token_ids, list) else [self.token_ids]
        unread += new if isinstance(new, list) else [new]
        self.token_ids = unread
        if not self.text:
            self.text = text
        elif text:
            self.more_texts.append(text)
            if len(self.more_texts) >= max(MAX_UNJOINED_TEXTS, len(self.more_texts[0]) // MAX_UNJOINED_TEXTS):
                self.more_texts = ["".join(self.more_texts)]

    # ------------------------------------------------------------ read

    def take(self) -> Chunk:
        """Return all unread output as one chunk. The caller has removed the row from ``Call.ready``."""
        token_ids = [self.token_ids] if isinstance(self.token_ids, int) else self.token_ids
        if self.more_texts:
            self.text += "".join(self.more_texts)
            self.more_texts = []
        text, text_offset, token_offset = self.text, self.text_offset, self.token_offset
        info = (self.final_info or self.info).copy()
        num_tokens = info["completion_tokens"] = token_offset + len(token_ids)
        if self.final_info is not None:
            if self.newest_hidden_state is not None:
                info["hidden_states"] = [answers.array(self.newest_hidden_state.data)]
        elif self.versions is not None:
            info["weight_version"] = answers.version_spans(info["weight_version"], self.versions, num_tokens)[-1][0]
        chunk: Chunk = {  # type: ignore[typeddict-item]
            "text": text,
            "output_ids": token_ids,
            "meta_info": info,
            "text_offset": text_offset,
            "token_offset": token_offset,
        }
        request = self.call.request
        if request.gives_batch:
            chunk["index"] = self.index
        if request.shows_prompt:
            chunk["prompt_token_ids"] = self.prompt_token_ids
        if self.extras or self.decoders:
            self._add_extras(chunk)
        self.text_offset = text_offset + len(text)
        self.token_offset = num_tokens
        self.has_unread = False
        if self.final_info is not None and self.call.is_stream:
            self.call.num_unread_rows -= 1
            if self.num_logprob_bytes:
                self.keep_logprobs(0)
        return chunk

    def answer(self) -> Answer:
        """Return the whole output of a row that has ended: one chunk without offsets."""
        answer = cast("dict[str, object]", self.take())
        for key in ("text_offset", "token_offset", "index"):
            answer.pop(key, None)
        return cast("Answer", answer)

    def _add_extras(self, output: Chunk) -> None:
        """Add logprobs, hidden states and other extras of the tokens of ``output``."""
        info, token_offset = output["meta_info"], self.token_offset
        end = token_offset + len(output["output_ids"])
        for decoder in self.decoders:
            cast("dict[str, object]", info).update(decoder.lists(token_offset, end, keeps=self.keeps_output))
        extras = [extra for extra in self.extras.values() if extra.index < end]
        self.extras = {key: extra for key, extra in self.extras.items() if extra.index >= end}
        if self.hidden_states == LAST_STATES:
            states = [extra for extra in extras if extra.kind == HIDDEN_STATES]
            extras = [extra for extra in extras if extra.kind != HIDDEN_STATES]
            if states:
                self.newest_hidden_state = max(states, key=lambda state: state.index)
                if info["finish_reason"] is not None:
                    info["hidden_states"] = [answers.array(self.newest_hidden_state.data)]
        if extras:
            output["extras"] = extras

    def final_info_for(self, end: End, delivered_at: float) -> ChunkInfo:
        """Return the ``meta_info`` of the row with this end.

        If the frontend or the supervisor ended the row, ``end`` has no values of its first token. They are then
        taken from ``first_token``, or were counted in ``info``.
        """
        info, num_output = self.info.copy(), self.num_output
        info["completion_tokens"] = num_output
        info["finish_reason"] = answers.finish_reason(end, num_output, self.error)
        spans = [(info["weight_version"], 0, num_output)]
        if self.versions is not None:
            spans = answers.version_spans(info["weight_version"], self.versions, num_output)
            info["weight_version"] = spans[-1][0]
        info["weight_versions"] = spans
        num_cached = info["cached_tokens"] = max(end.num_cached, info["cached_tokens"])
        info["cached_tokens_details"] = {"device": num_cached, "host": 0}
        info["num_preemptions"] = info["num_retractions"] = max(end.num_preemptions, info["num_preemptions"])
        if self.drafts is not None:
            cast("dict[str, object]", info).update(answers.draft_info(self.drafts, num_output))
        info["e2e_latency"] = delivered_at - self.call.called_at
        info["timings"] = self._timings(end, delivered_at)
        return info

    def _timings(self, end: End, delivered_at: float) -> Timings:
        """Return the seconds of each stage. A stage begins at the end of the one before.

        A stage that was not reached takes 0 s, and the stage before it ends with the row. Times of another machine are
        converted with a small error, so no stage may begin before or end after its neighbors.
        """
        called_at = self.call.called_at
        begun_at = called_at + self.tokenize_s
        ended_at = min(max(end.ended_at, begun_at), delivered_at)
        admitted_at, first_token_at = end.admitted_at, end.first_token_at
        if self.first_token is not None:
            admitted_at = self.first_token.admitted_at if admitted_at is None else admitted_at
            first_token_at = self.first_token.first_token_at if first_token_at is None else first_token_at
        queue_end = ended_at if admitted_at is None else min(max(admitted_at, begun_at), ended_at)
        prefill_end = max(queue_end, ended_at if first_token_at is None else min(first_token_at, ended_at))
        return {
            "tokenize_s": self.tokenize_s,
            "queue_s": queue_end - called_at - self.tokenize_s,
            "prefill_s": prefill_end - queue_end,
            "decode_s": ended_at - prefill_end,
            "deliver_s": delivered_at - ended_at,
            "first_token_s": None if first_token_at is None else first_token_at - called_at,
            "total_s": delivered_at - called_at,
        }


def drop_old_hidden_states(extras: dict[tuple[int, str], Extra], num_output: int) -> None:
    """Drop the hidden states of all tokens before the last of ``num_output`` tokens."""
    for index, kind in list(extras):
        if kind == HIDDEN_STATES and index < num_output - 1:
            del extras[index, kind]


ReadPosition = tuple[CallRow, int, int]
"""A row, and how many of its characters and ids were read."""


class NotifyOn(IntEnum):
    """When the reader calls ``ReaderActions.on_read``.

    NOTHING: never.
    END_READ: when it has read the end of a row, because unstarted rows wait until ``Call.num_unread_rows`` is smaller.
    EACH_READ: after each read, because the requests of the call are suspended.
    """

    NOTHING = 0
    END_READ = 1
    EACH_READ = 2


class UnstartedEnd(NamedTuple):
    """How the unstarted rows of an ended call end."""

    code: FinishCode
    matched: str | None = None
    error: RowError | None = None


class NextRows(Struct, eq=False):
    """The rows of a call that start next. Only for the ``Submitter``, on the engine's loop."""

    are_pending: bool = False  # they wait for their tokens or images
    num_startable: int = 0  # number of rows that may start in this iteration of the loop
    encoded: list[Encoded] = []  # the ids of their prompts; empty: not known yet
    tokenize_s: float = 0.0  # seconds that ``encoded`` took
    drawn_seed: int = 0  # seed of the current prompt, if the user gave none; its samples count from it


@dataclass(slots=True, eq=False)
class Call:
    """One call of the user, from its checked request to its end. Under the engine's lock."""

    request: CallRequest
    reservation: Reservation  # its part of the queue limits
    called_at: float
    weight_version: str  # version of the weights at the call, for rows without a token

    # its registration
    number: int = 0  # its number in the engine, from 1; 0: not registered
    rid: str = field(init=False)  # the caller's id, or a random one
    ids: list[str] = field(default_factory=list)  # its ids in ``CallIds``
    deadlines: dict[str, float] = field(init=False)  # name in a finish reason -> absolute time
    timer: asyncio.TimerHandle | None = None  # for the next of ``deadlines``
    # Called with each started row that ends, its ``meta_info`` and its error. None: nothing observes it.
    on_row_end: Callable[[CallRow, ChunkInfo, BaseException | None], None] | None = None

    # the start of its rows
    num_started: int = 0  # number of started rows; they start in order
    next_rows: NextRows = field(default_factory=NextRows)
    aborted: set[int] = field(default_factory=set)  # indices of rows that were aborted before their start
    end_of_unstarted: UnstartedEnd | None = None  # how the unstarted rows end; None: they may start
    compiling: frozenset[int] = frozenset()  # indices of the rows of a stream whose grammars are being compiled
    is_accepted: bool = False  # its first rows are submitted, and none is in ``compiling``

    # its rows
    num_open: int = field(init=False)  # number of rows without an end, started or not
    open_rows: dict[int, CallRow] = field(default_factory=dict)  # started rows without an end, by index
    num_unread_rows: int = 0  # number of started rows whose end was not read; limited, so a batch starts gradually
    results: list[Answer | BaseException | None] = field(init=False, repr=False)  # by index; empty for a stream
    kept_row: CallRow | None = None  # the row of an attachable call

    # its end
    is_over: bool = field(init=False)  # no row is open, or it has failed or was left: the engine adds nothing more
    is_left: bool = False  # the rest of its output has no reader
    error: BaseException | None = None  # the error of the whole call

    # its reader
    ready: deque[CallRow] = field(default_factory=deque)  # rows of a stream with unread output; new for each reader
    has_reader: bool = True  # False after the reader of an attachable call left
    waiter: asyncio.Future[Chunk | None] | None = None  # on the engine's loop: gets a chunk, or None for other changes
    wakers: tuple[Callable[[], object], ...] = ()  # callbacks of all other waiting readers
    notify_on: NotifyOn = NotifyOn.NOTHING

    def __post_init__(self) -> None:
        request = self.request
        self.rid = request.rid or os.urandom(16).hex()
        self.deadlines = {name: self.called_at + seconds for name, seconds in request.timeouts.items()}
        self.num_open = request.num_rows
        self.is_over = self.num_open == 0
        self.results = [] if self.is_stream else [None] * request.num_rows

    @property
    def has_unstarted(self) -> bool:
        return self.num_started < self.request.num_rows

    @property
    def may_start_rows(self) -> bool:
        return self.end_of_unstarted is None and not self.is_over

    @property
    def is_stream(self) -> bool:
        return self.request.is_stream

    @property
    def rows_fail_alone(self) -> bool:
        """Whether a failed row returns its exception, instead of failing the whole call."""
        return self.request.returns_exceptions and self.request.gives_batch

    @property
    def is_attachable(self) -> bool:
        return self.request.resume_ttl_s is not None

    @property
    def state(self) -> str:
        """One word for ``repr``."""
        if self.is_left:
            return "left"
        return "failed" if self.error is not None else "running" if self.num_open else "finished"

    @property
    def read_position(self) -> ReadPosition | None:
        """The position at which the reader of a stream continues; None: it has read everything."""
        if not self.is_stream:
            return None
        try:
            row = self.ready[0]
        except IndexError:  # a check before would not help, because a reader may take the row on another thread
            return None
        return row, row.text_offset, row.token_offset

    @property
    def has_unread(self) -> bool:
        """Whether its reader has something to take."""
        has_answer = not self.is_stream and bool(self.results)
        return bool(self.ready) or (has_answer and self.error is None and not self.is_left)

    def row_rid(self, index: int) -> str:
        """Return the id of a row: the id of its prompt or of the call, followed by the numbers of prompt and sample."""
        request, rid = self.request, self.rid
        if not request.gives_batch:
            return rid
        prompt_index, sample = divmod(index, request.num_samples)
        if request.is_batch:
            own = "" if request.rids is None else request.rids[prompt_index]
            rid = str(own) or f"{rid}_{prompt_index}"
        return f"{rid}_{sample}" if request.num_samples > 1 else rid

    def expired_deadline(self, now: float) -> str | None:
        """Return the name of a deadline that has passed."""
        return next((name for name, deadline in self.deadlines.items() if deadline <= now), None)

    # ------------------------------------------------------------ rows, under the lock

    def add_row(self, row: CallRow) -> None:
        """Add the row that is started next."""
        self.open_rows[row.index] = row
        self.num_unread_rows += 1
        if self.is_attachable:
            self.kept_row = row

    def accept(self) -> None:
        """Mark the call as accepted, unless it has failed. Wake the reader of a stream that waits for this."""
        if not self.is_accepted and self.error is None:
            self.is_accepted = True
            if self.is_stream and self.wakers:  # a reader in ``waiter`` waits for a chunk
                self.wake()

    def note_compiled(self, row: CallRow) -> None:
        """Record that the grammar of a row is compiled, or that the row has ended."""
        self.compiling -= {row.index}
        if not self.compiling:
            self.accept()

    def end_row(self, row: CallRow, end: End, delivered_at: float, error: RowError | None = None) -> None:
        """End a row. ``error``: the error, if the frontend detected it.

        A failed row fails the whole call, unless the user asked for exceptions in the list of answers.
        """
        if self.open_rows.pop(row.index, None) is None:
            return  # the row has an end already
        row.error = row.failure(end) if error is None else error
        row.final_info = row.final_info_for(end, delivered_at)
        self.num_open -= 1
        self.is_over = self.is_over or self.num_open == 0
        if self.on_row_end is not None:
            self.on_row_end(row, row.final_info, row.error)
        if row.error is not None and not self.rows_fail_alone:
            self.fail(answers.named(row.error, row.prompt_index, self.request.num_prompts))
        elif self.is_stream:
            if not row.has_unread:
                row.put("", [])
            self.wake()
            if self.compiling:
                self.note_compiled(row)
        else:
            self.num_unread_rows -= 1
            self.results[row.index] = row.error or row.answer()
            if self.num_open == 0:
                self.wake()

    def drop_open_rows(self, now: float) -> list[int]:
        """Drop the rows without an end, because the call has failed or was left. Return their uids."""
        if self.on_row_end is not None:
            code = FinishCode.ABORT if self.error is None else FinishCode.FAILED
            message = "its reader left" if self.error is None else str(self.error)
            for row in self.open_rows.values():
                end = End(row.uid, code, message=message, ended_at=now)
                self.on_row_end(row, row.final_info_for(end, now), self.error)
        uids = [row.uid for row in self.open_rows.values()]
        self.open_rows.clear()
        return uids

    def fail(self, error: BaseException) -> None:
        """End the call with an error. Ready chunks are read first."""
        if self.error is None:
            self.error = error
            self.is_over = True
            self.wake()

    def leave(self) -> None:
        """End the call without an error: the rest of its output has no reader."""
        self.is_left = self.is_over = True

    def wake(self) -> None:
        """Wake the reader. If it waits in ``waiter``, this takes the next chunk for it."""
        waiter = self.waiter
        if waiter is not None:
            self.waiter = None
            if not waiter.done():
                waiter.set_result(self.ready.popleft().take() if self.ready else None)
        if self.wakers:
            wakers, self.wakers = self.wakers, ()
            for wake in wakers:
                wake()
