"""Links between machines: encrypted, and only between ends with the right keys."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import zmq

from aioengine.protocol.messages import Abort, Message
from aioengine.protocol.orders import SecureEndpoint
from aioengine.transport.async_zmq import AsyncZmqReceiver, ListeningSender
from aioengine.transport.curve import KeyCheck, Keys, new_keys
from aioengine.transport.zmq import Context, ZmqReceiver, ZmqSender, attach, end_context

if TYPE_CHECKING:
    from collections.abc import Iterator

EPOCH = 77
LOCALHOST = "tcp://127.0.0.1:*"


class Frontend:
    """The listening ends. They accept the keys of the child."""

    def __init__(self, child: Keys) -> None:
        self.keys = new_keys()
        self.closing = ExitStack()
        context = Context()
        self.closing.callback(end_context, context)
        self.closing.callback(KeyCheck(context, child.public).close)
        end = SecureEndpoint(LOCALHOST, *self.keys)
        self.receiver = AsyncZmqReceiver(context, EPOCH)
        self.closing.callback(self.receiver.close)
        self.uplink = self.receiver.attach(end)
        self.sender = ListeningSender(context, end, EPOCH, receiver="it")
        self.closing.callback(self.sender.close)

    async def receive(self) -> list[Message]:
        return await asyncio.wait_for(self.receiver.receive(), 30)


class Child:
    """The connecting ends."""

    def __init__(self, directory: Path) -> None:
        self.keys = new_keys()
        self.closing = ExitStack()
        self._context = Context()
        self.closing.callback(end_context, self._context)
        self.endpoint = f"ipc://{directory}/inbox"

    def sender(self, endpoint: str | SecureEndpoint) -> ZmqSender:
        sender = ZmqSender(self._context, endpoint, EPOCH)
        self.closing.callback(sender.close)
        return sender

    def receiver(self, endpoint: SecureEndpoint) -> ZmqReceiver:
        receiver = ZmqReceiver(self._context, self.endpoint, EPOCH)
        self.closing.callback(receiver.close)
        receiver.attach(endpoint)
        return receiver

    def thief(self, endpoint: str | SecureEndpoint) -> zmq.Socket[bytes]:
        """Return a socket that tries to receive frames of the frontend."""
        socket = self._context.socket(zmq.PULL)
        self.closing.callback(socket.close)
        attach(socket, endpoint)
        return socket


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    child = Child(tmp_path)
    with child.closing:
        yield child


async def received(receiver: ZmqReceiver, count: int) -> list[int]:
    uids: list[int] = []
    while len(uids) < count:
        messages = await asyncio.to_thread(receiver.receive, 1.0)
        uids += [message.uids[0] for message in messages if isinstance(message, Abort)]
    return sorted(uids)


def test_frames_arrive_in_both_directions_and_from_this_machine(runner: asyncio.Runner, child: Child) -> None:
    async def main() -> None:
        frontend = Frontend(child.keys)
        with frontend.closing:
            receiver = child.receiver(SecureEndpoint(frontend.sender.address, *child.keys, frontend.keys.public))
            frontend.sender.send([Abort([1])])
            child.sender(child.endpoint).send([Abort([2])])
            assert await received(receiver, 2) == [1, 2]
            child.sender(SecureEndpoint(frontend.uplink, *child.keys, frontend.keys.public)).send([Abort([3])])
            assert await frontend.receive() == [Abort([3])]

    runner.run(main())


@pytest.mark.parametrize("wrong", ["client", "server", "none"])
async def test_ends_with_wrong_keys_get_no_connection(wrong: str, child: Child) -> None:
    frontend = Frontend(child.keys)
    with frontend.closing:
        keys = new_keys() if wrong == "client" else child.keys
        server_key = new_keys().public if wrong == "server" else frontend.keys.public
        ends: list[str | SecureEndpoint] = [frontend.uplink, frontend.sender.address]
        if wrong != "none":
            ends = [SecureEndpoint(str(address), *keys, server_key) for address in ends]
        child.sender(ends[0]).send([Abort([1])])
        thief = child.thief(ends[1])
        await asyncio.sleep(0.1)
        frontend.sender.send([Abort([2])])
        child.sender(SecureEndpoint(frontend.uplink, *child.keys, frontend.keys.public)).send([Abort([3])])
        assert await frontend.receive() == [Abort([3])]
        receiver = child.receiver(SecureEndpoint(frontend.sender.address, *child.keys, frontend.keys.public))
        assert await received(receiver, 1) == [2]
        assert not thief.poll(0)


async def test_large_messages_of_strangers_are_not_stored(child: Child) -> None:
    frontend = Frontend(child.keys)
    with frontend.closing:
        for address in (frontend.uplink, frontend.sender.address):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
            writer.write(b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32))  # the greeting
            await reader.readexactly(64)
            writer.write(b"\x06" + (2**30).to_bytes(8, "big"))  # the size of a message of the handshake
            with suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 20) == b""
            writer.close()


async def test_bytes_on_the_network_are_encrypted(child: Child) -> None:
    frontend = Frontend(child.keys)
    seen = bytearray()
    tasks: list[asyncio.Task[None]] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            seen.extend(data)
            writer.write(data)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", int(frontend.uplink.rpartition(":")[2]))
        tasks.extend((asyncio.create_task(copy(reader, far_writer)), asyncio.create_task(copy(far_reader, writer))))

    message = Abort([1], message="a secret of the user")
    with frontend.closing:
        async with await asyncio.start_server(relay, "127.0.0.1", 0) as server:
            address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            sender = child.sender(SecureEndpoint(address, *child.keys, frontend.keys.public))
            sender.send([message])
            assert await frontend.receive() == [message]
            sender.close()
            await asyncio.gather(*tasks)
    assert len(seen) > 200
    assert b"secret" not in seen
