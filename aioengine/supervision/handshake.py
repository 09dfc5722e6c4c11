"""From the start of the children to the moment when all of them are ready, or one of them says why it is not."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import msgspec

from aioengine.errors import EngineStartupError, describe_exit
from aioengine.protocol.codec import fingerprint
from aioengine.protocol.messages import Failed, Progress, Ready

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aioengine.protocol.messages import Role
    from aioengine.supervision.launchers._base import RunningChild

# A child that fails says why just before it ends; its words may arrive after the news of its end.
_LAST_WORDS_S = 0.3


class Handshake:
    """Waits for one ``Ready`` of each role; the first thing that goes wrong ends it."""

    def __init__(self, roles: Iterable[Role]) -> None:
        self._waiting_for = set(roles)
        self._facts: dict[str, object] = {}
        self._progress: dict[str, str] = {}
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_over(self) -> bool:
        return self._done.done()

    async def wait(self, timeout_s: float) -> dict[str, object]:
        """The facts of all children together.

        Raises:
            EngineStartupError: a child failed, died, speaks another protocol, or took longer than ``timeout_s``.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._done
        except TimeoutError:
            raise EngineStartupError(self._describe_timeout(timeout_s)) from None
        return self._facts

    def take(self, message: Ready | Failed | Progress) -> None:
        """A child said something about its start."""
        if isinstance(message, Progress):
            self._progress[message.label] = f"{message.label}: {message.done} of {message.total} {message.unit}"
        elif isinstance(message, Failed):
            self._fail(_describe_failed(message))
        elif message.fingerprint != fingerprint():
            self._fail(
                f"the {message.role} process (pid {message.pid}) runs another version of aioengine: its protocol is "
                f"{message.fingerprint}, ours {fingerprint()}; restart this program after an upgrade"
            )
        else:
            self._facts.update(msgspec.json.decode(message.facts, type=dict[str, object]))
            self._waiting_for.discard(message.role)
            if not self._waiting_for and not self._done.done():
                self._done.set_result(None)

    def child_ended(self, child: RunningChild) -> None:
        """A child ended before all were ready."""
        code, log_lines = child.exit_code, child.log_lines()
        text = f"the {child.role} process (pid {child.pid}) {describe_exit(code)}{_hint(code)} while it started"
        if not log_lines:
            text += "; it wrote nothing that says why"
        text = "\n".join([text, *(f"  {child.role}: {line}" for line in log_lines)])
        asyncio.get_running_loop().call_later(_LAST_WORDS_S, self._fail, text)

    def broke(self, error: BaseException) -> None:
        """The messages of the children cannot be read any more."""
        self._fail(f"messages of the starting processes could not be handled: {type(error).__name__}: {error}")

    def give_up(self) -> None:
        """Nobody wants the children any more."""
        self._fail("the engine was shut down while it started")

    def _fail(self, text: str) -> None:
        if not self._done.done() and not self._done.get_loop().is_closed():
            self._done.set_exception(EngineStartupError(text))
            self._done.exception()  # may come when nobody waits any more

    def _describe_timeout(self, timeout_s: float) -> str:
        roles = " and ".join(sorted(map(str, self._waiting_for)))
        were = "process was" if len(self._waiting_for) == 1 else "processes were"
        text = f"the {roles} {were} not ready within {timeout_s:g} seconds"
        if self._progress:
            text += "; it had come to " + ", ".join(self._progress.values())
        return text + "; a first start gets more time with startup_timeout"


def _hint(code: int | None) -> str:
    return " (perhaps for want of memory)" if code == -signal.SIGKILL else ""


def _describe_failed(message: Failed) -> str:
    text = f"the {message.role} process could not start: {message.error_type}: {message.message}"
    return f"{text}\n{message.traceback}".rstrip()
