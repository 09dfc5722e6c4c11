"""Streams that continue without a reader: later readers attach to them, and no text is lost or repeated."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import re
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.api.engine import AsyncEngine
from aioengine.api.stream import Stream
from aioengine.errors import EngineClosedError
from aioengine.frontend.calls.call import Call, CallRow
from aioengine.frontend.calls.reader import Reader
from aioengine.frontend.calls.row_types import Log
from aioengine.frontend.frontend import Frontend
from aioengine.frontend.sessions import attachments
from aioengine.testing.fake_engine import fake_async_engine, fake_engine
from tests.engine.test_interrupts import ENGINE, FRONTEND, RaiseAtCall, frontend_of
from tests.kit.waiting import until

LONG = {"max_new_tokens": 300, "temperature": 0}
TTL_S = 20.0


def slow_engine(**setup: object) -> AsyncEngine:
    return fake_async_engine(step_time_s=0.0005, processes=False, **setup)


def attachable_rids(frontend: Frontend) -> list[str]:
    return [call.rid for call in frontend.attachments._by_call]  # pyright: ignore[reportPrivateUsage]


async def expected(engine: AsyncEngine, prompt: str = "a") -> str:
    return (await engine.async_generate(prompt, LONG))["text"]


async def read_some(engine: AsyncEngine, rid: str, text: str, num_chunks: int) -> tuple[str, bool]:
    """Read some chunks after ``text``. Return the text, and whether the stream has ended."""
    async with engine.attach(rid, len(text)) as stream:
        async for chunk in stream:
            assert chunk["text_offset"] == len(text)
            text += chunk["text"]
            if chunk["meta_info"]["finish_reason"] is not None:
                return text, True
            num_chunks -= 1
            if num_chunks <= 0:
                break
    return text, False


async def test_attaching_to_a_suspended_stream_resumes_it() -> None:
    async with slow_engine(slow_reader="pause", slow_reader_timeout_s=0.05) as engine:
        params = {"max_new_tokens": 1000, "temperature": 0}
        whole = (await engine.async_generate("a", params))["text"]
        stream = engine.async_generate("a", params, stream=True, rid="x", resume_ttl=TTL_S)
        await anext(stream)
        await until(lambda: (engine.stats()["num_running"], engine.stats()["num_waiting"]) == (0, 1))
        with pytest.raises(ValueError, match="from_offset must be at most") as refused:
            engine.attach("x", 10**6)
        for odd in ("_" * 100_000, "x_" + "1" * 5000, "x_0", "\ud800", ""):
            with pytest.raises(ValueError, match="rid|no request") as caught:
                engine.attach(odd)
            assert len(str(caught.value)) < 300
        num_given = int(re.findall(r"\d+", str(refused.value))[0])
        assert num_given < len(whole)
        async with asyncio.timeout(30):
            rest = [chunk["text"] async for chunk in engine.attach("x", num_given)]
        assert "".join(rest) == whole[num_given:]


async def test_stream_continues_without_its_reader_and_loses_nothing() -> None:
    draw = random.Random(1)
    async with slow_engine() as engine:
        whole = await expected(engine)
        stream = engine.async_generate("a", LONG, stream=True, rid="x", resume_ttl=TTL_S)
        text = (await anext(stream))["text"]
        await stream.aclose()
        is_over = False
        while not is_over:
            await asyncio.sleep(draw.random() * 0.02)
            text, is_over = await read_some(engine, "x", text, draw.randint(1, 10))
        assert text == whole
        # after its end, the stream can be read again from any position
        for offset in (0, 1, 150, len(whole)):
            chunks = [chunk async for chunk in engine.attach("x", offset)]
            assert "".join(chunk["text"] for chunk in chunks) == whole[offset:]
            assert chunks[-1]["meta_info"]["finish_reason"] == "length"
            assert chunks[-1]["meta_info"]["completion_tokens"] == 300


@pytest.mark.parametrize("how", ["drop", "cancel", "break", "before it begins"])
async def test_every_way_of_leaving_detaches(how: str) -> None:
    async with slow_engine() as engine:
        whole = await expected(engine)
        stream = engine.async_generate("a", LONG, stream=True, rid="x", resume_ttl=TTL_S)
        if how == "cancel":
            reading = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait([reading])
        elif how == "break":
            async for _ in stream:
                break
        elif how == "drop":
            await anext(stream)
        del stream
        gc.collect()
        await asyncio.sleep(0.01)
        assert engine.stats()["num_streams"] == 1
        assert "".join([chunk["text"] async for chunk in engine.attach("x")]) == whole


async def test_stream_without_a_reader_ends_after_its_ttl() -> None:
    async with slow_engine() as engine:
        stream = engine.async_generate("a", {"max_new_tokens": 1500}, stream=True, rid="x", resume_ttl=0.3)
        await anext(stream)
        await stream.aclose()
        with pytest.raises(ValueError, match="'x' is in use .* can be attached to"):
            engine.async_generate("b", LONG, rid="x")
        await until(lambda: engine.stats()["num_streams"] == 0)
        [server_info] = (await engine.get_server_info())["internal_states"]  # type: ignore[misc]
        assert (server_info["num_running"], server_info["num_free_pages"]) == (0, server_info["num_pages"])
        for _ in range(2):
            with pytest.raises(ValueError, match="'x' can be attached"):
                engine.attach("x")
        await engine.async_generate("b", {"max_new_tokens": 2}, rid="x")
        ended = engine.async_generate("b", {"max_new_tokens": 2}, stream=True, rid="y", resume_ttl=1.0)
        assert [chunk async for chunk in ended]
        assert [chunk async for chunk in engine.attach("y")]
        await until(lambda: "y" not in attachable_rids(frontend_of(engine)))
        with pytest.raises(ValueError, match="'y' can be attached"):
            engine.attach("y")
        del stream, ended
        gc.collect()
        assert [thing for thing in gc.get_objects() if type(thing) is Call and thing.rid == "x"] == []


async def test_new_reader_replaces_the_current_one() -> None:
    async with slow_engine() as engine:
        whole = await expected(engine)
        first = engine.async_generate("a", LONG, stream=True, rid="x", resume_ttl=TTL_S)
        text = (await anext(first))["text"]
        waiting = asyncio.create_task(anext(first, None))
        await asyncio.sleep(0)
        second = engine.attach("x", len(text))
        chunk = await waiting
        assert chunk is None or chunk["text"]
        assert [chunk async for chunk in first] == []
        await first.aclose()  # leaving the first stream does not detach the second
        assert text + "".join([chunk["text"] async for chunk in second]) == whole


async def test_attached_readers_receive_aborts_errors_and_ends() -> None:
    async with slow_engine(slow_reader="pause", slow_reader_timeout_s=0.05) as engine:
        for event in ("abort", "deadline", "pause"):
            timeout = 0.1 if event == "deadline" else None
            params = {"max_new_tokens": 1000}
            stream = engine.async_generate("a", params, stream=True, rid=event, resume_ttl=TTL_S, timeout=timeout)
            await anext(stream)
            if event == "pause":
                await until(lambda: engine.stats()["num_waiting"] == 1)
            await stream.aclose()
            if event == "abort":
                engine.abort_request("abort")
            await until(lambda: engine.stats()["num_streams"] == 0)
            last = [chunk async for chunk in engine.attach(event)][-1]["meta_info"]
            assert last["finish_reason"] == ("length" if event == "pause" else event)


async def test_wrong_arguments_are_refused() -> None:
    async with slow_engine() as engine:
        stream = engine.async_generate("a", LONG, stream=True, rid="x", resume_ttl=TTL_S)
        for options in ({"stream": False}, {"stream": True, "sampling_params": {"n": 2}}):
            with pytest.raises(ValueError, match="resume_ttl is for streams"):
                engine.async_generate("b", resume_ttl=1, **options)  # type: ignore[call-overload]
        with pytest.raises(ValueError, match="from_offset must be at most 0, the text so far, got 10"):
            engine.attach("x", 10)
        with pytest.raises(ValueError, match="from_offset"):
            engine.attach("x", -1)
        with pytest.raises(TypeError, match="from_offset"):
            engine.attach("x", "1")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="no request 'y' can be attached"):
            engine.attach("y")
        assert "".join([chunk["text"] async for chunk in stream])


async def test_kept_streams_have_a_token_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachments, "MAX_KEPT_TOKENS", 1000)
    async with fake_async_engine() as engine:
        for number in range(5):
            stream = engine.async_generate("a", LONG, stream=True, rid=f"{number}", resume_ttl=TTL_S)
            assert len("".join([chunk["text"] async for chunk in stream])) == 300
        for number in (0, 1):
            with pytest.raises(ValueError, match="can be attached"):
                engine.attach(f"{number}")
        assert [len([chunk async for chunk in engine.attach(f"{number}")]) for number in (2, 3, 4)] == [1, 1, 1]


async def test_number_of_short_kept_streams_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachments, "MAX_KEPT_TOKENS", 5 * (1 + attachments.TOKENS_PER_REQUEST))
    async with fake_async_engine() as engine:
        for number in range(8):
            params = {"max_new_tokens": 1}
            async for _ in engine.async_generate("a", params, stream=True, rid=f"{number}", resume_ttl=TTL_S):
                pass
        assert attachable_rids(engine._frontend_here()) == ["3", "4", "5", "6", "7"]


@pytest.mark.parametrize("shows_prompt", [False, True])
async def test_prompt_is_kept_only_on_request(monkeypatch: pytest.MonkeyPatch, shows_prompt: bool) -> None:
    params = {"max_new_tokens": 1, "stop": ["never"]}
    num_counted = attachments.TOKENS_PER_REQUEST + 1 + 200 * shows_prompt
    monkeypatch.setattr(attachments, "MAX_KEPT_TOKENS", num_counted)
    async with fake_async_engine() as engine:
        for rid in ("first", "x"):
            stream = engine.async_generate(
                "a" * 200, params, stream=True, rid=rid, resume_ttl=TTL_S, return_prompt_token_ids=shows_prompt
            )
            assert [chunk["meta_info"]["prompt_tokens"] async for chunk in stream] == [200]
        attachments_of_engine = engine._frontend_here().attachments
        [attachment] = attachments_of_engine._by_call.values()
        assert (attachment.num_kept, attachments_of_engine._num_kept_tokens) == (num_counted, num_counted)
        ask, row = attachment.call.request, attachment.row
        assert (len(ask.prompts), ask.params) == (0, [])
        assert row is not None
        assert len(row.prompt_token_ids) == 200 * shows_prompt
        [chunk] = [chunk async for chunk in engine.attach("x")]
        assert chunk["meta_info"]["prompt_tokens"] == 200
        assert len(chunk.get("prompt_token_ids", [])) == 200 * shows_prompt


async def test_unread_output_is_stored_once() -> None:
    async with fake_async_engine() as engine:
        stream = engine.async_generate("a", LONG, stream=True, rid="x", resume_ttl=TTL_S)
        await until(lambda: engine.stats()["num_streams"] == 0)
        await stream.aclose()
        [attachment] = engine._frontend_here().attachments._by_call.values()
        assert not attachment.call.has_reader
        assert len("".join([chunk["text"] async for chunk in engine.attach("x")])) == 300


async def test_oldest_ended_streams_are_dropped_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachments, "MAX_KEPT_TOKENS", 90 + 20 + attachments.TOKENS_PER_REQUEST)
    async with slow_engine() as engine:
        streams = [
            engine.async_generate("a", {"max_new_tokens": length}, stream=True, rid=rid, resume_ttl=TTL_S)
            for rid, length in (("long", 90), ("short", 20))
        ]
        for stream in reversed(streams):
            async for _ in stream:
                pass
        assert len("".join([chunk["text"] async for chunk in engine.attach("long")])) == 90
        with pytest.raises(ValueError, match="no request 'short' can be attached to"):
            engine.attach("short")


async def test_attaching_to_a_closed_engine_is_refused() -> None:
    engine = slow_engine()
    async with engine:
        stream = engine.async_generate("a", LONG, stream=True, rid="x", resume_ttl=TTL_S)
        await anext(stream)
        await stream.aclose()
    with pytest.raises(EngineClosedError):
        engine.attach("x")


def test_synchronous_engine_attaches() -> None:
    with fake_engine(step_time_s=0.0005, processes=False) as llm:
        whole = llm.generate("a", LONG)["text"]
        for chunk in llm.generate("a", LONG, stream=True, rid="x", resume_ttl=TTL_S):
            text = chunk["text"]
            break
        text += "".join(chunk["text"] for chunk in llm.attach("x", len(text)))
        assert text == whole
        assert "".join(chunk["text"] for chunk in llm.attach("x", 5)) == whole[5:]


@given(st.lists(st.tuples(st.text("aé🥖", max_size=3), st.lists(st.integers(0, 9), max_size=3))), st.data())
def test_log_returns_text_and_ids_from_any_offset(pieces: list[tuple[str, list[int]]], data: st.DataObject) -> None:
    log = Log()
    for text, ids in pieces:
        log.add(text, ids)
    whole, all_ids = "".join(text for text, _ in pieces), [token_id for _, ids in pieces for token_id in ids]
    offset = data.draw(st.integers(0, len(whole)))
    assert log.text_since(offset) == whole[offset:]
    assert log.token_ids == all_ids
    starts = [(0, 0)]
    for text, ids in pieces:
        starts.append((starts[-1][0] + len(text), starts[-1][1] + len(ids)))
    assert any(log.token_index(offset) == num_ids and num_characters <= offset for num_characters, num_ids in starts)
    assert (log.text_since(0), log.token_index(0)) == (whole, 0)
    with pytest.raises(ValueError, match="from_offset"):
        log.token_index(len(whole) + 1)


async def test_reader_attached_at_the_end_of_a_stream_closes_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread can attach after the row has ended, and before the engine has handled its end."""
    async with fake_async_engine() as engine:
        frontend = engine._frontend_here()
        plain, attached = frontend.delivery._on_ended, list[Stream]()

        def on_ended(row: CallRow) -> None:
            attached.append(engine.attach("x"))
            plain(row)

        monkeypatch.setattr(frontend.delivery, "_on_ended", on_ended)
        engine.async_generate("a", {"max_new_tokens": 6}, stream=True, rid="x", resume_ttl=TTL_S)
        await until(lambda: bool(attached) and engine.stats()["num_streams"] == 0)
        monkeypatch.undo()
        [stream] = attached
        assert len("".join([chunk["text"] async for chunk in stream])) == 6
        assert await engine.drain(1)


