"""The channel inside one event loop behaves like the channel between processes."""

from __future__ import annotations

import asyncio

import pytest

from aioengine.protocol.messages import Abort, Message
from aioengine.transport import local
from aioengine.transport.base import BacklogFullError
from aioengine.transport.local import LocalReceiver, LocalSender


async def test_frames_arrive_in_order_as_copies() -> None:
    receiver = LocalReceiver(1)
    sent: list[Message] = [Abort([1]), Abort([2])]
    LocalSender(receiver, 1).send(sent)
    LocalSender(receiver, 1).send([Abort([3])])
    received = await receiver.receive()
    assert received == [Abort([1]), Abort([2]), Abort([3])]
    assert received[0] is not sent[0]


async def test_frame_wakes_the_receiver_and_cancelling_loses_nothing() -> None:
    receiver = LocalReceiver(1)
    waiting = asyncio.create_task(receiver.receive())
    await asyncio.sleep(0)
    waiting.cancel()
    LocalSender(receiver, 1).send([Abort([1])])
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await receiver.receive() == [Abort([1])]
    waiting = asyncio.create_task(receiver.receive())
    await asyncio.sleep(0)
    LocalSender(receiver, 1).send([Abort([2])])
    assert await asyncio.wait_for(waiting, 30) == [Abort([2])]


async def test_backlog_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MAX_FRAMES", 2)
    receiver = LocalReceiver(1)
    sender = LocalSender(receiver, 1)
    sender.send([])
    sender.send([])
    with pytest.raises(BacklogFullError, match="2 frames"):
        sender.send([])
    assert receiver.drain() == []
    sender.send([Abort([1])])
    assert receiver.drain() == [Abort([1])]
