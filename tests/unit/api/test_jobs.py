"""A job without an engine: its window, the order of its rows, and its ends."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.api.jobs import ITEMS_AT_ONCE, AnswerIterator, AsyncAnswerIterator, Job, Row
from aioengine.api.journal import Journal
from aioengine.frontend.portal import Portal
from aioengine.frontend.progress import RowBar
from tests.kit.waiting import until


class Answers:
    """Answers items when the test calls it."""

    def __init__(self) -> None:
        self.waiting: dict[int, asyncio.Future[None]] = {}
        self.num_cancelled = 0
        self.num_read = 0

    def job(self, window: int, *, is_ordered: bool = False) -> Job:
        return Job(self.answer, RowBar(None, False), window=window, is_ordered=is_ordered)

    async def answer(self, index: int, item: object) -> Row:
        self.waiting[index] = asyncio.get_running_loop().create_future()
        try:
            await self.waiting[index]
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            del self.waiting[index]
        return {"index": index, "item": item}

    def items(self, num_items: int) -> Iterator[str]:
        for number in range(num_items):
            self.num_read += 1
            yield f"item {number}"

    async def async_items(self, num_items: int) -> AsyncIterator[str]:
        for item in self.items(num_items):
            await asyncio.sleep(0)
            yield item


@given(
    num_items=st.integers(0, 12),
    window=st.integers(1, 5),
    is_ordered=st.booleans(),
    is_async=st.booleans(),
    choices=st.lists(st.integers(0, 4), min_size=12, max_size=12),
)
def test_each_row_is_returned_once_and_the_window_limits_read_items(
    num_items: int, window: int, is_ordered: bool, is_async: bool, choices: list[int]
) -> None:
    async def main() -> None:
        answers = Answers()
        items = answers.async_items(num_items) if is_async else answers.items(num_items)
        rows: list[Any] = []
        ended: list[int] = []
        async with asyncio.timeout(30), AsyncAnswerIterator(items, answers.job(window, is_ordered=is_ordered)) as job:
            while len(rows) < num_items:
                reading = asyncio.ensure_future(anext(job))
                while not reading.done():
                    assert answers.num_read <= len(rows) + window
                    assert len(answers.waiting) <= window
                    if answers.waiting:  # end a random item in flight
                        index = sorted(answers.waiting)[choices[len(ended)] % len(answers.waiting)]
                        if not answers.waiting[index].done():
                            ended.append(index)
                            answers.waiting[index].set_result(None)
                    await asyncio.sleep(0)
                rows.append(reading.result())
            with pytest.raises(StopAsyncIteration):
                await anext(job)
        indices = [row["index"] for row in rows]
        assert indices == (list(range(num_items)) if is_ordered else ended)
        assert [row["item"] for row in rows] == [f"item {index}" for index in indices]

    asyncio.run(main())


class DueJournal:
    """A journal that is due to be written to the disk at any time."""

    is_sync_due = True
    num_syncs = 0

    def record_item(self, index: int, item: bytes) -> None:
        pass

    def is_done(self, index: int) -> bool:
        return False

    def append(self, index: int, row: Row) -> None:
        pass

    def sync(self) -> None:
        self.num_syncs += 1

    def close(self) -> None:
        pass


async def test_the_journal_of_a_slow_reader_is_written_at_each_row() -> None:
    """When the reader asks for a row, it has ended already."""
    answers, journal = Answers(), DueJournal()
    source = answers.job(4)
    source.open_journal = lambda: cast("Journal", journal)
    job = AsyncAnswerIterator(answers.items(3), source)
    reading = asyncio.ensure_future(anext(job))
    while len(answers.waiting) < 3:  # noqa: ASYNC110  # the number of turns is bounded
        await asyncio.sleep(0)
    for index in range(3):
        answers.waiting[index].set_result(None)
    await reading
    num_syncs = journal.num_syncs
    await anext(job)
    assert journal.num_syncs == num_syncs + 1
    await job.aclose()


async def test_other_tasks_run_while_a_large_window_is_filled() -> None:
    num_turns = 0

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count_turns())
    job = Answers().job(4 * ITEMS_AT_ONCE)
    for number in range(4 * ITEMS_AT_ONCE):
        await job.start(number)
    counting.cancel()
    job.leave()
    assert num_turns == 4


async def test_rows_do_not_wait_for_the_next_item() -> None:
    answers, is_asked = Answers(), asyncio.Event()

    async def items() -> AsyncIterator[str]:
        yield "first"
        is_asked.set()
        await asyncio.Event().wait()

    job = AsyncAnswerIterator(items(), answers.job(4))
    reading = asyncio.ensure_future(anext(job))
    await is_asked.wait()
    answers.waiting[0].set_result(None)
    assert (await asyncio.wait_for(reading, 30))["index"] == 0
    await job.aclose()


async def test_closing_ends_a_reader_that_waits_and_starts_no_more_items() -> None:
    answers = Answers()
    job = AsyncAnswerIterator(answers.items(10), answers.job(2))
    reading = asyncio.ensure_future(anext(job))
    await until(lambda: len(answers.waiting) == 2)
    await job.aclose()
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(reading, 30)
    assert (answers.num_read, answers.num_cancelled, len(answers.waiting)) == (2, 2, 0)


async def test_leaving_a_job_that_reads_its_checkpoint_closes_the_files(tmp_path: Path) -> None:
    path, reads, may_end = tmp_path / "rows.jsonl", threading.Event(), threading.Event()

    def open_journal() -> Journal:
        journal = Journal(path, {})
        reads.set()
        assert may_end.wait(60)
        return journal

    answers = Answers()
    job = Job(answers.answer, RowBar(None, False), window=1, open_journal=open_journal)
    reader = asyncio.ensure_future(anext(AsyncAnswerIterator([], job)))
    await asyncio.to_thread(reads.wait)
    reader.cancel()
    await asyncio.wait([reader])
    may_end.set()
    await until(lambda: can_open(path))


def can_open(path: Path) -> bool:
    """Return whether no other job has the file."""
    try:
        Journal(path, {}).close()
    except BlockingIOError:
        return False
    return True


def test_closing_ends_a_thread_that_waits_and_starts_no_more_items() -> None:
    answers = Answers()
    portal = Portal("test")
    portal.start()
    try:
        job = AnswerIterator(answers.items(10), answers.job(2), portal.call, portal.loop)

        async def close() -> None:
            await until(lambda: len(answers.waiting) == 2)
            job.close()

        closing = asyncio.run_coroutine_threadsafe(close(), portal.loop)
        assert list(job) == []
        closing.result(30)
        assert answers.num_read == 2
    finally:
        portal.close()


@pytest.mark.parametrize("way", ["aclose", "with", "cancel", "drop"])
async def test_leaving_cancels_items_in_flight_and_the_reading(way: str) -> None:
    answers, is_closed = Answers(), asyncio.Event()

    async def items() -> AsyncIterator[str]:
        try:
            for item in answers.items(3):
                yield item
            await asyncio.Event().wait()
        finally:
            is_closed.set()

    job = AsyncAnswerIterator(items(), answers.job(5))
    reading = asyncio.ensure_future(anext(job))
    await until(lambda: len(answers.waiting) == 3)
    answers.waiting[1].set_result(None)
    if way == "cancel":
        await asyncio.wait([reading])
        reading = asyncio.ensure_future(anext(job))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
    else:
        assert (await reading)["index"] == 1
        if way == "aclose":
            await job.aclose()
        elif way == "with":
            async with job:
                pass
        else:
            del job, reading
            gc.collect()
    await until(lambda: answers.num_cancelled == 2)
    await asyncio.wait_for(is_closed.wait(), 30)
    if way != "drop":
        with pytest.raises(StopAsyncIteration):
            await anext(job)


async def test_exceptions_of_the_items_and_of_answers_end_the_job() -> None:
    answers = Answers()

    def items() -> Iterator[str]:
        yield "first"
        raise LookupError("no more")

    job = AsyncAnswerIterator(items(), answers.job(2))
    with pytest.raises(LookupError, match="no more"):
        await anext(job)
    assert [row async for row in job] == []
    assert not answers.waiting

    async def answer(index: int, item: object) -> Row:
        raise OSError("the disk is full")

    job = AsyncAnswerIterator(["a", "b"], Job(answer, RowBar(None, False), window=2))
    with pytest.raises(OSError, match="the disk is full"):
        await anext(job)
    assert [row async for row in job] == []


@given(
    num_items=st.integers(0, 12),
    window=st.integers(1, 5),
    is_ordered=st.booleans(),
    turns=st.lists(st.integers(0, 6), min_size=12, max_size=12),
)
def test_a_thread_reads_the_same_rows(num_items: int, window: int, is_ordered: bool, turns: list[int]) -> None:
    num_read = 0

    def items() -> Iterator[int]:
        nonlocal num_read
        for number in range(num_items):
            num_read += 1
            yield number

    async def answer(index: int, item: object) -> Row:
        for _ in range(turns[index]):
            await asyncio.sleep(0)
        return {"index": index, "item": item}

    portal = Portal("test")
    portal.start()
    try:
        job = Job(answer, RowBar(None, False), window=window, is_ordered=is_ordered)
        rows: list[Any] = []
        for row in AnswerIterator(items(), job, portal.call, portal.loop):  # type: ignore[arg-type]
            rows.append(row)
            assert num_read < len(rows) + window
        assert sorted(row["item"] for row in rows) == list(range(num_items))
        if is_ordered:
            assert [row["index"] for row in rows] == list(range(num_items))
    finally:
        portal.close()
