"""Starts children as processes: new interpreters that end with their parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial

from aioengine.errors import EngineStartupError
from aioengine.file_descriptors import require_descriptors
from aioengine.protocol.messages import DETOKENIZER, SCHEDULER, Role
from aioengine.settings.config import Settings
from aioengine.supervision.launchers._child_folder import ChildFolder
from aioengine.supervision.launchers._process_child import KILL_WAIT_S, ProcessChild
from aioengine.supervision.tasks import WorkerThread, require_threads
from aioengine.transport.async_zmq import AsyncZmqReceiver
from aioengine.transport.zmq import Context, ZmqError, ZmqSender, end_context

_FRONTEND = "frontend"
_MAX_SPAWN_S = 5.0
_SHUT_DOWN = "the engine was shut down while it started"
_FOR_LAUNCH, _FOR_CHILD = 19, 4
"""Numbers of file descriptors: for the channels and the start of a process, and for each child."""
_ZMQ_THREADS = 2


class ProcessLauncher:
    """Opens the channels and starts each child in a process of its own. It is closed after the exit of the children.

    Attributes:
        children: the newest child of each role, also if a launch has failed. Always the same list.
        sender: sends to the scheduler. receiver: receives from all children. Both are set by ``launch``.
        epoch: of new children. The incarnation changes it.
    """

    def __init__(self, settings: Settings, roles: Sequence[Role]) -> None:
        """roles: one child is started for each role. SCHEDULER and DETOKENIZER are required."""
        self.children: list[ProcessChild] = []
        self.sender: ZmqSender
        self.receiver: AsyncZmqReceiver
        self._settings = settings
        self._roles = roles
        self.epoch = secrets.randbits(62)
        self._folder: ChildFolder
        self._closing = contextlib.ExitStack()
        self._uplinks: dict[Role, str] = {}  # role -> endpoint at which the child listens, to send to the frontend
        self._num_started = 0
        self._owner_pid = os.getpid()
        self._is_closed = False
        self._spawning: Future[None] | None = None
        # The kernel ends a child when the thread that started it ends, so threads of the program must not start
        # children. Also, duplicating a large process takes long, and would block the event loop.
        self._thread = WorkerThread[None]("aioengine-spawn")

    async def launch(self) -> None:
        """Start all children without waiting until they are ready.

        Raises:
            EngineStartupError: a child could not be started.
        """
        require_threads(_ZMQ_THREADS)  # libzmq aborts the program if it cannot start its threads
        require_descriptors(_FOR_LAUNCH + _FOR_CHILD * len(self._roles))
        try:
            context = Context()
            self._closing.callback(end_context, context)  # also closes a socket that was not opened completely
            self.receiver = AsyncZmqReceiver(context, self.epoch)
            self._closing.callback(self.receiver.close)
            await self._in_thread(self._spawn_all)
            self.sender = ZmqSender(
                context, self._folder.inboxes[SCHEDULER], self.epoch, receiver="the scheduler process"
            )
            self._closing.callback(self.sender.close)
            for endpoint in self._uplinks.values():
                self.receiver.attach(endpoint)
        except ZmqError as error:
            raise EngineStartupError(f"the engine's sockets could not be opened: {error}") from error

    async def launch_detokenizer(self) -> None:
        """Start another detokenizer without waiting until it is ready. Called after the scheduler's ``Ready``.

        Raises:
            EngineStartupError: it could not be started.
        """
        before = next(child for child in self.children if child.role == DETOKENIZER)
        self.receiver.disconnect(self._uplinks[DETOKENIZER])
        await self._in_thread(partial(self._spawn, DETOKENIZER))
        self.receiver.attach(self._uplinks[DETOKENIZER])
        before.close()
        self.children.remove(before)

    async def check_links(self) -> None:
        """Check that the children can connect to each other.

        Raises:
            EngineStartupError: they cannot, so messages between them would wait forever.
        """
        if not all((self._folder.path / str(role)).exists() for role in self._roles):
            raise EngineStartupError("the sockets of the engine's processes were removed from their folder")

    async def _in_thread(self, spawn: Callable[[], None]) -> None:
        self._spawning = self._thread.submit(spawn)
        try:
            await asyncio.shield(asyncio.wrap_future(self._spawning))
        except BaseException as error:  # cancelled, or the loop was closed
            self._wait_for_thread()
            if not (self._is_closed and isinstance(error, asyncio.CancelledError)):
                raise
        if self._is_closed:
            raise EngineStartupError(_SHUT_DOWN)

    def _wait_for_thread(self) -> None:
        """Wait for a start in progress, so that its child can be ended. A start takes milliseconds."""
        if self._spawning is not None:
            with contextlib.suppress(CancelledError, TimeoutError):
                self._spawning.exception(_MAX_SPAWN_S)

    def close(self) -> None:
        """Close the channels and remove all files. May be repeated."""
        if os.getpid() != self._owner_pid:
            return  # in a fork, everything belongs to the original process
        self._is_closed = True
        self._thread.close()
        self._wait_for_thread()
        for child in self.children:
            child.kill()  # it may have started after the others were killed
            child.reap(KILL_WAIT_S)
            child.close()
        self._closing.close()

    def _spawn_all(self) -> None:
        """Create the folder with the endpoints of all children, and start them. Runs in the thread."""
        try:
            self._folder = ChildFolder(self._settings, self._roles)
            self._closing.callback(self._folder.close)
        except OSError as error:
            raise EngineStartupError(f"the engine has no place for its sockets: {error}") from error
        for role in self._roles:
            if self._is_closed:
                raise EngineStartupError(_SHUT_DOWN)
            self._spawn(role)

    def _spawn(self, role: Role) -> None:
        """Start a child with its own endpoint for the frontend. Runs in the thread."""
        self._num_started += 1
        self._uplinks[role] = self._folder.endpoint(f"{_FRONTEND}-{self._num_started}")
        self.children.append(self._folder.start(role, self.epoch, self._uplinks[role]))


PLUGIN = ProcessLauncher
