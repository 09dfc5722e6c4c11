"""Runs the children as tasks of the caller's event loop, without processes. For tests and debugging.

Services and frames are the same as in processes. A step blocks the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import secrets
import time
import traceback
from collections.abc import Callable, Sequence

import msgspec

from aioengine.protocol.codec import fingerprint, new_epoch_in
from aioengine.protocol.messages import DETOKENIZER, SCHEDULER, Failed, Progress, Ready, Role
from aioengine.protocol.service import Service
from aioengine.settings.config import Settings
from aioengine.transport.local import LocalReceiver, LocalSender


class InlineChild:
    """A service that runs as a task. It receives from ``inbox``, and sends to ``peer`` and ``frontend``.

    It has the methods of ``ProcessChild``.
    """

    final_reason = ""

    def __init__(
        self, role: Role, settings: Settings, *, inbox: LocalReceiver, peer: LocalSender, frontend: LocalSender
    ) -> None:
        self.role = role
        self.pid = os.getpid()
        self.exited = asyncio.Event()
        self._on_exit: Callable[[], None] | None = None
        self._inbox = inbox
        self._peer = peer
        self._frontend = frontend
        self._log: tuple[str, ...] = ()
        self._task = asyncio.create_task(self._run(settings), name=f"aioengine-{role}")

    @property
    def is_alive(self) -> bool:
        return not self._task.done()

    @property
    def exit_code(self) -> int | None:
        return None if self.is_alive else int(bool(self._log))

    def watch(self, on_exit: Callable[[], None]) -> None:
        if self._on_exit is None:
            self._on_exit = on_exit
            self._task.add_done_callback(self._ended)

    def _ended(self, _: asyncio.Task[None]) -> None:
        self.exited.set()
        if self._on_exit is not None:
            self._on_exit()

    def terminate(self) -> None:
        if not self._task.get_loop().is_closed():
            self._task.cancel()

    kill = terminate

    def reap(self, timeout_s: float) -> None:
        """Does nothing: a task ends with its loop."""

    def log_lines(self) -> tuple[str, ...]:
        return self._log

    def uids_in_flight(self) -> dict[int, int]:
        """Return {}, because a task ends between two steps."""
        return {}

    def _report_ready(self, service: Service) -> None:
        facts = msgspec.json.encode(dict(service.facts)).decode()
        self._frontend.send([Ready(self.role, self.pid, fingerprint(), facts)])

    def _report_progress(self, progress: Progress) -> None:
        self._frontend.send([progress])

    async def _run(self, settings: Settings) -> None:
        try:
            module = importlib.import_module(f"aioengine.processes.{self.role.name}_process")
            if self.role == DETOKENIZER:
                service: Service = module.build_service(settings)
            else:
                service = module.build_service(settings, self._report_progress)
            self._report_ready(service)
            try:
                await self._serve(service)
            finally:
                service.close()
        except Exception as error:
            text = traceback.format_exc()
            self._log = tuple(text.splitlines())
            self._frontend.send([Failed(self.role, type(error).__name__, str(error), text)])

    async def _serve(self, service: Service) -> None:
        now = time.monotonic()
        while True:
            wait_s = service.wait_s(now)
            messages = self._inbox.drain()
            if not messages and wait_s > 0:
                # (``wait_for`` of Python 3.11 forgets a cancellation that comes together with a message.)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        messages = await self._inbox.receive()
            else:
                await asyncio.sleep(0)
            now = time.monotonic()
            if messages and (new_epoch := new_epoch_in(messages)):
                for end in (self._inbox, self._peer, self._frontend):
                    end.begin(new_epoch.epoch)
                service.handle([new_epoch], now)
                self._report_ready(service)
            elif messages:
                service.handle(messages, now)
            outbox = service.step(now)
            if outbox.to_peer:
                self._peer.send(outbox.to_peer)
            if outbox.to_frontend:
                self._frontend.send(outbox.to_frontend)


class InlineLauncher:
    """Runs the services as tasks. It has the methods of ``ProcessLauncher``."""

    def __init__(self, settings: Settings, roles: Sequence[Role]) -> None:
        self._settings = settings
        self.epoch = secrets.randbits(32)
        self.receiver = LocalReceiver(self.epoch)
        self._inboxes = {role: LocalReceiver(self.epoch) for role in roles}
        self.children: list[InlineChild] = []
        self.sender = LocalSender(self._inboxes[SCHEDULER], self.epoch)

    async def launch(self) -> None:
        for role in self._inboxes:
            self._start(role)

    async def check_links(self) -> None:
        """Does nothing: channels inside a loop do not break."""

    async def launch_detokenizer(self) -> None:
        self.children[:] = [child for child in self.children if child.role != DETOKENIZER]
        self._inboxes[DETOKENIZER].begin(self.epoch)
        self._start(DETOKENIZER)

    def _start(self, role: Role) -> None:
        peer = LocalSender(self._inboxes[SCHEDULER if role == DETOKENIZER else DETOKENIZER], self.epoch)
        frontend = LocalSender(self.receiver, self.epoch)
        inbox = self._inboxes[role]
        self.children.append(InlineChild(role, self._settings, inbox=inbox, peer=peer, frontend=frontend))

    def close(self) -> None:
        for receiver in (self.receiver, *self._inboxes.values()):
            receiver.close()


PLUGIN = InlineLauncher
