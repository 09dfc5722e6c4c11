"""Jobs: many items through one engine, with a bounded number of them in flight.

``Job`` runs on the engine's loop, with one task per item. ``AsyncAnswerIterator`` and ``AnswerIterator`` read the
items, start them, and return their rows. They read an item only if the job has capacity for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NotRequired, Self, TypedDict, TypeVar, cast

from aioengine.api.answers import Answer, FinishReason
from aioengine.api.journal import Journal, as_json
from aioengine.errors import EngineError, EngineOverloadedError, RequestError
from aioengine.frontend.progress import RowBar
from aioengine.supervision.tasks import post

Result = TypeVar("Result")

ITEMS_AT_ONCE: Final = 256
"""Items that are started in one iteration of the loop. Without a limit, a large window, or items with rows in the
journal, would block the loop."""


class RowFailure(TypedDict):
    """Why a row has no answer: the name of the exception's class, its message, and its HTTP status."""

    type: str
    message: str
    status_code: int


class JobRow(Answer):
    """The answer for one item of a job. ``index``: the number of the item, from 0.

    error: why the item has no answer. The row then has only ``index`` and ``error``.
    """

    index: int
    error: NotRequired[RowFailure]


ROW_ERRORS: Final = (ValueError, TypeError, RequestError, EngineOverloadedError)
"""Exceptions of one item. Any other exception ends the job."""

Row = Mapping[str, object]
Item = str | list[int] | tuple[int, ...] | Mapping[str, object]
"""A prompt, its token ids, or a dict of keyword arguments of ``generate`` (of ``chat``, if it has ``messages``)."""


@dataclass(eq=False)
class Job:
    """The items in flight, and their rows. On the engine's loop, except ``num_free``.

    Attributes:
        answer: returns the row of an item; its exception is raised in place of the row, which ends the job.
        window: maximum number of items that were started and whose rows were not taken.
        is_ordered: the rows are taken in the order of their items, not of their ends.
        returns_done: rows in the journal are taken, too.
        num_items: number of items that were started.
        is_left: the items in flight were aborted, and no more may start.
        changed: set when a row has ended.
    """

    answer: Callable[[int, Any], Coroutine[object, object, Row]]
    bar: RowBar
    window: int
    is_ordered: bool = False
    open_journal: Callable[[], Journal] | None = None
    returns_done: bool = True
    num_items: int = 0
    is_left: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _journal: Journal | None = None
    _tasks: dict[int, asyncio.Task[Row]] = field(default_factory=dict[int, asyncio.Task[Row]])
    _rows: dict[int, Row | BaseException] = field(default_factory=dict[int, Row | BaseException])
    _num_taken: int = 0

    @property
    def num_free(self) -> int:
        """Number of items that may be started now."""
        return 0 if self.is_left else self.window - len(self._tasks) - len(self._rows)

    @property
    def is_idle(self) -> bool:
        return not self._tasks and not self._rows

    async def open(self) -> None:
        """Open the journal, which reads all its rows."""
        if self.open_journal is not None:
            await asyncio.sleep(0)  # a dropped job closes its journal in an iteration of the loop
            self._journal = await asyncio.to_thread(self.open_journal)

    async def start(self, item: object) -> None:
        """Start the next item, or take its row from the journal. Other tasks run after each ``ITEMS_AT_ONCE`` items.

        Raises:
            TypeError, ValueError: the item does not belong to the journal.
        """
        index = self.num_items
        self.num_items += 1
        if self.num_items % ITEMS_AT_ONCE == 0:
            await asyncio.sleep(0)
        if self.is_left:
            return
        if self._journal is not None:
            self._journal.record_item(index, as_json(item, f"item {index}"))
            if self._journal.is_done(index):
                if self.returns_done:
                    self._rows[index] = _restored(self._journal.read(index))
                else:
                    self.bar.advance()
                return
        task = asyncio.get_running_loop().create_task(self.answer(index, item))
        self._tasks[index] = task
        task.add_done_callback(partial(self._end, index))

    def _end(self, index: int, task: asyncio.Task[Row]) -> None:
        row: Row | BaseException
        try:
            row = task.result()
            if index in self._tasks and self._journal is not None:
                self._journal.append(index, row)
        except BaseException as error:  # raised when its row is taken
            row = error
        if index in self._tasks:  # otherwise the job was left
            self._rows[index] = row
            del self._tasks[index]
        self.changed.set()

    def take(self) -> Row | None:
        """Return the next row; None: it has not ended. Raises the exception of its item."""
        index = self._num_taken if self.is_ordered else next(iter(self._rows), -1)
        row = self._rows.pop(index, None)
        if isinstance(row, BaseException):
            raise row
        if row is not None:
            self._num_taken += 1
            self.bar.advance()
        return row

    async def sync_if_due(self) -> None:
        """Write the journal to the disk if this was last done at least a second ago."""
        if self._journal is not None and not self.is_left and self._journal.is_sync_due:
            await asyncio.to_thread(self._journal.sync)

    async def wait(self) -> None:
        """Wait until a row has ended."""
        await self.sync_if_due()
        await self.changed.wait()
        self.changed.clear()

    async def finish(self) -> None:
        """Check the journal after the last row, and close it."""
        if self._journal is not None:
            self._journal.check_end(self.num_items)
            await asyncio.to_thread(self._journal.sync)
        self.leave()

    def leave(self) -> None:
        """Abort the items in flight, and close the journal."""
        self.is_left = True
        self.changed.set()
        tasks, self._tasks = self._tasks, {}
        for task in tasks.values():
            task.cancel()
        self._rows.clear()
        if self._journal is not None:
            self._journal.close()
        self.bar.close()


