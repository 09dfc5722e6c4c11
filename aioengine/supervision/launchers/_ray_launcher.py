"""Starts the children of a replica on a node of a Ray cluster, and exchanges encrypted frames with them."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import ray
from msgspec.structs import replace
from ray.exceptions import RayError, RayTaskError

from aioengine.errors import EngineStartupError, describe
from aioengine.protocol.codec import UnencodableError
from aioengine.protocol.messages import DETOKENIZER, Submit
from aioengine.protocol.orders import SecureEndpoint
from aioengine.supervision.launchers._ray_host import REPORT_S, ChildState, FrontendAddresses
from aioengine.supervision.tasks import EngineTask
from aioengine.transport.async_zmq import AsyncZmqReceiver, ListeningSender
from aioengine.transport.curve import KeyCheck, new_keys
from aioengine.transport.zmq import Context, ZmqError, end_context

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aioengine.protocol.messages import Message, Role
    from aioengine.settings.config import Settings
    from aioengine.supervision.launchers._ray_places import RayPlaces

_SILENCE_S: Final = 5.0
"""A node counts as lost if its actor sends no report for this time after ``REPORT_S``."""
_MAX_IMAGE_BYTES: Final = 128 * 1024 * 1024
"""Images of a request that are sent by value. They must fit into a frame."""


class RayChild:
    """A child process on another machine, as its actor has reported it. It has the methods of ``ProcessChild``.

    Attributes:
        final_reason: why no other child can be started at its place; "" if one can.
    """

    def __init__(self, state: ChildState, host: Any) -> None:
        self.role = state.role
        self.pid = state.pid
        self.exited = asyncio.Event()
        self.final_reason = ""
        self._state = state
        self._host = host
        self._on_exit: Callable[[], None] | None = None

    @property
    def is_alive(self) -> bool:
        return not self._state.has_exited

    @property
    def exit_code(self) -> int | None:
        return self._state.exit_code

    def watch(self, on_exit: Callable[[], None]) -> None:
        if self._on_exit is None:
            self._on_exit = on_exit

    def update(self, state: ChildState) -> None:
        """Receive a report."""
        if self._state.has_exited:
            return
        self._state = state
        if state.has_exited:
            self.exited.set()
            if self._on_exit is not None:
                self._on_exit()

    def lose(self, reason: str, *, is_final: bool) -> None:
        """Record that its node is lost. is_final: no other child can be started at its place."""
        self.final_reason = reason if is_final else ""
        self.update(replace(self._state, has_exited=True, log_lines=(reason,)))

    def terminate(self) -> None:
        self._end(is_killed=False)

    def kill(self) -> None:
        self._end(is_killed=True)

    def _end(self, *, is_killed: bool) -> None:
        if self.is_alive and ray.is_initialized():
            self._host.end.remote(self.role, is_killed=is_killed)

    def reap(self, timeout_s: float) -> None:
        """Does nothing: the actor waits for the exit."""

    def log_lines(self) -> tuple[str, ...]:
        return self._state.log_lines

    def uids_in_flight(self) -> dict[int, int]:
        """Return the rows at the last report. If the child has exited, these are the rows at its exit."""
        return self._state.rows


class RayLauncher:
    """Starts the children of one incarnation by an actor. It has the methods of ``ProcessLauncher``.

    The frontend listens at two TCP ports, and accepts only the key of the actor.
    """

    def __init__(self, places: RayPlaces, number: int, settings: Settings, roles: Sequence[Role]) -> None:
        """number: of the replica and its place."""
        self.children: list[RayChild] = []
        self.sender: ListeningSender
        self.receiver: AsyncZmqReceiver
        self._places = places
        self._number = number
        self._settings = settings
        self._roles = roles
        self.epoch = secrets.randbits(62)
        self._closing = contextlib.ExitStack()
        self._host: Any = None

    async def launch(self) -> None:
        """Start all children without waiting until they are ready.

        Raises:
            EngineStartupError: a child could not be started.
        """
        self._host = self._places.make_host(self._number)
        self._closing.callback(self._end_host)
        addresses = self._listen(await self._ask(self._host.prepare.remote(self._places.models)))
        start = self._host.start.remote(self._settings, self._roles, self.epoch, addresses)
        self._adopt(await self._ask(start))
        watching = EngineTask(self._watch(), name="aioengine-ray", on_failure=lambda error: self._lose(str(error)))
        self._closing.callback(watching.cancel)

    async def launch_detokenizer(self) -> None:
        """See ``ProcessLauncher``."""
        self._adopt(await self._ask(self._host.restart.remote(DETOKENIZER, self.epoch)))

    async def check_links(self) -> None:
        """Does nothing: the sockets between the children are on another machine."""

    def close(self) -> None:
        """Close the channels, and end the actor with its children. May be repeated."""
        self._closing.close()

    def _listen(self, key: str) -> FrontendAddresses:
        """Open the sockets for children with this public key."""
        own = new_keys()
        end = SecureEndpoint(f"tcp://{self._places.address}:*", own.public, own.secret)
        try:
            context = Context()
            self._closing.callback(end_context, context)
            self._closing.callback(KeyCheck(context, key).close)
            self.sender = _ImageSender(context, end, self.epoch, receiver="the scheduler process")
            self._closing.callback(self.sender.close)
            self.receiver = AsyncZmqReceiver(context, self.epoch)
            self._closing.callback(self.receiver.close)
            return FrontendAddresses(self.receiver.attach(end), self.sender.address, own.public)
        except ZmqError as error:
            raise EngineStartupError(f"the engine's sockets could not be opened: {error}") from error

    async def _ask(self, reply: Any) -> Any:
        """Wait for the reply of the actor.

        Raises:
            EngineStartupError: it failed, or takes too long.
        """
        text = f"replica {self._number} could not be started on its Ray node"
        try:
            async with asyncio.timeout(self._places.timeout_s):
                return await asyncio.wrap_future(reply.future())
        except TimeoutError:
            raise EngineStartupError(f"{text} within {self._places.timeout_s:g} seconds (startup_timeout)") from None
        except RayTaskError as error:
            raise EngineStartupError(f"{text}: {describe(error.cause)}") from error
        except RayError as error:
            raise EngineStartupError(f"{text}: {describe(error)}") from error

    def _adopt(self, states: list[ChildState]) -> None:
        """Add a ``RayChild`` for each new process, and drop children that the actor has replaced."""
        known = {child.pid: child for child in self.children}
        self.children[:] = [known.get(state.pid) or RayChild(state, self._host) for state in states]

    async def _watch(self) -> None:
        """Receive the reports of the actor until it is lost."""
        while True:
            try:
                async with asyncio.timeout(REPORT_S + _SILENCE_S):
                    states: list[ChildState] = await asyncio.wrap_future(self._host.report.remote().future())
            except (RayError, TimeoutError) as error:
                self._lose(describe(error))
                return
            children = {child.pid: child for child in self.children}
            for state in states:
                if state.pid in children:
                    children[state.pid].update(state)

    def _lose(self, reason: str) -> None:
        """Record that the actor is lost. If there are other replicas, they continue its requests."""
        text = f"the Ray node of replica {self._number} is lost: {reason.splitlines()[0]}"
        for child in self.children.copy():
            child.lose(text, is_final=self._places.num_replicas > 1)

    def _end_host(self) -> None:
        if ray.is_initialized():  # at the exit of the program, Ray may have ended before the engine
            self._host.close.remote()


class _ImageSender(ListeningSender):
    """Sends images by value, because their files are on this machine."""

    def send(self, messages: list[Message]) -> None:
        super().send([with_images(message) for message in messages])


def with_images(message: Message) -> Message:
    """Return the message with the content of its image files.

    Raises:
        UnencodableError: the images are too large.
    """
    if not isinstance(message, Submit) or not message.media:
        return message
    try:
        media = [replace(media, data=Path(media.path).read_bytes()) for media in message.media]
    except FileNotFoundError:  # the request has ended
        return message
    if (num_bytes := sum(len(image.data) for image in media)) > _MAX_IMAGE_BYTES:
        raise UnencodableError(f"its prepared images take {num_bytes:,} bytes, and {_MAX_IMAGE_BYTES:,} can be sent")
    return replace(message, media=media)
