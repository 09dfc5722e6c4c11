"""Attaching from other threads while readers leave and times to live end: no reader waits for ever or loses text."""

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
"""No reader needs so long; one that waits for ever fails the test."""
NUM_TOKENS = 400
PARAMS = {"max_new_tokens": NUM_TOKENS, "temperature": 0}
WHOLE = expected_text("a", NUM_TOKENS)


@contextmanager
def engine(step_s: float = 0.001) -> Iterator[Engine]:
    """A sync engine whose loop is free between the steps, as with real processes."""
    world = World()
    with Engine.from_blueprint(world.blueprint) as llm:
        world.double.step_s = step_s
        yield llm


def together(*acts: Callable[[], object]) -> list[object]:
    """Run these at once, each on a thread; their results, in order."""
    threads = ThreadPoolExecutor(len(acts))
    try:
        futures = [threads.submit(act) for act in acts]
        return [future.result(LIMIT_S) for future in futures]
    finally:
        threads.shutdown(wait=False)


def checked(chunk: Chunk) -> str | None:
    """Whether the text is what belongs at its offset; returns the finish reason."""
    offset = chunk["text_offset"]
    assert chunk["text"] == WHOLE[offset : offset + len(chunk["text"])]
    reason = chunk["meta_info"]["finish_reason"]
    return None if reason is None else str(reason)


def read_all(stream: ChunkIterator) -> str:
    [text] = together(lambda: "".join(chunk["text"] for chunk in stream))
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("ttl_s", [0.0003, 20.0])
def test_a_reader_that_leaves_late_cuts_nothing_off(ttl_s: float) -> None:
    """Each reader attaches at about the moment when the engine's loop notes that the one before has left."""
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
                except ValueError:  # its time was over
                    assert ttl_s < 1
                    break
                time.sleep(2 * ttl_s if ttl_s < 1 else 0)
                [chunk] = together(lambda stream=stream: next(stream, None))
                assert chunk is not None
            stream.abort()
            together(lambda stream=stream: [checked(chunk) for chunk in stream])
        assert llm.drain(LIMIT_S)


@pytest.mark.parametrize("ttl_s", [0.0005, 20.0])
def test_readers_that_come_and_go_at_once(ttl_s: float) -> None:
    """Each takes over from the one before, wherever it is; one of them reads the end, or nobody came in time."""
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
            ends = together(
                lambda rid=rid, first=first: come_and_go(rid, 0, first),
                *(lambda rid=rid, seed=seed: come_and_go(rid, seed) for seed in range(3)),
            )
            assert set(ends) <= ({"length"} if ttl_s > 1 else {"length", "forgotten"})
        assert llm.drain(LIMIT_S)


def test_attaching_while_the_engine_is_shut_down() -> None:
    """Readers read what there is, or get the error of a closed engine; none waits."""
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

                assert together(read, read, end) == ["closed", "closed", None]


# ---------------------------------------------------------------- forced: a switch of threads at the worst moment


def test_a_reader_that_leaves_while_another_attaches_leaves_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Log.token_index

    def slow_place(log: Log, offset: int) -> int:
        time.sleep(0.05)  # in which the engine's loop handles the leaving
        return plain(log, offset)

    with engine(0.1) as llm:  # between two steps the loop has nothing else to do
        monkeypatch.setattr(Log, "token_index", slow_place)
        params = {"max_new_tokens": 4, "temperature": 0}
        first = llm.generate("a", params, stream=True, rid="x", resume_ttl=20.0)
        next(first)
        second, _ = together(lambda: llm.attach("x"), lambda: (time.sleep(0.02), first.close()))
        assert isinstance(second, ChunkIterator)
        assert read_all(second) == expected_text("a", 4)


@pytest.mark.parametrize("moment", [1, 2, 3, 4])
def test_a_time_to_live_does_not_end_under_a_reader(monkeypatch: pytest.MonkeyPatch, moment: int) -> None:
    """A reader attaches when the engine reads the clock for the ``moment``-th time.

    The first two readings follow the leaving of a reader, the next ones the end of the time to live.
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
        [found] = attached
        if isinstance(found, ValueError):
            assert moment > 2
        else:
            assert read_all(found) == WHOLE
        assert llm.drain(LIMIT_S)
