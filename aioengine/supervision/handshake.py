"""Handshake: waits until all started children are ready, or one of them has failed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING

import msgspec

from aioengine.errors import EngineStartupError, describe_exit
from aioengine.protocol.codec import fingerprint
from aioengine.protocol.messages import Failed, Progress, Ready, Role

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aioengine.supervision.launchers._base import RunningChild

# A child that fails reports the reason just before it exits. The report may arrive after the exit is noticed.
_LAST_MESSAGE_S = 0.3


class Handshake:
    """Waits for a ``Ready`` from each role. The first failure ends the wait."""

    def __init__(self, roles: Iterable[Role]) -> None:
        self._waiting_for = set(roles)
        self._facts: dict[str, object] = {}
        self._progress: dict[str, str] = {}
        self._error: EngineStartupError | None = None
        self._done = asyncio.Event()
        if not self._waiting_for:
            self._done.set()

    async def wait(self, timeout_s: float) -> dict[str, object]:
        """Wait until all children are ready. Return their facts as one dict.

        Raises:
            EngineStartupError: a child failed or died, has another protocol version, or took longer than ``timeout_s``.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._done.wait()
        except TimeoutError:
            roles = " and ".join(sorted(map(str, self._waiting_for)))
            were = "process was" if len(self._waiting_for) == 1 else "processes were"
            text = f"the {roles} {were} not ready within {timeout_s:g} seconds"
            if self._progress:
                text += "; the last progress was " + ", ".join(self._progress.values())
            raise EngineStartupError(text + "; a first start gets more time with startup_timeout") from None
        if self._error is not None:
            raise self._error
        return self._facts

    def receive(self, message: Ready | Failed | Progress) -> None:
        """Record a message from a starting child. After the end of the wait, messages are ignored."""
        if self._done.is_set():
            return
        if isinstance(message, Progress):
            self._progress[message.label] = f"{message.label}: {message.done} of {message.total} {message.unit}"
        elif isinstance(message, Failed):
            text = f"the {message.role} process could not start: {message.error_type}: {message.message}"
            self.fail(text, message.traceback)
        elif message.fingerprint != fingerprint():
            self.fail(
                f"the {message.role} process (pid {message.pid}) runs another version of aioengine: its protocol is "
                f"{message.fingerprint}, ours {fingerprint()}; restart this program after an upgrade"
            )
        else:
            self._facts.update(msgspec.json.decode(message.facts, type=dict[str, object]))
            self._waiting_for.discard(message.role)
            if not self._waiting_for:
                self._done.set()

    def child_ended(self, child: RunningChild) -> None:
        """Record the exit of a child. The wait fails after a delay, unless the child's own report arrives first."""
        code, log_lines = child.exit_code, child.log_lines()
        hint = " (perhaps because memory was short)" if code == -signal.SIGKILL else ""
        text = f"the {child.role} process (pid {child.pid}) {describe_exit(code)}{hint} while it started"
        if not log_lines:
            text += "; its log is empty"
        text = "\n".join([text, *(f"  {child.role}: {line}" for line in log_lines)])
        asyncio.get_running_loop().call_later(_LAST_MESSAGE_S, self.fail, text)

    def fail(self, text: str, note: str = "") -> None:
        """End the wait with an error, unless it has ended. note: shown below the error, such as a traceback."""
        if not self._done.is_set():
            self._error = EngineStartupError(text)
            if note:
                self._error.add_note(note.rstrip())
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._done.set()
