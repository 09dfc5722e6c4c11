"""Log records and other messages of a child: in order, from one thread, with a maximum rate."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import pytest

from aioengine.child_process import child as module
from aioengine.child_process.child import ForwardedLogs, Uplink, forward_logs
from aioengine.protocol.messages import LogRecord, Message, Progress
from aioengine.transport.base import BacklogFullError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Sent:
    """A sender that records messages and their threads."""

    def __init__(self) -> None:
        self.frames: list[list[Message]] = []
        self.threads: set[int] = set()

    def send(self, messages: list[Message]) -> None:
        self.frames.append(messages)
        self.threads.add(threading.get_ident())


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """The package's logger. It is restored after the test."""
    logger = logging.getLogger("aioengine")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = propagate


def progress(done: int) -> Progress:
    return Progress("weights", done, 9)


def test_messages_of_other_threads_wait_for_the_main_thread() -> None:
    sent = Sent()
    uplink = Uplink(sent.send)
    uplink.post(progress(1))
    thread = threading.Thread(target=lambda: uplink.post(progress(2)))
    thread.start()
    thread.join()
    assert sent.frames == [[progress(1)]]
    uplink.send([progress(3)])
    uplink.flush()
    assert sent.frames == [[progress(1)], [progress(2), progress(3)]]
    assert sent.threads == {threading.get_ident()}


def test_log_records_go_only_to_the_frontend(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    sent = Sent()
    forward_logs(Uplink(sent.send), "warning")
    logging.getLogger("aioengine.runner").warning("%d pages", 5)
    logging.getLogger("aioengine.runner").info("not asked for")
    assert sent.frames == [[LogRecord("aioengine.runner", logging.WARNING, "5 pages")]]
    assert not logger.propagate
    assert capsys.readouterr() == ("", "")


def test_too_many_log_records_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch, logger: logging.Logger) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    sent = Sent()
    handler = ForwardedLogs(Uplink(sent.send))
    record = logging.LogRecord("aioengine.x", logging.ERROR, "f", 1, "again", None, None)
    for _ in range(1000):
        handler.emit(record)
    assert len(sent.frames) == 200
    now[0] += 0.125
    for _ in range(10):
        handler.emit(record)
    assert len(sent.frames) == 206
    first = sent.frames[200][0]
    assert isinstance(first, LogRecord)
    assert first.message == "again (800 records before this one were too many at once and are left out)"


def test_unsent_log_record_raises_nothing_in_the_child() -> None:
    def send(messages: list[Message]) -> None:
        raise BacklogFullError("full")

    logger = logging.Logger("aioengine.some.part")
    logger.addHandler(ForwardedLogs(Uplink(send)))
    logger.error("a line")