async def test_attaching_while_a_call_is_checked_for_its_end_keeps_it_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The check and the attaching of a reader exclude each other."""
    async with slow_engine() as engine:
        whole = await expected(engine)
        await anext(engine.async_generate("a", LONG, stream=True, rid="x", resume_ttl=TTL_S))
        frontend = engine._frontend_here()
        [call] = frontend.calls.opened
        attached: list[Reader] = []
        attaching = threading.Thread(target=lambda: attached.append(frontend.attachments.attach("x", 0, frontend)))

        class Watched(Call):
            __slots__ = ()

            def __getattribute__(self, name: str) -> object:
                if name == "is_over" and attaching.ident is None:
                    attaching.start()
                    attaching.join(0.2)
                return super().__getattribute__(name)

        call.__class__ = Watched
        frontend.calls.close_if_over(call)
        attaching.join()
        assert engine.stats()["num_streams"] == 1
        stream = Stream(attached[0], home=frontend.loop, is_bound=True, owner=engine)
        assert "".join([chunk["text"] async for chunk in stream]) == whole


async def test_rows_of_a_call_are_read_under_the_lock() -> None:
    async with slow_engine() as engine:
        frontend = engine._frontend_here()

        class Guarded(dict[int, CallRow]):
            """Rows of a call that check the lock on each access."""

            def __iter__(self) -> Iterator[int]:
                assert frontend._lock._is_owned()  # type: ignore[attr-defined]
                return super().__iter__()

            def __contains__(self, position: object) -> bool:
                assert frontend._lock._is_owned()  # type: ignore[attr-defined]
                return super().__contains__(position)

            def values(self) -> Any:
                assert frontend._lock._is_owned()  # type: ignore[attr-defined]
                return super().values()

        for how in ("suspend", "abort", "leave", "fail"):
            stream = engine.async_generate("a", LONG, stream=True)
            await anext(stream)
            [call] = frontend.calls.opened
            call.open_rows = Guarded(call.open_rows)
            if how == "suspend":
                while (unread := call.read_position) is None:  # noqa: ASYNC110  # this condition has no event
                    await asyncio.sleep(0)
                frontend.calls.suspend(call, unread)
                frontend.calls.on_read(call)
                engine.abort_request(stream.rid)
            elif how == "abort":
                stream.abort()
            elif how == "leave":
                await stream.aclose()
            else:
                frontend.calls.fail(call, EngineClosedError("it was closed"))
            await until(lambda: not frontend.calls.opened)


async def test_time_to_live_of_an_ended_request_starts_when_its_reader_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(attachments, "time", SimpleNamespace(monotonic=lambda: now_s))
    async with slow_engine() as engine:
        params = {"max_new_tokens": 20, "temperature": 0}
        stream = engine.async_generate("a", params, stream=True, rid="x", resume_ttl=0.3)
        await anext(stream)
        await until(lambda: engine.stats()["num_streams"] == 0)
        now_s += 0.6
        await asyncio.sleep(0.4)  # longer than the time to live
        await stream.aclose()
        await asyncio.sleep(0.01)
        now_s += 0.15
        second = engine.attach("x")  # the time starts again when a second reader leaves
        now_s += 0.6
        await asyncio.sleep(0.4)
        assert len("".join([chunk["text"] async for chunk in second])) == 20
        now_s += 0.15
        await engine.attach("x").aclose()
        await asyncio.sleep(0.01)
        now_s += 0.6
        await until(lambda: not attachable_rids(frontend_of(engine)))
        with pytest.raises(ValueError, match="its time is over"):
            engine.attach("x")


async def test_request_is_forgotten_after_its_end_was_read() -> None:
    """Also if its reader does not leave: the first stream is read before the time is over, the second one after it."""
    async with slow_engine() as engine:
        params = {"max_new_tokens": 20, "temperature": 0}
        streams = [
            engine.async_generate("a", params, stream=True, rid=f"{number}", resume_ttl=0.1) for number in range(3)
        ]
        assert [chunk async for chunk in streams[0]]
        await until(lambda: engine.stats()["num_streams"] == 0)
        assert [chunk async for chunk in streams[1]]
        await until(lambda: attachable_rids(frontend_of(engine)) == ["2"])
        for rid in "01":
            with pytest.raises(ValueError, match="its time is over"):
                engine.attach(rid)
        await engine.attach("2").aclose()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("leaves", [True, False])
async def test_attaching_works_after_an_exception_anywhere_in_attaching(leaves: bool) -> None:
    """An earlier reader leaves afterwards, or continues to read."""
    async with slow_engine() as engine:
        params = {"max_new_tokens": 50, "temperature": 0}
        whole = (await engine.async_generate("a", params))["text"]
        num_places, is_raised = 0, True
        while is_raised:
            num_places, kept = num_places + 1, None
            rid = f"{num_places}"
            first = engine.async_generate("a", params, stream=True, rid=rid, resume_ttl=TTL_S)
            text = (await anext(first))["text"]
            with RaiseAtCall(num_places, FRONTEND, ENGINE) as injected, contextlib.suppress(KeyboardInterrupt):
                kept = engine.attach(rid)
            is_raised = injected.is_raised
            if kept is not None:  # nothing was raised in the last round
                await kept.aclose()
            async with asyncio.timeout(30):
                if leaves:
                    await first.aclose()
                    await asyncio.sleep(0.001)
                    kept_calls = frontend_of(engine).attachments._by_call
                    [attachment] = [entry for call, entry in kept_calls.items() if call.rid == rid]
                    assert attachment.until is not None
                    assert not attachment.call.has_reader
                rest = [chunk["text"] async for chunk in engine.attach(rid, len(text))]
                assert text + "".join(rest) == whole
                async for _ in first:
                    pass
        assert num_places > 20
