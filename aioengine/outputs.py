"""What a call has given so far, between the engine's loop, which writes, and one reader on any loop or thread.

Every row is a slot that merges: whatever was not read yet is one piece, so a slow reader costs no more than its text
and never slows the engine. All of it stands under one lock, the engine's, which a writer takes once for a whole frame;
nobody waits while holding it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol, cast

from aioengine import answers
from aioengine.answers import Answer, BatchOutput, Chunk, Piece
from aioengine.errors import RequestError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from aioengine.answers import RowError, RowFacts
    from aioengine.protocol.messages import Finished

MAX_UNJOINED_TEXTS = 64


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
        "delivered_at", "error", "facts", "finished", "is_queued", "num_chars", "num_ids", "output", "position",
        "texts", "token_ids", "uid",
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
        self.texts: list[str] = []
        self.token_ids: list[int] = []

    def put(self, text: str, token_ids: list[int]) -> None:
        """Add what is new and wake the reader of a stream. Under the lock, before the end."""
        if text:
            self.texts.append(text)
            if len(self.texts) > MAX_UNJOINED_TEXTS:
                self.texts = ["".join(self.texts)]
        if self.token_ids:
            self.token_ids += token_ids
        else:
            self.token_ids = token_ids
        if not self.is_queued and self.output.is_stream:
            self.output.queue(self)

    def take(self) -> Piece:
        """Everything unread as one piece. Under the lock."""
        texts, token_ids = self.texts, self.token_ids
        text = texts[0] if len(texts) == 1 else "".join(texts)
        piece = Piece(text, token_ids, self.num_chars, self.num_ids, self.finished, self.delivered_at)
        self.num_chars += len(text)
        self.num_ids += len(token_ids)
        self.texts, self.token_ids = [], []
        self.is_queued = False
        return piece


class CallOutput:
    """All rows of one call; the engine's side of it. Every method under the lock.

    Attributes:
        live: rows that were begun and have no end yet. num_open: rows without an end, begun or not.
        num_held: rows begun whose end was not read yet (what bounds the feeding of a batch).
        error: what the whole call ended with. is_left: nobody reads any more.
        is_begun: its first rows are on their way. wants_feed: rows wait for ``num_held`` to fall.
        results: answers (or exceptions) by position, where the call is no stream.
    """

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
        self.wakers: list[Callable[[], None]] = []

    @property
    def is_over(self) -> bool:
        """Whether the engine has nothing more to give."""
        return self.num_open == 0 or self.error is not None or self.is_left

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

    def queue(self, row: RowStream) -> None:
        """The row has something to read."""
        row.is_queued = True
        self.ready.append(row)
        if self.wakers:
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
            if not row.is_queued:
                self.queue(row)
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
        wakers, self.wakers = self.wakers, []
        for wake in wakers:
            wake()


class Reader:
    """The reading side of a ``CallOutput``. Works from any thread and never waits; ``wait`` says when to come again."""

    __slots__ = ("_calls", "_lock", "_output", "_result")

    def __init__(self, output: CallOutput, *, lock: threading.Lock, calls: Calls) -> None:
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

    def take(self) -> Chunk | None:
        """The next chunk of a stream, or None where none is there yet.

        Raises:
            EndOfOutput: all was read, or the stream was left.
        """
        output = self._output
        with self._lock:
            if output.is_left:
                raise EndOfOutput
            if output.ready:
                row = output.ready.popleft()
                piece = row.take()
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
            return output.is_begun or output.is_over

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
