"""Frames over ZMQ: order, wake-ups, a bounded number of unsent frames, and ignored garbage."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import zmq

from aioengine.protocol import codec
from aioengine.protocol.messages import Abort, Message
from aioengine.transport import zmq as transport
from aioengine.transport.async_zmq import AsyncZmqReceiver
from aioengine.transport.base import BacklogFullError
from aioengine.transport.zmq import Context, ZmqReceiver, ZmqSender, end_context

if TYPE_CHECKING:
    from collections.abc import Iterator

EPOCH = 77
NUM_FLOOD = 2000


class Channel:
    """An endpoint with its senders and receivers. They are closed after the test."""

    def __init__(self, directory: Path) -> None:
        self.context: Context = zmq.Context()
        self.endpoint = f"ipc://{directory}/r"
        self.closing = ExitStack()

    def receiver(self) -> ZmqReceiver:
        receiver = ZmqReceiver(self.context, self.endpoint, EPOCH)
        self.closing.callback(receiver.close)
        return receiver

    def sender(self) -> ZmqSender:
        sender = ZmqSender(self.context, self.endpoint, EPOCH)
        self.closing.callback(sender.close)
        return sender


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[Channel]:
    channel = Channel(tmp_path)
    with channel.closing:
        yield channel
    channel.context.term()


def receive(receiver: ZmqReceiver, count: int) -> list[Message]:
    messages: list[Message] = []
    while len(messages) < count:
        came = receiver.receive(5)
        assert came, f"{len(messages)} of {count} messages came"
        messages += came
    return messages


def test_frames_sent_before_the_reader_connects_arrive_in_order(channel: Channel) -> None:
    sender = channel.sender()
    for uid in range(1000):
        sender.send([Abort([uid])])
    receiver = channel.receiver()
    assert receive(receiver, 1000) == [Abort([uid]) for uid in range(1000)]


def test_frame_wakes_a_blocked_receiver_which_keeps_its_timeout(channel: Channel) -> None:
    receiver, sender = channel.receiver(), channel.sender()
    assert receiver.receive(0) == []
    start = time.monotonic()
    assert receiver.receive(0.05) == []
    assert time.monotonic() - start > 0.04
    sender.send([])  # connects
    receiver.receive(1)
    for _ in range(9):
        timer = threading.Timer(0.01, sender.send, [[Abort([1])]])
        timer.start()
        assert receiver.receive(None) == [Abort([1])]
        timer.join()


def test_another_descriptor_can_end_a_wait(channel: Channel) -> None:
    reading, writing = os.pipe()
    receiver = ZmqReceiver(channel.context, channel.endpoint, EPOCH, wake_fd=reading)
    channel.closing.callback(receiver.close)
    os.write(writing, b"x")
    assert receiver.receive(600) == []  # longer than the time limit of a test
    os.close(reading)
    os.close(writing)


def test_garbage_is_counted_and_logged_once(channel: Channel, caplog: pytest.LogCaptureFixture) -> None:
    receiver = channel.receiver()
    raw = channel.context.socket(zmq.PUSH)
    channel.closing.callback(raw.close, 0)
    raw.connect(channel.endpoint)
    with caplog.at_level(logging.ERROR, logger="aioengine"):
        for _ in range(5):
            raw.send(b"\x01garbage")
        raw.send(b"")
        raw.send_multipart([b"GET /", b""])
        raw.send(bytes(codec.FrameEncoder(EPOCH + 1).encode([Abort([1])])))
        raw.send(bytes(codec.FrameEncoder(EPOCH).encode([Abort([2])])))
        assert receive(receiver, 1) == [Abort([2])]
    assert receiver.num_bad_frames == 8
    assert [record.message[:15] for record in caplog.records] == ["dropped a frame"]
    assert "01 67 61 72" in caplog.text


def test_send_never_waits_and_its_frames_are_bounded(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_UNSENT", 1000)
    sender = channel.sender()
    num_sent = 0
    with pytest.raises(BacklogFullError, match=r"has not read for too long: 1000 frames wait"):  # noqa: PT012
        while num_sent < 10_000:
            sender.send([Abort([num_sent])])
            num_sent += 1
    assert 1000 <= num_sent < 5000
    assert receive(channel.receiver(), num_sent) == [Abort([uid]) for uid in range(num_sent)]


def test_too_large_frame_is_sent_as_several(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 100)
    monkeypatch.setattr(transport, "_MAX_BYTES_AT_ONCE", 100)
    receiver, sender = channel.receiver(), channel.sender()
    sent: list[Message] = [Abort([uid]) for uid in range(50)]
    sender.send(sent)
    assert receive(receiver, 50) == sent
    with pytest.raises(transport.FrameTooLargeError):
        sender.send([Abort([1] * 200)])


def test_asynchronous_readers_lose_no_frame_under_load(
    channel: Channel, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_MAX_UNREAD", 10)

    async def main() -> list[int]:
        receiver = AsyncZmqReceiver(channel.context, EPOCH)
        receiver.attach(channel.endpoint)
        sender = ZmqSender(channel.context, channel.endpoint, EPOCH, listens=True)
        for uid in range(NUM_FLOOD):
            sender.send([Abort([uid])])
        uids: list[int] = []
        async with asyncio.timeout(20):
            while len(uids) < NUM_FLOOD:
                uids += [message.uids[0] for message in await receiver.receive() if isinstance(message, Abort)]
        sender.close()
        receiver.close()
        return uids

    assert runner.run(main()) == list(range(NUM_FLOOD))


def test_frame_wakes_an_async_receiver_which_may_be_cancelled(channel: Channel, runner: asyncio.Runner) -> None:
    async def main() -> None:
        receiver = AsyncZmqReceiver(channel.context, EPOCH)
        receiver.attach(channel.endpoint)
        sender = ZmqSender(channel.context, channel.endpoint, EPOCH, listens=True)
        for uid in range(9):
            waiting = asyncio.create_task(receiver.receive())
            await asyncio.sleep(0.005)
            waiting.cancel()
            await asyncio.wait([waiting])
            waiting = asyncio.create_task(receiver.receive())
            await asyncio.sleep(0.005)
            sender.send([Abort([uid])])
            assert await asyncio.wait_for(waiting, 30) == [Abort([uid])]
        receiver.close()
        receiver.close()
        sender.close()

    runner.run(main())


def test_idle_async_receiver_is_not_woken(
    channel: Channel, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_events, plain = 0, AsyncZmqReceiver._on_event

    def count_event(receiver: AsyncZmqReceiver) -> None:
        nonlocal num_events
        num_events += 1
        plain(receiver)

    async def main() -> int:
        receiver = AsyncZmqReceiver(channel.context, EPOCH)
        receiver.attach(channel.endpoint)
        sender = ZmqSender(channel.context, channel.endpoint, EPOCH, listens=True)
        sender.send([Abort([1])])
        await receiver.receive()
        await asyncio.sleep(0.05)
        before = num_events
        await asyncio.sleep(0.2)
        receiver.close()
        sender.close()
        return num_events - before

    monkeypatch.setattr(AsyncZmqReceiver, "_on_event", count_event)
    assert runner.run(main()) < 5  # a loop that spins calls it thousands of times


def test_closing_frees_all_descriptors(tmp_path: Path) -> None:
    def num_open() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def once() -> None:
        context: Context = zmq.Context()
        endpoint = f"ipc://{tmp_path}/r{time.monotonic_ns()}"
        receiver, sender = ZmqReceiver(context, endpoint, EPOCH), ZmqSender(context, endpoint, EPOCH)
        sender.send([Abort([1])])
        receive(receiver, 1)
        sender.close()
        receiver.close()
        context.term()

    once()
    before = num_open()
    for _ in range(5):
        once()
    assert num_open() <= before


def test_signal_while_a_context_ends_leaves_no_descriptor_open() -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    num_open = len(os.listdir("/proc/self/fd"))
    signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-4)
    try:
        for _ in range(100):
            context = Context()
            context.socket(zmq.PUSH).close(linger=0)
            end_context(context)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert len(os.listdir("/proc/self/fd")) == num_open
