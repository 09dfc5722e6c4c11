"""The output of a call, between the engine's loop, which writes it, and one reader on any loop or thread.

Every row merges its unread output into one piece, so a slow reader costs no more than its text and never slows the
engine. All of it is protected by one lock, the engine's, which the writer takes once for a whole frame; no code waits
while it holds it.

An output is open, or *over* (``CallOutput.is_over``) for one of three reasons. Behind the chunks that are ready its
reader gets:

    state      when                                               a stream      a whole answer
    open       rows have no end yet (``num_open``)                waits         waits
    finished   all rows have their ends                           its end       the answer
    failed     ``error`` is set                                   the error     the error
    left       ``is_left``: the rest has no reader                its end       RequestError

A reader has a cursor, which is open or *closed*: the reader has left, or another one is attached. Then a stream is at
its end at once, whatever is ready. How reading ends (methods of ``Reader``, harmless when repeated):

    method                 used for                              effect
    abort                  abort()                               rows end with reason "abort"; the cursor stays open
    leave                  aclose(), close(), end of ``with``    closes the cursor; the output is left, its rows end
                                                                 without a reason, and unread chunks are freed
    leave_later            finalizers, signal handlers           as ``leave``, later on the engine's loop: takes no lock
    leave_for              an exception in a wait                ``leave``, or ``leave_later`` for GeneratorExit
    leave_if_interrupted   an exception in ``take``              ``leave``, unless it is the error of the call itself

The output of an attachable request is not left with its reader: it goes on, and another reader may be attached.
Leaving has two steps: ``CallOutput.mark_left`` at once, then on the loop ``Cursor.close`` and the end of the rows.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar, Protocol

from aioengine.api import answers
from aioengine.protocol.columns import HIDDEN_STATES
from aioengine.protocol.messages import LAST_STATES
from aioengine.supervision.tasks import post

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from aioengine.api.answers import Answer, Chunk, RowError, RowFacts
    from aioengine.protocol.columns import Extra
    from aioengine.protocol.messages import End

MAX_UNJOINED_TEXTS = 64


def resolve(waiter: asyncio.Future[Chunk | None]) -> None:
    """Wake ``waiter``, from the thread of its loop, unless it was cancelled meanwhile."""
    if not waiter.done():
        waiter.set_result(None)


def resolve_elsewhere(loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[Chunk | None]) -> None:
    """Wake ``waiter`` of another ``loop``, from any thread. A closed loop is ignored: nothing waits there any more."""
    post(loop, resolve, waiter)


class EndOfOutput(Exception):  # not an error: the reader has everything
    """Nothing more will come."""


class ReaderActions(Protocol):
    """What a reader asks of the engine. From any thread; no method waits, and calling one twice does no harm.

    All but ``leave`` may be called from a signal handler or finalizer too: they take no lock, and the engine's loop
    does the work later.
    """

    def leave(self, cursor: Cursor) -> None:
        """The reader stops: end the rows of its call without an error, unless another reader may attach to it."""
        ...

    def leave_later(self, cursor: Cursor) -> None:
        """Like ``leave``, but always later on the engine's loop."""
        ...

    def abort(self, output: CallOutput) -> None:
        """End its rows with the finish reason "abort"; output that exists can still be read."""
        ...

    def check_waiting(self, *, blocks: bool) -> None:
        """Raise if the engine could never wake this thread. ``blocks``: this thread will block until then."""
        ...

    def on_read(self, output: CallOutput) -> None:
        """The reader has read: start more rows of a batch, or resume suspended ones (``Wants``)."""
        ...


class LogprobCounter(Protocol):
    """Counts the bytes reserved for logprobs (``QueueLimits``)."""

    num_logprob_bytes: int


