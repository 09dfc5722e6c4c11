"""``until_disconnect`` ends a request whose client has disconnected, and leaves no task behind."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import cast

import pytest

from aioengine.errors import RequestError
from aioengine.http import until_disconnect
from tests.engine.engine_double import World, expected_text
from tests.kit.waiting import until

GREEDY = {"temperature": 0, "max_new_tokens": 6}
BODY = {"type": "http.request", "body": b"", "more_body": False}
DISCONNECT = {"type": "http.disconnect"}


class Client:
    """An ASGI request; ``sent`` holds the messages that the web server passes on."""

    def __init__(self, *messages: Mapping[str, object]) -> None:
        self.sent: asyncio.Queue[Mapping[str, object]] = asyncio.Queue()
        for message in messages:
            self.sent.put_nowait(message)

    async def receive(self) -> Mapping[str, object]:
        return await self.sent.get()


async def assert_nothing_is_left(world: World, num_tasks: int) -> None:
    await until(lambda: world.engine.stats()["num_streams"] == 0 and not world.double.live)
    await until(lambda: len(asyncio.all_tasks()) == num_tasks)


async def test_answer_is_returned_while_the_client_is_connected(world: World) -> None:
    num_tasks = len(asyncio.all_tasks())
    answer = await until_disconnect(Client(BODY), world.engine.async_generate("a", GREEDY))
    assert answer["text"] == expected_text("a", 6)
    await assert_nothing_is_left(world, num_tasks)


async def test_disconnect_aborts_the_request_and_returns_its_output_so_far(world: World) -> None:
    num_tasks = len(asyncio.all_tasks())
    client = Client(BODY)
    world.double.is_held = True
    handler = asyncio.ensure_future(until_disconnect(client, world.engine.async_generate("a", GREEDY)))
    await until(lambda: world.double.live)
    world.double.step()
    client.sent.put_nowait(DISCONNECT)
    answer = await handler
    assert answer["meta_info"]["finish_reason"] == "abort"
    assert answer["text"] == expected_text("a", 1)
    await assert_nothing_is_left(world, num_tasks)


async def test_disconnect_of_a_websocket_aborts_the_request(world: World) -> None:
    world.double.is_held = True
    client = Client({"type": "websocket.disconnect"})
    answer = await until_disconnect(client, world.engine.async_generate("a", GREEDY))
    assert answer["meta_info"]["finish_reason"] == "abort"


async def test_request_without_receive_is_an_error_and_aborts_the_request(world: World) -> None:
    world.double.is_held = True
    with pytest.raises(AttributeError, match="receive"):
        await until_disconnect(cast("Client", object()), world.engine.async_generate("a", GREEDY))
    await until(lambda: not world.double.live and world.engine.stats()["num_streams"] == 0)


async def test_disconnect_aborts_every_row_of_a_batch(world: World) -> None:
    world.double.is_held = True
    answers = await until_disconnect(Client(DISCONNECT), world.engine.async_generate(["a", "b"], GREEDY))
    assert [answer["meta_info"]["finish_reason"]["type"] for answer in answers] == ["abort", "abort"]


async def test_disconnect_fails_a_request_for_an_embedding(world: World) -> None:
    world.double.is_held = True
    with pytest.raises(RequestError, match="abort"):
        await until_disconnect(Client(DISCONNECT), world.engine.async_encode("a"))


async def test_refused_request_raises_and_stops_the_watch(world: World) -> None:
    num_tasks = len(asyncio.all_tasks())
    with pytest.raises(ValueError, match="tokens"):
        await until_disconnect(Client(BODY), world.engine.async_generate("a" * 5000, GREEDY))
    await assert_nothing_is_left(world, num_tasks)


async def test_cancelled_handler_aborts_the_request_and_stops_the_watch(world: World) -> None:
    num_tasks = len(asyncio.all_tasks())
    world.double.is_held = True
    handler = asyncio.ensure_future(until_disconnect(Client(BODY), world.engine.async_generate("a", GREEDY)))
    await until(lambda: world.double.live)
    handler.cancel()
    with pytest.raises(asyncio.CancelledError):
        await handler
    await assert_nothing_is_left(world, num_tasks)
