"""What a call has given so far, between the engine's loop, which writes, and one reader on any loop or thread.

Every row is a slot that merges: whatever was not read yet is one piece, so a slow reader costs no more than its text
and never slows the engine. All of it stands under one lock, the engine's, which a writer takes once for a whole frame;
nobody waits while holding it.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

from aioengine import answers
from aioengine.answers import Answer, BatchOutput, Chunk, Piece
from aioengine.errors import RequestError

if TYPE_CHECKING:
    import asyncio
    import threading
    from collections.abc import Callable

    from aioengine.answers import RowError, RowFacts
    from aioengine.protocol.messages import Finished

MAX_UNJOINED_TEXTS = 64
_NO_IDS: list[int] = []
"""Stands for an empty list and is never added to."""


def resolve(waiter: asyncio.Future[None]) -> None:
    """Wake who waits, unless it was cancelled meanwhile."""
    if not waiter.done():
        waiter.set_result(None)


class EndOfOutput(Exception):  # not an error: the reader has everything
    """Nothing more will come."""


class Calls(Protocol):
    """What a reader may ask of the engine, from any thread. Nothing here waits, everything may be done twice."""

    def leave(self, output: CallOutput) -> None:
        """Nobody will read the rest: end its rows silently."""
        ...

    def drop(self, output: CallOutput) -> None:
        """Like ``leave``, for finalizers: takes no lock, acts a moment later."""
        ...

    def abort(self, output: CallOutput) -> None:
        """End its rows; the reader gets what there is, with the reason."""
        ...

    def feed(self, output: CallOutput) -> None:
        """There is room for more of its rows."""
        ...


class RowStream:
    """One row of a call: the piece of it that was not read yet.

    Attributes:
        position: its place in the call. uid: the engine's number of it, -1 before it was submitted.
        finished: its end, once that came; ``error`` where it has no answer.
    """

    __slots__ = (
        "delivered_at", "error", "facts", "finished", "is_queued", "more_texts", "num_chars", "num_ids", "output",
        "position", "text", "token_ids", "uid",
    )  # fmt: skip

    def __init__(self, output: CallOutput, position: int, facts: RowFacts) -> None:
        self.output = output
        self.position = position
        self.facts = facts
        self.uid = -1
        self.finished: Finished | None = None
        self.error: RowError | None = None
        self.delivered_at = 0.0
        self.is_queued = False
        self.num_chars = 0
        self.num_ids = 0
        self.text = ""
        self.more_texts: list[str] = []
        self.token_ids = _NO_IDS

    def put(self, text: str, token_ids: list[int]) -> None:
        """Add what is new and wake the reader of a stream. Under the lock, before the end."""
        if self.token_ids:
            self.token_ids += token_ids
        else:
            self.token_ids = token_ids
        if not self.text:
            self.text = text
        elif text:
            self.more_texts.append(text)
            if len(self.more_texts) == MAX_UNJOINED_TEXTS:
                self.more_texts = ["".join(self.more_texts)]
        if not self.is_queued:
            output = self.output
            if output.is_stream:
                self.is_queued = True
                output.ready.append(self)
                if output.waiter is not None or output.wakers:
                    output.wake()

    def take(self) -> Piece:
        """Everything unread as one piece. Under the lock."""
        text, token_ids = self.text, self.token_ids
        if self.more_texts:
            text += "".join(self.more_texts)
            self.more_texts = []
        piece = Piece(text, token_ids, self.num_chars, self.num_ids, self.finished, self.delivered_at)
        self.num_chars += len(text)
        self.num_ids += len(token_ids)
        self.text, self.token_ids = "", _NO_IDS
        self.is_queued = False
        return piece


class CallOutput:
    """All rows of one call; the engine's side of it. Every method under the lock.

    Attributes:
        live: rows that were begun and have no end yet. num_open: rows without an end, begun or not.
        num_held: rows begun whose end was not read yet (what bounds the feeding of a batch).
        error: what the whole call ended with. is_left: nobody reads any more.
        is_begun: its first rows are on their way. wants_feed: rows wait for ``num_held`` to fall.
        waiter, wakers: readers that wait, one on the engine's own loop, others elsewhere.
        results: answers (or exceptions) by position, where the call is no stream.
    """

    __slots__ = (
        "error", "is_batch", "is_begun", "is_left", "is_stream", "live", "num_held", "num_open", "ready",
        "results", "returns_exceptions", "rid", "waiter", "wakers", "wants_feed",
    )  # fmt: skip

    def __init__(self, rid: str, num_rows: int, *, is_stream: bool, is_batch: bool, returns_exceptions: bool) -> None:
        self.rid = rid
        self.is_stream = is_stream
        self.is_batch = is_batch
        self.returns_exceptions = returns_exceptions
        self.live: dict[int, RowStream] = {}
        self.num_open = num_rows
        self.num_held = 0
        self.is_begun = False
        self.is_left = False
        self.wants_feed = False
        self.error: BaseException | None = None
        self.ready: deque[RowStream] = deque()
        self.results: list[Answer | BaseException | None] = [] if is_stream else [None] * num_rows
        self.waiter: asyncio.Future[None] | None = None
        self.wakers: list[Callable[[], None]] = []

    @property
    def is_over(self) -> bool:
        """Whether the engine has nothing more to give."""
        return self.num_open == 0 or self.error is not None or self.is_left

    @property
    def state(self) -> str:
        """One word for people."""
        if self.is_left:
            return "left"
        return "failed" if self.error is not None else "running" if self.num_open else "finished"

    def add_row(self, position: int, facts: RowFacts) -> RowStream:
        row = self.live[position] = RowStream(self, position, facts)
        self.num_held += 1
        return row

    def begin(self) -> None:
        """Rows are on their way, unless that failed."""
        if not self.is_begun and self.error is None:
            self.is_begun = True
            if self.is_stream:
                self.wake()

    def end_row(self, row: RowStream, finished: Finished, delivered_at: float, error: RowError | None = None) -> None:
        """The row has its end; ``error`` is what the frontend itself found wrong with it.

        A row that failed is the end of the whole call, unless exceptions are to be returned in place.
        """
        row.finished = finished
        row.delivered_at = delivered_at
        row.error = answers.error(finished) if error is None else error
        self.num_open -= 1
        del self.live[row.position]
        if row.error is not None and not self.returns_exceptions:
            self.fail(row.error)
        elif self.is_stream:
            row.put("", [])
        else:
            self.num_held -= 1
            self.results[row.position] = row.error or answers.answer(row.facts, row.take())
            if self.num_open == 0:
                self.wake()

    def fail(self, error: BaseException) -> None:
        """The call ends with an error, behind what is ready to be read."""
        if self.error is None:
            self.error = error
            self.wake()

    def wake(self) -> None:
        """Wake every reader that waits: the one on the engine's loop, and those elsewhere."""
        waiter = self.waiter
        if waiter is not None:
            self.waiter = None
            if not waiter.done():
                waiter.set_result(None)
        if self.wakers:
            wakers, self.wakers = self.wakers, []
            for wake in wakers:
                wake()


