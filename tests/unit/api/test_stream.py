"""The hand-over of chunks from the engine's loop to a reader, without an engine."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.errors import EngineDeadError, RequestError
from aioengine.frontend.calls.call import MAX_UNJOINED_TEXTS, CallRow, NotifyOn
from aioengine.frontend.calls.delivery import MAX_ENDED, MAX_WOKEN, Delivery
from aioengine.frontend.calls.reader import EndOfOutput
from aioengine.protocol.columns import TokenColumns
from aioengine.protocol.messages import End, FinishCode, FirstToken, TextChunks
from tests.kit.calls import ReaderRequests, add_row, make_call, make_reader

if TYPE_CHECKING:
    from aioengine.api.answers import Chunk


class Slot:
    """A call with its rows, its reader, and the recorded requests of the reader."""

    def __init__(self, num_rows: int = 1, *, is_stream: bool = True, returns_exceptions: bool = False) -> None:
        self.requests = ReaderRequests()
        self.call = make_call(num_rows, is_stream=is_stream, returns_exceptions=returns_exceptions)
        self.lock = threading.RLock()
        self.reader = make_reader(self.call, self.requests, self.lock)
        self.rows = [add_row(self.call, position) for position in range(num_rows)]

    def put(self, row: CallRow, text: str, token_ids: list[int]) -> None:
        """Deliver like a frame: put the chunk, then wake the reader."""
        if row.put(text, token_ids):
            self.call.wake()

    def end(self, row: CallRow, code: FinishCode = FinishCode.LENGTH) -> None:
        self.call.end_row(row, End(0, code, message="broke"), 1.0)


def texts(count: int) -> list[str]:
    return [f"{number} " for number in range(count)]


class TestMerging:
    @given(st.lists(st.tuples(st.text("aé🥖", max_size=3), st.lists(st.integers(0, 9), max_size=3), st.booleans())))
    def test_no_text_is_lost_for_any_times_of_reading(self, pushes: list[tuple[str, list[int], bool]]) -> None:
        slot = Slot()
        [row] = slot.rows
        text, ids = "", list[int]()
        for new_text, new_ids, is_read in pushes:
            row.put(new_text, new_ids[0] if len(new_ids) == 1 else list(new_ids))
            if is_read and (chunk := slot.reader.take()) is not None:
                assert (chunk["text_offset"], chunk["token_offset"]) == (len(text), len(ids))
                text += chunk["text"]
                ids += chunk["output_ids"]
        slot.end(row)
        last = slot.reader.take()
        assert last is not None
        assert last["meta_info"]["finish_reason"] == "length"
        assert text + last["text"] == "".join(new_text for new_text, _, _ in pushes)
        assert ids + last["output_ids"] == [new_id for _, new_ids, _ in pushes for new_id in new_ids]
        with pytest.raises(EndOfOutput):
            slot.reader.take()

    def test_unread_texts_are_joined_from_time_to_time(self) -> None:
        slot = Slot()
        num_characters = num_copied = 0
        for text in texts(50_000):
            before = slot.rows[0].more_texts
            slot.rows[0].put(text, [1])
            num_characters += len(text)
            now = slot.rows[0].more_texts
            assert len(now) <= MAX_UNJOINED_TEXTS + num_characters / MAX_UNJOINED_TEXTS
            num_copied += len(now[0]) if now is not before else 0
        assert num_copied < 20 * num_characters
        chunk = slot.reader.take()
        assert chunk is not None
        assert chunk["text"] == "".join(texts(50_000))

    def test_returned_chunk_does_not_change(self) -> None:
        slot = Slot()
        slot.rows[0].put("a", [1])
        chunk = slot.reader.take()
        slot.rows[0].put("b", [2])
        assert chunk is not None
        assert chunk["output_ids"] == [1]

    def test_take_returns_none_before_the_first_chunk(self) -> None:
        slot = Slot()
        assert slot.reader.take() is None
        assert slot.reader.wait(lambda: None)


class TestWaking:
    def test_a_waiting_callback_is_called_once(self) -> None:
        slot = Slot()
        calls: list[int] = []
        assert slot.reader.wait(lambda: calls.append(1))
        slot.put(slot.rows[0], "a", [1])
        slot.put(slot.rows[0], "b", [2])
        assert calls == [1]
        assert not slot.reader.wait(lambda: calls.append(2))

    def test_every_waiting_reader_is_woken(self) -> None:
        slot = Slot(is_stream=False)
        calls: list[int] = []
        assert slot.reader.wait(lambda: calls.append(1))
        assert slot.reader.wait(lambda: calls.append(2))
        slot.put(slot.rows[0], "a", [1])
        assert calls == []
        slot.end(slot.rows[0])
        assert calls == [1, 2]

    def test_a_reader_can_wait_for_acceptance(self) -> None:
        slot = Slot()
        calls: list[int] = []
        assert not slot.reader.is_accepted()
        assert slot.reader.wait(lambda: calls.append(1), until_accepted=True)
        slot.call.accept()
        assert calls == [1]
        assert slot.reader.is_accepted()
        assert not slot.reader.wait(lambda: calls.append(2), until_accepted=True)


class TestErrors:
    def test_an_error_is_raised_after_the_text_that_is_ready(self) -> None:
        slot = Slot()
        slot.rows[0].put("a", [1])
        slot.call.fail(EngineDeadError("scheduler", pid=1, exit_code=1))
        chunk = slot.reader.take()
        assert chunk is not None
        assert chunk["text"] == "a"
        for _ in range(2):
            with pytest.raises(EngineDeadError):
                slot.reader.take()

    def test_first_error_is_kept(self) -> None:
        slot = Slot(is_stream=False)
        slot.end(slot.rows[0], FinishCode.FAILED)
        slot.call.fail(EngineDeadError("scheduler", pid=1, exit_code=1))
        with pytest.raises(RequestError):
            slot.reader.result()

    def test_error_of_one_row_ends_a_batch(self) -> None:
        slot = Slot(2, is_stream=False)
        slot.end(slot.rows[0], FinishCode.FAILED)
        with pytest.raises(RequestError):
            slot.reader.result()
        slot = Slot(2, is_stream=False, returns_exceptions=True)
        slot.end(slot.rows[1], FinishCode.FAILED)
        assert slot.reader.result() is None
        slot.end(slot.rows[0])
        result = slot.reader.result()
        assert isinstance(result, list)
        assert isinstance(result[1], RequestError)


class TestLeaving:
    def test_after_the_end_nothing_is_sent_to_the_engine(self) -> None:
        slot = Slot(is_stream=False)
        slot.end(slot.rows[0])
        slot.reader.leave()
        slot.reader.abort()
        assert slot.requests.names == []

    def test_abort_and_first_leaving_are_sent_before_the_end(self) -> None:
        slot = Slot()
        slot.reader.abort()
        slot.reader.leave()
        slot.reader.leave()
        assert slot.requests.names == ["abort", "leave"]

    def test_reading_the_ends_of_rows_lets_later_rows_of_a_batch_start(self) -> None:
        slot = Slot(3)
        slot.call.num_open = 5
        slot.call.notify_on = NotifyOn.END_READ
        slot.rows[0].put("a", [1])
        slot.end(slot.rows[1])
        assert slot.call.num_unread_rows == 3
        slot.reader.take()
        assert slot.requests.names == []
        slot.reader.take()
        assert slot.call.num_unread_rows == 2
        assert slot.requests.names == ["on_read"]


async def wait_here(slot: Slot) -> asyncio.Future[Chunk | None]:
    waiter = slot.reader.wait_here(asyncio.get_running_loop())
    assert waiter is not None
    return waiter


class TestHandingOver:
    """A reader on the engine's own loop receives its chunk from the call that wakes it."""

    async def test_waiting_task_receives_the_chunk_directly(self) -> None:
        slot = Slot()
        waiter = await wait_here(slot)
        slot.put(slot.rows[0], "a", [1])
        slot.put(slot.rows[0], "b", [2])
        chunk = waiter.result()
        assert chunk is not None
        assert (chunk["text"], chunk["output_ids"], chunk["token_offset"]) == ("a", [1], 0)
        assert slot.reader.wait_here(asyncio.get_running_loop()) is None
        rest = slot.reader.take()
        assert rest is not None
        assert (rest["text"], rest["output_ids"], rest["token_offset"]) == ("b", [2], 1)

    async def test_a_cancelled_reader_loses_no_chunk(self) -> None:
        slot = Slot()
        (await wait_here(slot)).cancel()
        slot.put(slot.rows[0], "a", [1])
        chunk = slot.reader.take()
        assert chunk is not None
        assert chunk["text"] == "a"

    async def test_one_waiting_task_gets_the_chunk_and_the_others_are_woken(self) -> None:
        slot = Slot()
        waiters = [await wait_here(slot) for _ in range(3)]
        slot.put(slot.rows[0], "a", [1])
        assert [waiter.done() and waiter.result() is not None for waiter in waiters] == [True, False, False]
        assert all(waiter.done() for waiter in waiters)

    async def test_waiting_for_acceptance_takes_no_chunk(self) -> None:
        slot = Slot()
        assert slot.reader.wait(lambda: None, until_accepted=True)
        slot.put(slot.rows[0], "a", [1])
        assert slot.reader.take() is not None

    @pytest.mark.parametrize("how", ["error", "leaving", "end of the rows"])
    async def test_ends_wake_a_waiting_task_without_a_chunk(self, how: str) -> None:
        slot = Slot(is_stream=how != "end of the rows")
        waiter = await wait_here(slot)
        if how == "error":
            slot.call.fail(EngineDeadError("scheduler", pid=1, exit_code=1))
        elif how == "leaving":
            slot.call.wake()
        else:
            slot.end(slot.rows[0])
        assert waiter.result() is None