class RowStream:
    """One row of a call, with its unread output. Under the engine's lock.

    Attributes:
        position: its index in the call.
        uid: the engine's number for it, -1 before it was submitted.
        text, more_texts: the unread text, in pieces.
        unread: the unread ids: a list, or a single int, since most steps bring one id and a new list for each row of a
            frame would trigger garbage collections.
        extras: those of unread tokens that ``facts`` has no reader for, by token index and kind; one that comes again
            replaces the first.
        keeps: whether what it gives may be asked for again.
        text_offset, token_offset: how many characters and ids were read before.
        token_ids: the ids of the last chunk that was taken.
        has_first_token: whether the engine has reported its first token.
        finished: its end, None while it runs.
        error: why it has no answer, if it failed.
        is_queued: whether it is in ``ready`` of its reader; always true where the call is no stream and has no queue.
        num_logprob_bytes: reserved for its logprobs (``QueueLimits.reserve_logprobs``).
    """

    __slots__ = (
        "delivered_at", "error", "extras", "facts", "finished", "has_first_token", "is_queued", "more_texts",
        "num_logprob_bytes", "output", "position", "text", "text_offset", "token_ids", "token_offset", "uid", "unread",
    )  # fmt: skip

    keeps: ClassVar[bool] = False

    def __init__(self, output: CallOutput, position: int, facts: RowFacts) -> None:
        self.output = output
        self.position = position
        self.facts = facts
        self.uid = -1
        self.has_first_token = False
        self.finished: End | None = None
        self.error: RowError | None = None
        self.delivered_at = 0.0
        self.is_queued = not output.is_stream
        self.text_offset = 0
        self.token_offset = 0
        self.text = ""
        self.more_texts: list[str] = []
        self.unread: int | list[int] = []
        self.extras: dict[tuple[int, str], Extra] = {}
        self.token_ids: list[int] = []
        self.num_logprob_bytes = 0

    def put(self, text: str, new: int | list[int]) -> bool:
        """Add output; returns whether the reader is to be woken (``Cursor.wake``). Before the end of the row.

        ``new``: one id, or a list, which the row keeps and changes.
        """
        if self.is_queued:
            self._merge(text, new)
            return False
        self.text, self.unread = text, new
        self.is_queued = True
        self.output.cursor.ready.append(self)
        return True

    def put_extra(self, extra: Extra) -> None:
        """Add what came beside a token (or the prompt: the first token), unless that was read. Under the lock."""
        for reader in self.facts.readers:
            if extra.kind in reader.kinds:
                reader.read(extra)
                return
        if extra.index >= self.token_offset or not self.token_offset:
            self.extras[extra.index, extra.kind] = extra
        if self.facts.states == LAST_STATES:
            drop_old_states(self.extras, self.num_known())

    def num_known(self) -> int:
        """How many output tokens it has."""
        num_unread = 1 if isinstance(self.unread, int) else len(self.unread)
        return self.token_offset + (num_unread if self.is_queued else 0)

    def _take_extras(self) -> list[Extra]:
        """Those of the tokens up to the last of ``token_ids``."""
        end = self.token_offset + len(self.token_ids)
        taken = [extra for extra in self.extras.values() if extra.index < end]
        if len(taken) == len(self.extras):
            self.extras.clear()
            return taken
        for extra in taken:
            del self.extras[extra.index, extra.kind]
        return taken

    def _merge(self, text: str, new: int | list[int]) -> None:
        """Add to what was not read yet."""
        unread = self.unread if isinstance(self.unread, list) else [self.unread]
        unread += new if isinstance(new, list) else [new]
        self.unread = unread
        if not self.text:
            self.text = text
        elif text:
            self.more_texts.append(text)
            if len(self.more_texts) >= max(MAX_UNJOINED_TEXTS, len(self.more_texts[0]) // MAX_UNJOINED_TEXTS):
                self.more_texts = ["".join(self.more_texts)]

    def take(self) -> Chunk:
        """All unread output as one chunk, for the row that was first in ``ready``."""
        if isinstance(self.unread, int):
            self.token_ids = [self.unread]
        else:
            self.join()
        made = answers.chunk(self.facts, self)
        if self.extras or self.facts.readers:
            self._add_more(made)
        self.text_offset += len(self.text)
        self.token_offset += len(self.token_ids)
        self.is_queued = False
        if self.finished is not None:
            self.output.num_held -= 1
            self.free_logprobs()
        return made

    def free_logprobs(self, num_kept: int = 0) -> None:
        """Give back the memory reserved for its logprobs, but for ``num_kept`` bytes."""
        num_bytes = max(0, self.num_logprob_bytes - num_kept)
        self.num_logprob_bytes -= num_bytes
        self.output.free_logprobs(num_bytes)

    def answer(self) -> Answer:
        """The whole row. Under the lock, behind its end."""
        self.join()
        made = answers.answer(self.facts, self)
        if self.extras or self.facts.readers:
            self._add_more(made)
        return made

    def _add_more(self, made: Answer | Chunk) -> None:
        """Add what came beside the tokens of ``made``."""
        if self.facts.readers:
            answers.add_read(made, self.facts, self.token_offset, keeps=self.keeps)
        if self.extras and (extras := self._take_extras()):
            answers.add_extras(made, self.facts, extras)

    def join(self) -> None:
        """Join the unread texts, and make a list of the unread ids."""
        if self.more_texts:
            self.text += "".join(self.more_texts)
            self.more_texts = []
        self.token_ids = self.unread if isinstance(self.unread, list) else [self.unread]


def drop_old_states(extras: dict[tuple[int, str], Extra], num_known: int) -> None:
    """Keep no hidden states but that of the last of ``num_known`` tokens, and later ones."""
    for index, kind in list(extras):
        if kind == HIDDEN_STATES and index < num_known - 1:
            del extras[index, kind]


Place = tuple[RowStream, int, int]
"""A row, and how many characters and ids of it were read."""


class Wants(IntEnum):
    """When a reader calls ``ReaderActions.on_read``.

    ENDS: when it has read the end of a row, since rows wait for ``num_held`` to fall. READS: at every read, since its
    requests are suspended.
    """

    NOTHING = 0
    ENDS = 1
    READS = 2


class Cursor:
    """One reader's place in an output. Every method under the lock.

    Attributes:
        is_closed: its reader has left or was replaced by another one, and receives nothing more.
        ready: rows of a stream that have something to read.
        waiter: the future of a reader that waits on the engine's own loop; its result is the next chunk, or None if
            something else happened.
        wakers: callbacks for all others that wait; they look for themselves what there is to read.
    """

    __slots__ = ("is_closed", "output", "ready", "waiter", "wakers")

    def __init__(self, output: CallOutput) -> None:
        self.output = output
        self.is_closed = False
        self.ready: deque[RowStream] = deque()
        self.waiter: asyncio.Future[Chunk | None] | None = None
        self.wakers: list[Callable[[], None]] = []

    @property
    def is_over(self) -> bool:
        """Whether nothing more will become ready."""
        return self.is_closed or self.output.is_over

    def wake(self) -> None:
        """Wake the reader wherever it waits; ``waiter`` receives its chunk at once."""
        waiter = self.waiter
        if waiter is not None:
            self.waiter = None
            if not waiter.done():
                waiter.set_result(self.ready.popleft().take() if self.ready else None)
        if self.wakers:
            wakers, self.wakers = self.wakers, []
            for wake in wakers:
                wake()

    def close(self) -> list[RowStream]:
        """End the reading. Returns the rows that were not read."""
        self.is_closed = True
        unread = list(self.ready)
        self.ready.clear()
        self.wake()
        return unread


class CallOutput:
    """All rows of one call; the engine's side of it. Every method but ``mark_left`` under the lock.

    Attributes:
        live: rows that were started and have no end yet. num_open: rows without an end, started or not.
        num_held: started rows whose end was not read yet, which bound the rows of a batch in flight.
        error: what the whole call ended with. is_left: its rest is not read.
        is_accepted: its first rows are on their way. wants: when its reader calls ``on_read``.
        compiling: positions of the rows of a stream whose grammars are not compiled yet; it is not accepted before.
        cursor: of the reader.
        results: answers (or exceptions) by position, where the call is no stream.
        num_logprob_bytes: reserved for the logprobs of all its rows. counter: where they are counted; None: nowhere.
    """

    __slots__ = (
        "compiling", "counter", "cursor", "error", "is_accepted", "is_batch", "is_left", "is_stream", "live",
        "num_held", "num_logprob_bytes", "num_open", "results", "returns_exceptions", "rid", "wants",
    )  # fmt: skip

    def __init__(self, rid: str, num_rows: int, *, is_stream: bool, is_batch: bool, returns_exceptions: bool) -> None:
        self.rid = rid
        self.is_stream = is_stream
        self.is_batch = is_batch
        self.returns_exceptions = returns_exceptions
        self.live: dict[int, RowStream] = {}
        self.num_open = num_rows
        self.num_held = 0
        self.is_accepted = False
        self.compiling: set[int] = set()
        self.is_left = False
        self.wants = Wants.NOTHING
        self.error: BaseException | None = None
        self.cursor = Cursor(self)
        self.counter: LogprobCounter | None = None
        self.num_logprob_bytes = 0
        self.results: list[Answer | BaseException | None] = [] if is_stream else [None] * num_rows

    @property
    def is_over(self) -> bool:
        """Whether the engine has nothing more to give."""
        return self.num_open == 0 or self.error is not None or self.is_left

    @property
    def place(self) -> Place | None:
        """The row that the reader of a stream would read next; None where it has read everything."""
        if not self.is_stream:
            return None
        try:
            row = self.cursor.ready[0]
        except IndexError:  # no check before: readers on other threads take rows meanwhile
            return None
        return row, row.text_offset, row.token_offset

    @property
    def state(self) -> str:
        """One word for people."""
        if self.is_left:
            return "left"
        return "failed" if self.error is not None else "running" if self.num_open else "finished"

    def mark_left(self, cursor: Cursor) -> None:
        """Its reader has left. From any thread, without the lock: the engine acts on it a moment later."""
        cursor.is_closed = self.is_left = True

    @property
    def has_unread(self) -> bool:
        """Whether its reader has something to take."""
        return bool(self.cursor.ready) or (bool(self.results) and self.error is None and not self.is_left)

    def free_logprobs(self, num_bytes: int | None = None) -> None:
        """Give back memory reserved for logprobs; None: all of it."""
        if self.counter is not None:
            freed = self.num_logprob_bytes if num_bytes is None else min(num_bytes, self.num_logprob_bytes)
            self.num_logprob_bytes -= freed
            self.counter.num_logprob_bytes -= freed

    def add_row(self, position: int, facts: RowFacts) -> RowStream:
        row = self.live[position] = RowStream(self, position, facts)
        self.num_held += 1
        return row

    def accept(self) -> None:
        """Rows are on their way, unless that failed."""
        if not self.is_accepted and self.error is None:
            self.is_accepted = True
            if self.is_stream:
                self.cursor.wake()

    def note_compiled(self, row: RowStream) -> None:
        """The grammar of a row is compiled, or the row has ended before."""
        self.compiling.discard(row.position)
        if not self.compiling:
            self.accept()

    def end_row(self, row: RowStream, finished: End, delivered_at: float, error: RowError | None = None) -> None:
        """The row has its end; ``error`` is what the frontend itself found wrong with it.

        A row that failed is the end of the whole call, unless exceptions are to be returned in place.
        """
        if self.live.pop(row.position, None) is None:
            return  # the call was settled already
        row.finished = finished
        row.delivered_at = delivered_at
        row.error = answers.error(finished) if error is None else error
        self.num_open -= 1
        if row.error is not None and not self.returns_exceptions:
            self.fail(row.error)
        elif self.is_stream:
            row.put("", [])
            self.cursor.wake()
            if self.compiling:
                self.note_compiled(row)
        else:
            self.num_held -= 1
            self.results[row.position] = row.error or self.answer_of(row)
            if self.num_open == 0:
                self.cursor.wake()

    def answer_of(self, row: RowStream) -> Answer:
        """The whole answer of a row that has one."""
        return row.answer()

    def arranged(self) -> list[Answer | BaseException | None]:
        """The results of all rows, as the caller gets them."""
        return self.results

    def fail(self, error: BaseException) -> None:
        """End the call with an error; chunks that are ready are read first."""
        if self.error is None:
            self.error = error
            self.cursor.wake()
