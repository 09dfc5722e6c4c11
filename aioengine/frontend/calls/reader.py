"""Reader: the caller's side of a call. ``call`` has the engine's side, and the table of its states."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol, cast

from aioengine.api.answers import Answer, BatchOutput, Chunk, ranked
from aioengine.errors import RequestError
from aioengine.frontend.calls.call import Call, CallRow, NotifyOn
from aioengine.supervision.tasks import resolve

NOT_A_STREAM: Final = "this generation returns one whole answer: await it, or pass stream=True to iterate it"


class EndOfOutput(Exception):  # not an error: the reader has everything
    """Nothing more will come."""


class ReaderActions(Protocol):
    """The requests of a reader to the engine. From any thread; no method waits, and all may be repeated.

    Signal handlers and finalizers may call them too: the engine's loop does the work later. ``ready`` identifies the
    reader: it is its own ``Reader.ready``.
    """

    def leave(self, call: Call, ready: deque[CallRow], *, later: bool = False) -> None:
        """Stop reading: end the rows without an error, unless another reader may attach to the call.

        ``later``: in a later iteration of the engine's loop, because a finalizer may run anywhere.
        """
        ...

    def abort(self, call: Call) -> None:
        """End the rows with reason "abort". Existing output can still be read."""
        ...

    def check_can_wait(self, *, blocks: bool) -> None:
        """Raise if the engine could never wake this thread. ``blocks``: this thread will block until then."""
        ...

    def on_read(self, call: Call) -> None:
        """Start more rows of a batch, or resume suspended ones (``NotifyOn``), because the reader has read."""
        ...


class Reader:
    """Reads the output of a call. From any thread. It never blocks: ``wait`` registers a callback for new output.

    When its last reference is dropped, the call is left.
    """

    __slots__ = ("_actions", "_has_left", "_lock", "_result", "call", "ready")

    def __init__(self, call: Call, ready: deque[CallRow], *, lock: threading.RLock, actions: ReaderActions) -> None:
        self._actions = actions
        self._lock = lock
        self._has_left = False
        self._result: Answer | BatchOutput | None = None
        self.call = call
        self.ready = ready
        """Rows with unread output. If there are any, ``take`` returns a chunk, unless another thread was faster."""

    def __del__(self) -> None:
        try:
            # An answer with logprobs that was not read keeps memory reserved until it is left.
            call = self.call
            if not self._is_closed and (not call.is_over or self.ready or call.reservation.num_logprob_bytes):
                self._actions.leave(call, self.ready, later=True)
        except AttributeError:  # the constructor was interrupted
            return

    @property
    def state(self) -> str:
        """One word for people: "running", "finished", "failed" or "left"."""
        return "left" if self._is_closed else self.call.state

    @property
    def _is_closed(self) -> bool:
        """Whether it has left, or another reader has attached."""
        return self._has_left or self.ready is not self.call.ready

    def take(self) -> Chunk | None:
        """Return the next chunk of a stream; None: there is none yet.

        Raises:
            EndOfOutput: all output was read, or the stream was left.
            TypeError: this is not a stream.
        """
        call, ready = self.call, self.ready
        with self._lock:
            if self._has_left or ready is not call.ready:
                raise EndOfOutput
            if ready:
                chunk = ready.popleft().take()
                if call.notify_on and (
                    call.notify_on is NotifyOn.EACH_READ or chunk["meta_info"]["finish_reason"] is not None
                ):
                    self._actions.on_read(call)
                return chunk
            if not call.is_stream:
                raise TypeError(NOT_A_STREAM)
            if call.error is not None:
                raise call.error.with_traceback(None)
            if call.num_open == 0 or call.is_left:
                raise EndOfOutput
            return None

    def is_accepted(self) -> bool:
        """Whether ``await`` of a stream can return. If the call failed before it was accepted, raise its error."""
        call = self.call
        with self._lock:
            if call.error is not None and not call.is_accepted:
                raise call.error.with_traceback(None)
            return self._await_can_return

    @property
    def _await_can_return(self) -> bool:
        """Whether the stream is accepted, has output, or gets no more output. Under the lock."""
        call = self.call
        return call.is_accepted or self._is_closed or call.is_over or bool(self.ready and not call.compiling)

    def result(self) -> Answer | BatchOutput | None:
        """Return the whole answer, the same object each time; None: it is not complete yet.

        Raises:
            RequestError: the call was left before its end.
        """
        call = self.call
        with self._lock:
            if self._result is not None:
                return self._result
            if call.error is not None:
                raise call.error.with_traceback(None)
            if call.is_left:
                raise RequestError("deliver", f"the generation {call.rid!r} was closed or cancelled before its end")
            if call.num_open:
                return None
            results, pooled = call.results, call.request.pooled
            if pooled is not None and pooled.is_ranked:
                results = ranked(results, pooled.top_n)
            batch = BatchOutput(cast("list[Answer]", results))
            call.results = []
            call.reservation.free_logprobs()
            self._result = batch if call.request.gives_batch else batch[0]
            return self._result

    def wait(self, wake: Callable[[], object], *, until_accepted: bool = False, blocks: bool = False) -> bool:
        """Call ``wake`` once, from the engine's thread, at the next change.

        Returns False, without calling ``wake``, if there is something to take already (with ``until_accepted``: if the
        call is accepted).
        """
        call = self.call
        self._actions.check_can_wait(blocks=blocks)
        with self._lock:
            has_news = bool(self.ready) or self._is_closed or call.is_over
            is_ready = self._await_can_return if until_accepted else has_news
            if is_ready:
                return False
            call.wakers += (wake,)
            return True

    def wait_here(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[Chunk | None] | None:
        """Return a future on the engine's loop. Its result is a chunk, or None after any other change.

        Returns None if there is something to take already. Takes no lock: the writer runs on the same loop.
        """
        call, ready = self.call, self.ready
        if ready or self._has_left or ready is not call.ready or call.is_over:
            return None
        waiter: asyncio.Future[Chunk | None] = loop.create_future()
        if call.waiter is None:
            call.waiter = waiter
        else:
            call.wakers += (partial(resolve, waiter),)
        return waiter

    def leave(self, error: BaseException | None = None, *, later: bool = False) -> None:
        """Stop reading: the engine ends the remaining rows. Does nothing after the end or a second time.

        ``error``: the exception that ended a wait. GeneratorExit may come from garbage collection.
        """
        if self._can_be_left:
            self._actions.leave(self.call, self.ready, later=later or isinstance(error, GeneratorExit))
            self._has_left = True

    def leave_if_interrupted(self, error: BaseException) -> None:
        """Leave a stream after an exception in ``take``, because a chunk may be lost.

        If ``error`` is the error of the call, do nothing.
        """
        if self.call.is_stream and error is not self.call.error:
            self._actions.leave(self.call, self.ready)
            self._has_left = True

    @property
    def _can_be_left(self) -> bool:
        return not self._is_closed and (not self.call.is_over or bool(self.ready))

    def abort(self) -> None:
        """End the call with finish reason "abort". Existing output can still be read."""
        if not self._is_closed and not self.call.is_over:
            self._actions.abort(self.call)