def _restored(row: dict[str, Any]) -> Row:
    """Return a row of the journal with the types of its first run."""
    if "meta_info" in row:
        row["meta_info"]["finish_reason"] = FinishReason(row["meta_info"]["finish_reason"])
    return row


class AsyncAnswerIterator(AsyncIterator[JobRow]):
    """The rows of a job, as they end or in the order of their items.

    Leaving it aborts the items in flight: ``aclose()``, the end of ``async with``, an exception while waiting, or
    dropping the last reference.
    """

    def __init__(self, items: Iterable[Any] | AsyncIterable[Any], job: Job) -> None:
        self._items = aiter(items) if isinstance(items, AsyncIterable) else iter(items)
        self._job = job
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reading: asyncio.Future[Any] | None = None
        self._is_exhausted = False
        self._is_closed = False

    async def __anext__(self) -> JobRow:
        if self._is_closed:
            raise StopAsyncIteration
        job = self._job
        try:
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
                await job.open()
            await job.sync_if_due()  # a slow reader never waits
            await self._read()
            while (row := job.take()) is None and not (job.is_left or (self._is_exhausted and job.is_idle)):
                await job.wait()
                await self._read()
            if row is not None:
                return cast("JobRow", row)
            if not job.is_left:
                await job.finish()
        except BaseException:
            await self.aclose()
            raise
        self._is_closed = True
        raise StopAsyncIteration

    async def _read(self) -> None:
        """Start as many items as the window allows. An async iterable may have none yet."""
        job = self._job
        while job.num_free > 0 and not self._is_exhausted:
            try:
                if isinstance(self._items, Iterator):
                    item = next(self._items)
                elif self._reading is None:
                    self._reading = asyncio.ensure_future(anext(self._items))
                    self._reading.add_done_callback(lambda _: job.changed.set())
                    await asyncio.sleep(0)  # many iterables have their next item at once
                    continue
                elif self._reading.done():
                    item, self._reading = self._reading.result(), None
                else:
                    return
            except (StopIteration, StopAsyncIteration):
                self._is_exhausted = True
                return
            await job.start(item)

    async def aclose(self) -> None:
        """Abort the items in flight. May be called after the end, and twice."""
        if not self._is_closed:
            self._is_closed = True
            _leave(self._job, self._reading)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._is_closed and self._loop is not None:
            post(self._loop, _leave, self._job, self._reading)


def _leave(job: Job, reading: asyncio.Future[Any] | None) -> None:
    if reading is not None:
        reading.cancel()
    job.leave()


class AnswerIterator(Iterator[JobRow]):
    """The rows of a job, as they end or in the order of their items.

    Leaving it aborts the items in flight: ``close()``, the end of ``with``, an exception, or dropping the last
    reference. It reads the items on the thread that reads it.
    """

    _is_closed = True  # for ``__del__``, if the constructor fails

    def __init__(
        self, items: Iterable[Item], job: Job, call: Callable[..., Any], loop: asyncio.AbstractEventLoop
    ) -> None:
        """``call``: runs a coroutine on the engine's ``loop``, and waits for its result."""
        self._items = iter(items)
        self._job = job
        self._call = call
        self._loop = loop
        self._is_exhausted = False
        call(job.open())
        self._is_closed = False

    def __next__(self) -> JobRow:
        if self._is_closed:
            raise StopIteration
        try:
            while not (self._is_closed or (self._is_exhausted and self._job.is_idle)):
                row = self._call(self._step(self._read()))
                if row is not None:
                    return cast("JobRow", row)
            if not self._is_closed:
                self._call(self._job.finish())
        except BaseException:
            self.close()
            raise
        self._is_closed = True
        raise StopIteration

    def _read(self) -> list[Item]:
        """Read as many items as the window allows."""
        items: list[Item] = []
        while len(items) < self._job.num_free:
            try:
                items.append(next(self._items))
            except StopIteration:
                self._is_exhausted = True
                break
        return items

    async def _step(self, items: list[Item]) -> Row | None:
        """Start items, and wait for the next row. Returns None if there is none."""
        for item in items:
            await self._job.start(item)
        await self._job.sync_if_due()
        while (row := self._job.take()) is None and not self._job.is_idle:
            await self._job.wait()
        return row

    def close(self) -> None:
        """Abort the items in flight. May be called after the end, and twice."""
        if not self._is_closed:
            self._is_closed = True
            if not post(self._loop, self._job.leave):
                self._job.leave()  # the engine was shut down

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def failure(error: Exception) -> RowFailure:
    """Return the error of a row as plain data."""
    message = str(error).encode(errors="backslashreplace").decode()  # lone surrogates cannot be written
    status_code = error.status_code if isinstance(error, EngineError) else 400
    return {"type": type(error).__name__, "message": message, "status_code": status_code}