class Reader:
    """The reading side of a ``CallOutput``. Works from any thread and never waits; ``wait`` says when to come again."""

    __slots__ = ("_calls", "_lock", "_output", "_result", "ready")

    def __init__(self, output: CallOutput, *, lock: threading.Lock, calls: Calls) -> None:
        self.ready = output.ready
        """Rows that have something to read; true where ``take`` will give a chunk to an only reader."""
        self._output = output
        self._lock = lock
        self._calls = calls
        self._result: Answer | BatchOutput | None = None

    @property
    def rid(self) -> str:
        return self._output.rid

    @property
    def is_stream(self) -> bool:
        return self._output.is_stream

    @property
    def state(self) -> str:
        """One word for people: "running", "finished", "failed" or "left"."""
        return self._output.state

    def take(self) -> Chunk | None:
        """The next chunk of a stream, or None where none is there yet.

        Raises:
            EndOfOutput: all was read, or the stream was left.
            TypeError: this is no stream.
        """
        output = self._output
        with self._lock:
            if output.is_left:
                raise EndOfOutput
            if output.ready:
                row = output.ready.popleft()
                piece = row.take()
            elif not output.is_stream:
                raise TypeError("this generation gives one whole answer: await it, or pass stream=True to iterate it")
            elif output.error is not None:
                raise output.error.with_traceback(None)
            elif output.num_open == 0:
                raise EndOfOutput
            else:
                return None
            if piece.finished is not None:
                output.num_held -= 1
                if output.wants_feed:
                    self._calls.feed(output)
        return answers.chunk(row.facts, piece)

    def begun(self) -> bool:
        """Whether a stream is on its way; raises what went wrong before it was."""
        output = self._output
        with self._lock:
            if output.error is not None and not output.is_begun:
                raise output.error.with_traceback(None)
            return output.is_begun or output.is_over or bool(output.ready)

    def result(self) -> Answer | BatchOutput | None:
        """The whole answer, the same one each time, or None where it is not there yet.

        Raises:
            RequestError: the call was left before its end.
        """
        output = self._output
        with self._lock:
            if self._result is not None:
                return self._result
            if output.error is not None:
                raise output.error.with_traceback(None)
            if output.is_left:
                raise RequestError("deliver", f"the generation {output.rid!r} was closed or cancelled before its end")
            if output.num_open:
                return None
        # What was there is complete and nobody writes any more.
        batch = BatchOutput(cast("list[Answer]", output.results))
        self._result = batch if output.is_batch else batch[0]
        return self._result

    def wait(self, wake: Callable[[], None], *, for_begin: bool = False) -> bool:
        """Have ``wake`` called, once and from the engine's thread, when something changes.

        False, and no call, where there is something to take already (or where the call is on its way, ``for_begin``).
        """
        output = self._output
        with self._lock:
            if output.ready or output.is_over or (for_begin and output.is_begun):
                return False
            output.wakers.append(wake)
            return True

    def wait_here(self, waiter: asyncio.Future[None], *, for_begin: bool = False) -> bool:
        """As ``wait``, for a future of the engine's own loop."""
        output = self._output
        with self._lock:
            if output.ready or output.is_over or (for_begin and output.is_begun):
                return False
            if output.waiter is None:
                output.waiter = waiter
            else:
                output.wakers.append(partial(resolve, waiter))
            return True

    def leave(self) -> None:
        """Nobody will read the rest. Harmless after the end, and twice."""
        if not self._output.is_over or (self._output.ready and not self._output.is_left):
            self._calls.leave(self._output)

    def drop(self) -> None:
        """Like ``leave``, from a finalizer."""
        if not self._output.is_over:
            self._calls.drop(self._output)

    def abort(self) -> None:
        """End the call; what there is can still be read, with the reason."""
        if not self._output.is_over:
            self._calls.abort(self._output)
