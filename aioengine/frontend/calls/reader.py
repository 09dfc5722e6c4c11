"""Reader: the caller's side of a call. ``outputs`` has the engine's side, and the table of its states."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

from aioengine.api.answers import Answer, BatchOutput
from aioengine.errors import RequestError
from aioengine.frontend.calls.outputs import EndOfOutput, Wants, resolve

if TYPE_CHECKING:
    import asyncio
    import threading
    from collections.abc import Callable

    from aioengine.api.answers import Chunk
    from aioengine.frontend.calls.outputs import Cursor, ReaderActions


class Reader:
    """Reads the output of a call. From any thread. It never blocks: ``wait`` registers a callback for new output.

    When its last reference is dropped, the call is left.
    """

    __slots__ = ("_actions", "_cursor", "_lock", "_output", "_result", "ready")

    def __init__(self, cursor: Cursor, *, lock: threading.RLock, actions: ReaderActions) -> None:
        self._actions = actions
        self._cursor = cursor
        self._output = cursor.output
        self._lock = lock
        self.ready = cursor.ready
        """Rows with unread output. If there are any, ``take`` returns a chunk, unless another thread was faster."""
        self._result: Answer | BatchOutput | None = None

    def __del__(self) -> None:
        try:
            if self._can_be_left or (self._output.num_logprob_bytes and not self._cursor.is_closed):
                self._actions.leave_later(self._cursor)
        except AttributeError:  # the constructor was interrupted
            return

    @property
    def rid(self) -> str:
        return self._output.rid

    @property
    def is_stream(self) -> bool:
        return self._output.is_stream

    @property
    def state(self) -> str:
        """One word for people: "running", "finished", "failed" or "left"."""
        return "left" if self._cursor.is_closed else self._output.state

    def take(self) -> Chunk | None:
        """Return the next chunk of a stream; None: there is none yet.

        Raises:
            EndOfOutput: all output was read, or the stream was left.
            TypeError: this is not a stream.
        """
        output = self._output
        with self._lock:
            if self._cursor.is_closed:
                raise EndOfOutput
            if self.ready:
                chunk = self.ready.popleft().take()
                if output.wants and (output.wants is Wants.READS or chunk["meta_info"]["finish_reason"] is not None):
                    self._actions.on_read(output)
                return chunk
            if not output.is_stream:
                raise TypeError("this generation gives one whole answer: await it, or pass stream=True to iterate it")
            if output.error is not None:
                raise output.error.with_traceback(None)
            if output.num_open == 0:
                raise EndOfOutput
            return None

    def is_accepted(self) -> bool:
        """Whether a stream is accepted. If it failed before that, raise its error."""
        output = self._output
        with self._lock:
            if output.error is not None and not output.is_accepted:
                raise output.error.with_traceback(None)
            return self._is_accepted

    @property
    def _is_accepted(self) -> bool:
        """Whether ``await`` of a stream can return. Under the lock."""
        output = self._output
        return output.is_accepted or self._cursor.is_over or bool(self.ready and not output.compiling)

    def result(self) -> Answer | BatchOutput | None:
        """Return the whole answer, the same object each time; None: it is not complete yet.

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
            batch = BatchOutput(cast("list[Answer]", output.arranged()))
            output.results = []  # an output lives until the next garbage collection; it must not keep the answers
            output.free_logprobs()
            self._result = batch if output.is_batch else batch[0]
            return self._result

    def wait(self, wake: Callable[[], None], *, until_accepted: bool = False, blocks: bool = False) -> bool:
        """Call ``wake`` once, from the engine's thread, at the next change.

        Returns False, without calling ``wake``, if there is something to take already (with ``until_accepted``: if the
        call is accepted).
        """
        cursor = self._cursor
        self._actions.check_waiting(blocks=blocks)
        with self._lock:
            if self._is_accepted if until_accepted else cursor.ready or cursor.is_over:
                return False
            cursor.wakers.append(wake)
            return True

    def wait_here(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[Chunk | None] | None:
        """Return a future on the engine's loop. Its result is a chunk, or None after any other change.

        Returns None if there is something to take already. Takes no lock: the writer runs on the same loop.
        """
        cursor = self._cursor
        if cursor.ready or cursor.is_closed or self._output.is_over:
            return None
        waiter: asyncio.Future[Chunk | None] = loop.create_future()
        if cursor.waiter is None:
            cursor.waiter = waiter
        else:
            cursor.wakers.append(partial(resolve, waiter))
        return waiter

    def leave(self) -> None:
        """Stop reading: the engine ends the remaining rows. Does nothing after the end or a second time."""
        if self._can_be_left:
            self._actions.leave(self._cursor)

    def leave_later(self) -> None:
        """Like ``leave``, from a signal handler or finalizer."""
        if self._can_be_left:
            self._actions.leave_later(self._cursor)

    def leave_for(self, error: BaseException) -> None:
        """Leave because ``error`` was raised where the reader waited.

        GeneratorExit may come from garbage collection, which can run while a lock is held: ``leave_later`` takes none.
        """
        if isinstance(error, GeneratorExit):
            self.leave_later()
        else:
            self.leave()

    def leave_if_interrupted(self, error: BaseException) -> None:
        """Leave a stream whose ``take`` was interrupted by ``error``, which may have lost a chunk.

        The call's own error interrupts nothing.
        """
        output = self._output
        if output.is_stream and error is not output.error:
            self._actions.leave(self._cursor)

    @property
    def _can_be_left(self) -> bool:
        return not self._cursor.is_closed and (not self._output.is_over or bool(self.ready))

    def abort(self) -> None:
        """End the call with finish reason "abort". Existing output can still be read."""
        if not self._cursor.is_over:
            self._actions.abort(self._output)
