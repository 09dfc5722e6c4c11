"""The children as processes: fresh interpreters that end with their parent and are heard of when they die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
from concurrent.futures import CancelledError, Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from aioengine.errors import EngineStartupError
from aioengine.file_descriptors import SpareDescriptors
from aioengine.protocol.board import blank_board
from aioengine.protocol.messages import DETOKENIZER, SCHEDULER, NewEpoch, Role
from aioengine.protocol.orders import Orders, encode_orders
from aioengine.supervision.family import KILL_WAIT_S
from aioengine.supervision.launchers._process_child import ProcessChild
from aioengine.supervision.tasks import WorkerThread, require_threads
from aioengine.transport.addresses import BOARD_SUFFIX, Listener, PrivateDirectory, is_reachable, listen
from aioengine.transport.zmq import FREE_TO_ACCEPT, AsyncZmqReceiver, AsyncZmqSender, Context, ZmqError, end_context

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aioengine.config import Settings
    from aioengine.supervision.launchers._base import RunningChild

_BOOTSTRAP = Path(__file__).resolve().parents[2] / "processes" / "bootstrap.py"
_FRONTEND = "frontend"
_EPOCH_BITS = 62
_MAX_SPAWN_S = 5.0
_SHUT_DOWN = "the engine was shut down while it started"
# Descriptors: those that a launcher uses when it runs, with those that it needs for a moment only, and those that it
# holds back. With the latter and its own, it leaves enough for the launcher that follows it.
_FOR_DIRECTORY = 1
_FOR_INBOX = 1
_FOR_PROCESS, _FOR_PROCESS_ALONE = 2, 6
_FOR_CHANNELS, _FOR_CHANNEL = 8, 1
_HELD_BACK = 16
_ZMQ_THREADS = 2


class ProcessLauncher:
    """Starts each child in a process of its own."""

    def __init__(self, settings: Settings, roles: Sequence[Role]) -> None:
        self.children: list[RunningChild] = []
        self.sender: AsyncZmqSender
        self.receiver: AsyncZmqReceiver
        self._settings = settings
        self._roles = roles
        self._epoch = secrets.randbits(_EPOCH_BITS)
        self._directory: PrivateDirectory | None = None
        self._context: Context | None = None
        self._ends: list[AsyncZmqSender | AsyncZmqReceiver] = []
        self._inboxes: dict[Role, str] = {}  # role -> the endpoint at which it listens
        self._uplinks: dict[Role, str] = {}  # role -> the endpoint at which the frontend listens to it
        self._listeners: dict[str, Listener] = {}  # endpoint -> its listener, while this object owns that
        self._num_started = 0
        self._owner_pid = os.getpid()
        self._is_closed = False
        self._spawning: Future[None] | None = None
        self._processes: list[ProcessChild] = []
        # The kernel ends a child when the thread that started it ends, so this is none of the program's threads. Nor
        # does the event loop wait while a large process is duplicated.
        self._thread = WorkerThread[None]("aioengine-spawn")
        self._spare = SpareDescriptors()
        # Now, when the launcher of lost processes has just closed its own; ``launch`` finds out whether they suffice.
        self._spare.hold(self._num_needed + _HELD_BACK)

    @property
    def _num_needed(self) -> int:
        for_each = _FOR_INBOX + _FOR_PROCESS + _FOR_CHANNEL
        return _FOR_DIRECTORY + len(self._roles) * for_each + _FOR_CHANNELS + _FOR_PROCESS_ALONE + FREE_TO_ACCEPT

    async def launch(self) -> None:
        self._spare.require(self._num_needed)
        await self._in_thread(self._spawn_all)
        num_used = _FOR_CHANNELS + len(self._roles) * _FOR_CHANNEL
        self._spare.require(num_used + FREE_TO_ACCEPT)
        require_threads(_ZMQ_THREADS)  # where it finds too few, libzmq ends the program
        try:
            with self._spare.lent(num_used, used=num_used):
                self._open_channels(Context())
        except ZmqError as error:
            raise EngineStartupError(f"the engine's sockets could not be opened: {error}") from error
        self._spare.free(keep=_HELD_BACK)

    def _open_channels(self, context: Context) -> None:
        self._context = context
        self.sender = AsyncZmqSender(context, self._inboxes[SCHEDULER], self._epoch, reader="it")
        self._ends.append(self.sender)
        self.receiver = AsyncZmqReceiver(context, self._epoch, spare=self._spare)
        self._ends.append(self.receiver)
        for endpoint in self._uplinks.values():
            self.receiver.expect(self._listeners.pop(endpoint))

    async def begin_epoch(self) -> None:
        self._epoch = secrets.randbits(_EPOCH_BITS)
        self.sender.send([NewEpoch(self._epoch)])
        self.sender.begin(self._epoch)
        self.receiver.begin(self._epoch)

    async def launch_detokenizer(self) -> None:
        before = next(process for process in self._processes if process.role == DETOKENIZER)
        self.receiver.forget(self._uplinks[DETOKENIZER])
        await self._in_thread(partial(self._spawn, DETOKENIZER))
        self.receiver.expect(self._listeners.pop(self._uplinks[DETOKENIZER]))
        before.close()
        self._spare.hold(_HELD_BACK)
        self._processes.remove(before)
        self.children.remove(before)

    async def check_links(self) -> None:
        # The children have connected to each other by these names if they are still there.
        if not all(is_reachable(endpoint) for endpoint in self._inboxes.values()):
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
        """Starting takes milliseconds; whatever starts must be known to whoever cleans up."""
        if self._spawning is not None:
            with contextlib.suppress(CancelledError, TimeoutError):
                self._spawning.exception(_MAX_SPAWN_S)

    def close(self) -> None:
        if os.getpid() != self._owner_pid:
            return  # in a fork; all this is the original's
        self._is_closed = True
        self._thread.close()
        self._wait_for_thread()
        for process in self._processes:
            process.kill()  # started while the others were killed
            process.reap(KILL_WAIT_S)
            process.close()
        context, self._context = self._context, None
        if context is not None:
            for end in self._ends:
                end.close()
            end_context(context)  # also a socket that could not be opened as a whole
        self._close_listeners()
        self._spare.free()
        if self._directory is not None:
            self._directory.remove()

    def _spawn_all(self) -> None:
        """In the thread: make the directory, listen for every child, start all."""
        num_used = _FOR_DIRECTORY + len(self._roles) * _FOR_INBOX
        try:
            with self._spare.lent(num_used + 1, used=num_used):
                self._directory = PrivateDirectory()
                self._inboxes = {role: self._listen(str(role)) for role in self._roles}
        except OSError as error:
            raise EngineStartupError(f"the engine has no place for its sockets: {error}") from error
        for role in self._roles:
            if self._is_closed:
                raise EngineStartupError(_SHUT_DOWN)
            self._spawn(role)
        for role, endpoint in self._inboxes.items():
            if role != DETOKENIZER:  # the next detokenizer needs this one
                os.close(self._listeners.pop(endpoint).fd)

    def _listen(self, name: str) -> str:
        assert self._directory is not None
        listener = listen(self._directory.path, name)
        self._listeners[listener.endpoint] = listener
        return listener.endpoint

    def _orders(self, role: Role, board_path: Path) -> Orders:
        """With a board and an endpoint of the frontend for this child alone."""
        scheduler = self._settings.scheduler
        board_path.write_bytes(blank_board(scheduler.depth + 1, scheduler.max_running))
        self._num_started += 1
        self._uplinks[role] = self._listen(f"{_FRONTEND}-{self._num_started}")
        return Orders(
            role=role,
            epoch=self._epoch,
            frontend=self._uplinks[role],
            endpoints={str(role): endpoint for role, endpoint in self._inboxes.items()},
            listener_fd=self._listeners[self._inboxes[role]].fd,
            board=str(board_path),
            parent_pid=os.getpid(),
            settings=self._settings,
        )

    def _close_listeners(self) -> None:
        while self._listeners:
            os.close(self._listeners.popitem()[1].fd)

    def _spawn(self, role: Role) -> None:
        assert self._directory is not None
        log_path = Path(self._directory.path) / f"{role}.log"
        command = [_interpreter(role), "-P", str(_BOOTSTRAP), f"aioengine::{role}"]
        try:
            with self._spare.lent(_FOR_PROCESS + _FOR_PROCESS_ALONE, used=_FOR_PROCESS):
                orders = self._orders(role, log_path.with_suffix(BOARD_SUFFIX))
                with log_path.open("wb") as log:
                    popen = subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=log,
                        pass_fds=(orders.listener_fd,),
                        cwd=self._directory.path,  # the program's own may be removed, and libraries need one
                        start_new_session=True,  # Ctrl-C in the terminal is the parent's business
                    )
        except OSError as error:
            raise EngineStartupError(f"the {role} process could not be started with {command[0]!r}: {error}") from error
        process = ProcessChild(role, popen, log_path, self._spare)
        self._processes.append(process)
        self.children.append(process)
        assert popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once, which its exit tells
            path = b"\0".join(os.fsencode(entry) for entry in import_path())
            popen.stdin.write(b"%d\n%s%s\n" % (len(path), path, encode_orders(orders)))
            popen.stdin.flush()


def _interpreter(role: Role) -> str:
    """The Python that runs this program; a program into which Python is embedded may have none."""
    if not isinstance(sys.executable, str) or not sys.executable:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise EngineStartupError(
            f"the {role} process needs a Python interpreter, and sys.executable is {sys.executable!r}; "
            "set it to the path of one that has the packages of this program"
        )
    return sys.executable


def import_path() -> list[str]:
    """Where this program finds modules, in its order, for the children.

    The folders of the script and the working directory come last: files lie there that are no libraries, and a module
    that children alone import, of such a name, is not meant to be taken from there.
    """
    try:
        here = os.getcwd()
    except OSError:  # it was removed: nothing relative can be found any more
        here = ""
    main = sys.modules.get("__main__")
    script = vars(main).get("__file__") if main is not None else None
    incidental = {here, os.path.dirname(os.path.realpath(script)) if isinstance(script, str) else here}
    entries = [entry for entry in sys.path if _may_name_folder(entry)]
    absolute = [os.path.normpath(os.path.join(here, entry)) for entry in entries if here or os.path.isabs(entry)]
    return sorted(absolute, key=incidental.__contains__)


def _may_name_folder(entry: object) -> bool:
    """Whether an entry of ``sys.path`` counts. Python itself ignores whatever cannot be a path."""
    if not isinstance(entry, str) or "\0" in entry:
        return False
    try:
        os.fsencode(entry)
    except UnicodeEncodeError:
        return False
    return True


PLUGIN = ProcessLauncher
