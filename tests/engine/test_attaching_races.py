"""Attaching from other threads while readers leave and times to live end. No reader hangs or loses text."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from aioengine.api.answers import Chunk
from aioengine.api.sync import ChunkIterator, Engine
from aioengine.errors import EngineClosedError
from aioengine.frontend.calls.row_types import Log
from aioengine.frontend.sessions import attachments
from tests.engine.engine_double import World, expected_text
from tests.kit.waiting import rapid_switches, wait_until

LIMIT_S = 20.0
"""Slower readers fail the test."""
NUM_TOKENS = 400
PARAMS = {"max_new_tokens": NUM_TOKENS, "temperature": 0}
WHOLE = expected_text("a", NUM_TOKENS)


@contextmanager
def engine(step_s: float = 0.001) -> Iterator[Engine]:
    """Return a sync engine whose loop has time between the steps, as with real processes."""
    world = World()
    with Engine.from_blueprint(world.blueprint) as llm:
        world.double.step_s = step_s
        yield llm


def call_together(*calls: Callable[[], object]) -> list[object]:
    """Call these at the same time on threads. Return the results in order."""
    threads = ThreadPoolExecutor(len(calls))
    try:
        futures = [threads.submit(call) for call in calls]
        return [future.result(LIMIT_S) for future in futures]
    finally:
        threads.shutdown(wait=False)


def checked(chunk: Chunk) -> str | None:
    """Check the text at its offset. Return the finish reason."""
    offset = chunk["text_offset"]
    assert chunk["text"] == WHOLE[offset : offset + len(chunk["text"])]
    reason = chunk["meta_info"]["finish_reason"]
    return None if reason is None else str(reason)


def read_all(stream: ChunkIterator) -> str:
    [text] = call_together(lambda: "".join(chunk["text"] for chunk in stream))
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("ttl_s", [0.0003, 20.0])
def test_late_leaving_of_a_reader_does_not_affect_the_next_reader(ttl_s: float) -> None:
    """Each reader attaches while the engine's loop handles the leaving of the previous reader."""
    draw = random.Random(ttl_s)
    with engine() as llm, rapid_switches():
        for number in range(15):
            stream = llm.generate("a", PARAMS, stream=True, rid=f"{number}", resume_ttl=ttl_s)
            checked(next(stream))
            for _ in range(20):
                stream.close()
                for _ in range(draw.randint(0, 3000)):
                    pass
                try:
                    stream = llm.attach(f"{number}")
                except ValueError:  # its time to live has ended
                    assert ttl_s < 1
                    break
                time.sleep(2 * ttl_s if ttl_s < 1 else 0)
                [chunk] = call_together(lambda stream=stream: next(stream, None))
                assert chunk is not None
            stream.abort()
            call_together(lambda stream=stream: [checked(chunk) for chunk in stream])
        assert llm.drain(LIMIT_S)


@pytest.mark.parametrize("ttl_s", [0.0005, 20.0])
def test_concurrent_readers_replace_each_other(ttl_s: float) -> None:
    """Each reader replaces the previous one. One of them reads the end, unless the time to live ends first."""
    with engine(0.0002) as llm, rapid_switches():

        def come_and_go(rid: str, seed: float, first: ChunkIterator | None = None) -> str:
            draw = random.Random(seed)
            while True:
                try:
                    stream = first or llm.attach(rid)
                except ValueError as error:
                    if "can be attached to" not in str(error):
                        raise
                    return "forgotten"
                num_chunks = draw.randint(0, 60)
                with stream:
                    for chunk in stream:
                        if (reason := checked(chunk)) is not None:
                            return reason
                        num_chunks -= 1
                        if num_chunks <= 0:
                            break
                first = None

        for number in range(8):
            rid = f"{number}"
            first = llm.generate("a", PARAMS, stream=True, rid=rid, resume_ttl=ttl_s)
            ends = call_together(
                lambda rid=rid, first=first: come_and_go(rid, 0, first),
                *(lambda rid=rid, seed=seed: come_and_go(rid, seed) for seed in range(3)),
            )
            assert set(ends) <= ({"length"} if ttl_s > 1 else {"length", "forgotten"})
        assert llm.drain(LIMIT_S)


def test_attaching_during_shutdown_does_not_hang() -> None:
    """Readers get the existing text or the error of a closed engine. None hangs."""
    with rapid_switches():
        for number in range(15):
            with engine() as llm:
                first = llm.generate("a", PARAMS, stream=True, rid="x", resume_ttl=20.0)
                checked(next(first))
                first.close()

                def read(llm: Engine = llm) -> str:
                    try:
                        while True:
                            with llm.attach("x") as stream:
                                for chunk in stream:
                                    checked(chunk)
                                    break
                    except EngineClosedError:
                        return "closed"

                def end(llm: Engine = llm, pause_s: float = 0.0005 * number) -> None:
                    time.sleep(pause_s)
                    llm.shutdown()

                assert call_together(read, read, end) == ["closed", "closed", None]


# ---------------------------------------------------------------- forced thread switches


def test_reader_that_leaves_while_another_attaches_does_not_detach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Log.token_index

    def slow_place(log: Log, offset: int) -> int:
        time.sleep(0.05)  # the engine's loop handles the leaving
        return plain(log, offset)

    with engine(0.1) as llm:  # the loop is idle between two steps
        monkeypatch.setattr(Log, "token_index", slow_place)
        params = {"max_new_tokens": 4, "temperature": 0}
        first = llm.generate("a", params, stream=True, rid="x", resume_ttl=20.0)
        next(first)
        second, _ = call_together(lambda: llm.attach("x"), lambda: (time.sleep(0.02), first.close()))
        assert isinstance(second, ChunkIterator)
        assert read_all(second) == expected_text("a", 4)


@pytest.mark.parametrize("moment", [1, 2, 3, 4])
def test_time_to_live_does_not_end_a_request_with_a_reader(monkeypatch: pytest.MonkeyPatch, moment: int) -> None:
    """A reader attaches when the engine reads the clock for the ``moment``-th time.

    The engine reads the clock twice after a reader has left, and again when the time to live ends.
    """
    attached: list[ChunkIterator | ValueError] = []
    with engine(0.002) as llm:

        def attach() -> None:
            try:
                attached.append(llm.attach("x"))
            except ValueError as error:
                attached.append(error)

        thread = threading.Thread(target=attach)
        num_calls = 0

        def monotonic() -> float:
            nonlocal num_calls
            num_calls += 1
            if num_calls == moment:
                thread.start()
                thread.join(0.2)
            return time.monotonic()

        ttl_s = 20.0 if moment < 3 else 0.03
        first = llm.generate("a", PARAMS, stream=True, rid="x", resume_ttl=ttl_s)
        next(first)
        monkeypatch.setattr(attachments, "time", SimpleNamespace(monotonic=monotonic))
        first.close()
        assert wait_until(lambda: attached or not llm.stats()["num_streams"])
        if num_calls < moment:
            thread.start()
        thread.join(LIMIT_S)
        [attachment] = attached
        if isinstance(attachment, ValueError):
            assert moment > 2
        else:
            assert read_all(attachment) == WHOLE
        assert llm.drain(LIMIT_S)