class TestRouter:
    def test_a_frame_reaches_its_rows(self) -> None:
        slot, ended = Slot(3), list[CallRow]()
        delivery = Delivery({}, slot.lock, ended.append)
        delivery.rows = dict(zip((7, 8, 9), slot.rows, strict=True))
        frame = TextChunks(
            TokenColumns([8, 99, 7], [1, 2, 3, 4], [2, 1, 1]),
            ["bee", "lost", ""],
            [End(8, FinishCode.LENGTH)],
            num_open=2,
        )
        delivery.deliver(frame)
        delivery.wake()
        assert ended == [slot.rows[1]]
        assert (slot.rows[1].text, slot.rows[1].token_ids) == ("bee", [1, 2])
        assert (slot.rows[0].text, slot.rows[0].token_ids) == ("", [4])
        assert set(delivery.rows) == {7, 9}
        assert delivery.num_detokenizing == 2

    def test_delivering_one_id_per_row_makes_few_objects_for_the_garbage_collector(self) -> None:
        slot = Slot(500)
        delivery = Delivery({}, slot.lock, print)
        delivery.rows = dict(enumerate(slot.rows))
        frame = TextChunks(TokenColumns(list(range(500)), list(range(500))), ["a"] * 500)
        gc.collect()
        before = gc.get_count()[0]
        delivery.deliver(frame)
        assert gc.get_count()[0] - before < 50
        assert [row.token_ids for row in slot.rows] == list(range(500))

    async def test_frames_that_arrive_together_are_one_chunk_with_the_end(self) -> None:
        slot = Slot()
        delivery = Delivery({}, slot.lock, print)
        delivery.rows = {7: slot.rows[0]}
        waiter = await wait_here(slot)
        delivery.deliver(TextChunks(TokenColumns([7], [1]), ["a"]))
        delivery.deliver(TextChunks(TokenColumns([7], [2]), ["b"], [End(7, FinishCode.LENGTH)]))
        delivery.wake()
        chunk = waiter.result()
        assert chunk is not None
        assert (chunk["text"], chunk["meta_info"]["finish_reason"]) == ("ab", "length")
        assert slot.reader.wait_here(asyncio.get_running_loop()) is None

    async def test_readers_are_woken_in_several_parts(self) -> None:
        slots = [Slot() for _ in range(2 * MAX_WOKEN + 1)]
        delivery = Delivery({}, slots[0].lock, print)
        delivery.rows = {uid: slot.rows[0] for uid, slot in enumerate(slots)}
        waiters = [await wait_here(slot) for slot in slots]
        count = len(slots)
        delivery.deliver(TextChunks(TokenColumns(list(range(count)), [1] * count), ["a"] * count))
        assert sum(waiter.done() for waiter in waiters) == 0
        delivery.wake()
        assert [waiter.done() for waiter in waiters] == [True] * MAX_WOKEN + [False] * (MAX_WOKEN + 1)
        delivery.deliver(TextChunks(TokenColumns([0, count - 1], [2, 2]), ["b", "b"]))  # another step arrives meanwhile
        for _ in range(3):
            await asyncio.sleep(0)
        assert all(waiter.done() for waiter in waiters)
        last = waiters[-1].result()
        assert last is not None
        assert last["text"] == "ab"

    async def test_rows_that_end_together_do_not_delay_the_readers_of_other_rows(self) -> None:
        count = 2 * MAX_ENDED
        slots = [Slot() for _ in range(count + 1)]
        delivery = Delivery({uid: slot.rows[0] for uid, slot in enumerate(slots)}, slots[0].lock, lambda row: None)
        waiters = [await wait_here(slot) for slot in slots]
        ends = [End(uid, FinishCode.LENGTH) for uid in range(count)]
        delivery.deliver(TextChunks(TokenColumns(list(range(count + 1)), [1] * (count + 1)), ["a"] * (count + 1), ends))
        delivery.wake()
        assert [waiter.done() for waiter in waiters] == [True] * MAX_ENDED + [False] * MAX_ENDED + [True]
        await asyncio.sleep(0)
        chunks = [cast("Chunk", waiter.result()) for waiter in waiters]
        assert [chunk["text"] for chunk in chunks] == ["a"] * (count + 1)
        assert [chunk["meta_info"]["finish_reason"] for chunk in chunks] == ["length"] * count + [None]

    def test_chunks_report_cached_tokens_and_preemptions(self) -> None:
        slot = Slot(2)
        delivery = Delivery({}, slot.lock, print)
        delivery.rows = dict(zip((7, 8), slot.rows, strict=True))
        begun = [FirstToken(uid, 16 * (uid - 7), 1.0, 2.0) for uid in (7, 8, 99)]
        delivery.deliver(TextChunks(TokenColumns([7, 8], [1, 2]), ["a", "b"], first_tokens=begun))
        first = [slot.reader.take(), slot.reader.take()]
        delivery.deliver(TextChunks(TokenColumns([7, 8], [1, 2]), ["a", "b"], preempted=[7, 99, 7]))
        second = [slot.reader.take(), slot.reader.take()]
        keys = ("cached_tokens", "num_preemptions", "num_retractions")
        told = [tuple(chunk["meta_info"][key] for key in keys) for chunk in (*first, *second) if chunk is not None]  # type: ignore[literal-required]
        assert told == [(0, 0, 0), (16, 0, 0), (0, 2, 2), (16, 0, 0)]
