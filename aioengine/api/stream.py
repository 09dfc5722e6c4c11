"""Generation: the result of ``async_generate``, to be awaited or iterated."""

from __future__ import annotations

import asyncio
from asyncio import get_running_loop
from collections.abc import Coroutine, Generator
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self, TypeVar, cast

from aioengine.api.answers import Chunk
from aioengine.errors import WrongLoopError
from aioengine.frontend.callers import running_loop
from aioengine.frontend.calls.reader import NOT_A_STREAM, EndOfOutput, Reader
from aioengine.supervision.tasks import post, resolve

Result = TypeVar("Result", covariant=True)

_NOT_AWAITED: Final = "this generation was not awaited: write `await` before the call"


class Generation(Coroutine[object, None, Result]):
    """One call to the engine, which started when this object was created.

    Await it to get the whole answer: a dict, or a ``BatchOutput`` for batches and ``n`` > 1. Awaiting again returns the
    same object. With ``stream=True``, iterate over the chunks with ``async for`` or ``anext()``; ``await`` then returns
    the stream as soon as the engine has accepted the request. Chunks are not kept: a second ``async for`` continues
    after the last chunk that was read. It is also a coroutine, for ``asyncio.create_task``, ``gather``, ``wait_for``
    and ``asyncio.run``.

    Leaving early aborts the request and frees its memory. You leave by ``aclose()``, at the end of ``async with``, by
    cancelling the waiting task, or by dropping the last reference. (A ``break`` drops it unless your program keeps the
    stream; a kept stream stays open.) To end the request from another task and keep its output, call ``abort()``.
    """

    __slots__ = ("__weakref__", "_drivers", "_home", "_is_bound", "_owner", "_reader")

    def __init__(self, reader: Reader, *, home: asyncio.AbstractEventLoop, is_bound: bool, owner: object) -> None:
        """``home``: the engine's loop. ``is_bound``: only that loop may use this. ``owner``: the engine, kept alive."""
        self._reader = reader
        self._home = home
        self._is_bound = is_bound
        self._owner = owner
        self._drivers: dict[asyncio.Task[object] | None, Generator[object, None, Result]] = {}

    def __reduce__(self) -> NoReturn:
        raise TypeError("a request cannot be copied or pickled: it belongs to its engine; copy its answer or chunks")

    @property
    def rid(self) -> str:
        """The id of the call: the caller's, or a random one."""
        return self._reader.call.rid

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.rid!r} {self._reader.state}>"

    def abort(self) -> None:
        """End the request with reason ``abort`` and the output so far. Does nothing after the end."""
        self._reader.abort()

    async def aclose(self) -> None:
        """Stop reading; this aborts an unfinished request. Does not wait; may be called after the end."""
        self._reader.leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._reader.leave()

    if not TYPE_CHECKING:  # type checkers know that neither exists

        def __iter__(self) -> NoReturn:
            if self._reader.call.is_stream:
                raise TypeError("read this stream with `async for`, or use Engine.generate(stream=True)")
            raise TypeError(f"{_NOT_AWAITED}, then read it")

        def __getitem__(self, key: object) -> NoReturn:
            if self._reader.call.is_stream:
                raise TypeError("a stream has no items; read its chunks with `async for`")
            raise TypeError(f"{_NOT_AWAITED}, then [{key!r}] works on its result")

    # ------------------------------------------------------------ async for

    def __aiter__(self) -> Self:
        """Return the stream itself. Another ``async for`` yields the unread chunks.

        Raises:
            TypeError: without ``stream=True``.
        """
        if not self._reader.call.is_stream:
            raise TypeError(NOT_A_STREAM)
        return self

    async def __anext__(self) -> Chunk:
        """Return the next chunk: all output since the last chunk.

        Raises:
            WrongLoopError: the ``AsyncEngine`` runs on another loop.
            EngineError, ValueError: the request failed, or its prompt was refused.
        """
        reader = self._reader
        while True:
            if not reader.ready:
                try:
                    loop = get_running_loop()
                except RuntimeError:
                    loop = self._loop()  # raises the named error
                waiter = reader.wait_here(loop) if loop is self._home else self._waiter(loop)
                if waiter is not None:
                    try:
                        chunk = await waiter
                    except BaseException as error:
                        reader.leave(error)
                        raise
                    if chunk is not None:
                        return chunk
            try:
                chunk = reader.take()
            except EndOfOutput:
                raise StopAsyncIteration from None
            except BaseException as error:
                reader.leave_if_interrupted(error)
                raise
            if chunk is not None:
                return chunk

    # ------------------------------------------------------------ await

    def __await__(self) -> Generator[object, None, Result]:
        return self._outcome().__await__()

    async def _outcome(self) -> Result:
        if self._reader.call.is_stream:
            while not self._reader.is_accepted():
                await self._changed(until_accepted=True)
            return cast("Result", self)
        while (result := self._reader.result()) is None:
            await self._changed()
        return cast("Result", result)

    async def _changed(self, *, until_accepted: bool = False) -> None:
        """Wait until there may be new output. If this wait is cancelled, the reader leaves the call."""
        loop = self._loop()
        is_here = loop is self._home and not until_accepted
        waiter = self._reader.wait_here(loop) if is_here else self._waiter(loop, until_accepted=until_accepted)
        if waiter is None:
            return
        try:
            await waiter
        except BaseException as error:
            self._reader.leave(error)
            raise

    def _loop(self) -> asyncio.AbstractEventLoop:
        """Return the running loop. If there is none, nothing can await this, so the call of an ``Engine`` is left."""
        try:
            return running_loop()
        except WrongLoopError:
            if not self._is_bound:
                self._reader.leave()
            raise

    def _waiter(
        self, loop: asyncio.AbstractEventLoop, *, until_accepted: bool = False
    ) -> asyncio.Future[Chunk | None] | None:
        """Return a future that resolves when there may be new output; None: there is output already."""
        if self._is_bound and loop is not self._home:
            raise WrongLoopError("this is not the loop of the AsyncEngine; use Engine to call from several loops")
        future: asyncio.Future[Chunk | None] = loop.create_future()
        wake = partial(resolve, future) if loop is self._home else partial(post, loop, resolve, future)
        return future if self._reader.wait(wake, until_accepted=until_accepted) else None

    # ------------------------------------------------------------ the coroutine protocol, one driver for each task

    def send(self, value: None) -> object:
        driver = self._driver()
        try:
            return driver.send(value)
        except BaseException:
            self._forget_driver()
            raise

    def throw(self, *error: Any) -> object:
        driver = self._driver()
        try:
            return driver.throw(*error)
        except StopIteration:
            self._forget_driver()
            raise
        except BaseException as thrown:  # before the first step, no wait has begun that could leave the reader
            self._forget_driver()
            self._reader.leave(thrown)
            raise

    def close(self) -> None:
        for driver in self._drivers.values():
            driver.close()
        self._drivers.clear()
        self._reader.leave(later=True)

    def _driver(self) -> Generator[object, None, Result]:
        task = asyncio.current_task(self._loop())
        driver = self._drivers.get(task)
        if driver is None:
            driver = self._drivers[task] = self.__await__()
        return driver

    def _forget_driver(self) -> None:
        self._drivers.pop(asyncio.current_task(), None)


class Stream(Generation["Stream"]):
    """A ``Generation`` with ``stream=True``. Awaiting it returns the stream itself."""

    __slots__ = ()
