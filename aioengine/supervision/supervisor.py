"""Supervisor: runs the children of one replica, carries messages, and replaces children that were lost.

A scheduler that dies or stalls is replaced together with the detokenizer; a detokenizer is replaced alone where that is
possible. The children hold no state that the ledger does not have, except the weights and the prefix cache, so the
frontend notices a replacement only by the time that it takes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

from aioengine import plugins
from aioengine.api import checks
from aioengine.errors import EngineClosedError, EngineError
from aioengine.logs import log, warn
from aioengine.protocol.messages import SCHEDULER, Reply, Stats, TextChunks, Totals
from aioengine.protocol.orders import ROLES
from aioengine.supervision.incarnation import Incarnation, Loss
from aioengine.supervision.ledger import Blame, Ledger
from aioengine.supervision.tasks import EngineTask

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from aioengine.protocol.messages import Role, ToFrontend, ToScheduler
    from aioengine.settings.config import Settings, SupervisionConfig
    from aioengine.supervision.launchers._base import Launcher
    from aioengine.supervision.processes import Events, ProcessState

logger = logging.getLogger(__name__)

_POLITE_PART: Final = 0.6
"""The part of the time for ``stop`` that children have to exit by themselves."""

_PATIENCE: Final = 10.0
_MIN_PATIENCE_S: Final = 60.0
"""Replacements that are not ready after this many times the duration of the first start, and this long, hang."""

_MIN_RETRY_S: Final = 0.1
_MAX_RETRY_S: Final = 3.0
"""The pause after a replacement that could not start; it doubles each time, since a shortage may pass."""

_TICK_S: Final = 0.05
"""How often the deadlines of requests that wait in the ledger are checked."""


class Supervisor:
    """Owns the children of one replica, from ``start`` to ``stop``, on one loop.

    A child that dies, or gives no sign of life for ``stall_timeout_s``, is replaced, and requests go on where they
    were; up to ``max_restarts`` times within ``restart_window_s``. Losses that one request causes again and again do
    not count; that request ends with an error. After more losses, and where messages cannot be handled, ``on_failure``
    is called and the children are killed; ``stop`` is still to be called.

    Attributes:
        num_restarts: how often children were replaced.
    """

    def __init__(
        self,
        settings: Settings,
        limits: SupervisionConfig,
        *,
        launcher: str,
        events: Events,
        roles: Sequence[Role] = ROLES,
    ) -> None:
        """``launcher``: the name of a plug-in of ``launchers/``. ``roles``: one child is started for each."""
        self._settings = settings
        self._roles = roles
        self._limits = limits
        # Loaded now: at a replacement no file descriptor may be free to look for it, or the package may be gone.
        self._launcher_class: type[Launcher] = plugins.load("supervision/launchers", launcher)
        self._events = events
        self._ledger = Ledger()
        self._window = RestartWindow(limits.max_restarts, limits.restart_window_s)
        self._totals = RisingTotals()
        self._startup_timeout_s = limits.startup_timeout_s
        self._incarnation = self._make()
        self._recovery: EngineTask | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.num_restarts = 0
        self._owner_pid = os.getpid()
        self._is_started = False
        self._is_ended = False  # from the failure, stop or kill on

    async def start(self) -> dict[str, object]:
        """Start the children, wait until all are ready, and return their facts. Once only.

        Raises:
            EngineStartupError: with the child's own message, and its traceback as a note; none is left running.
        """
        began_at = time.monotonic()
        facts = await self._incarnation.start(self._events.on_progress)
        self._is_started = True
        took_s = time.monotonic() - began_at
        self._startup_timeout_s = min(self._startup_timeout_s, max(_MIN_PATIENCE_S, _PATIENCE * took_s))
        # Replacements get a pool of the same size, which was published, whatever memory is free by then.
        if isinstance(num_tokens := facts.get("max_total_tokens"), int):
            num_pages = num_tokens // self._settings.memory.page_size
            memory = msgspec.structs.replace(self._settings.memory, num_pages=num_pages)
            self._settings = msgspec.structs.replace(self._settings, memory=memory)
        return facts

    def send(self, messages: Sequence[ToScheduler]) -> None:
        """Send to the scheduler, or keep for the next one. Does nothing after the end.

        Raises:
            EngineClosedError: before the start.
        """
        if self._is_ended:
            return
        if not self._is_started:
            raise EngineClosedError("the engine's processes are not started yet")
        if due := self._ledger.record(messages, time.monotonic()):
            self._incarnation.send(due)
        if self._ledger.holds_back:
            self._report_later()

    async def stop(self, timeout_s: float) -> None:
        """End the children: ask, then kill; all within about ``timeout_s``. Harmless when repeated or never started."""
        self._is_ended = True
        recovery, self._recovery = self._recovery, None
        if recovery is not None:
            await recovery.stop()
        await self._incarnation.end(timeout_s * _POLITE_PART)

    def kill_now(self) -> None:
        """End the children at once and without a loop, for the end of the interpreter and for forgotten engines.

        Does nothing in a fork of this process: the children belong to the original.
        """
        if os.getpid() != self._owner_pid:
            return
        self._is_ended = True
        if self._recovery is not None:
            self._recovery.cancel()
        self._incarnation.kill_now()

    def hand_over(self, error: EngineError) -> tuple[list[ToFrontend], list[ToScheduler], dict[int, int]]:
        """After ``on_failure`` with this error: last messages, and the open requests, for another replica.

        Then the suspects among them, for its ``adopt``.
        """
        requests, suspects = self._ledger.hand_over(_describe(error), time.monotonic())
        return self._ledger.take_reports(), requests, suspects

    def adopt(self, suspects: Mapping[int, int]) -> None:
        """Requests that are sent next are suspects of another replica."""
        self._ledger.adopt(suspects)

    def processes(self) -> list[ProcessState]:
        """Every child as it is now."""
        return self._incarnation.processes()

    def rows_in_flight(self) -> Collection[int]:
        """The uids of the requests in the steps that the scheduler process computes now."""
        return self._incarnation.rows_in_flight(SCHEDULER)

    @property
    def is_recovering(self) -> bool:
        """Whether requests wait for new children."""
        return not self._ledger.is_connected and not self._is_ended

    # ------------------------------------------------------------ from the children

    def _make(self) -> Incarnation:
        return Incarnation(
            self._settings,
            self._roles,
            self._launcher_class,
            startup_timeout_s=self._startup_timeout_s,
            stall_timeout_s=self._limits.stall_timeout_s,
            on_messages=self._receive,
            on_loss=self._lose,
        )

    def _receive(self, messages: list[ToFrontend]) -> None:
        """Record what is delivered, and deliver it."""
        for index, message in enumerate(messages):
            if isinstance(message, TextChunks):
                if due := self._ledger.receive(message):
                    self._incarnation.send(due)
            elif isinstance(message, Stats):
                messages[index] = self._totals.add(message)
            elif isinstance(message, Reply):
                self._ledger.calls.receive(message)
        self._events.on_messages(messages)

    def _report_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._report_waiting)

    def _report_waiting(self) -> None:
        """Deliver what no child will report: ends of requests that wait here, and replies to calls that were lost."""
        self._timer = None
        if self._is_ended:
            return
        self._ledger.expire(time.monotonic())
        if reports := self._ledger.take_reports():
            self._events.on_messages(reports)
        if self._ledger.holds_back:
            self._report_later()

    # ------------------------------------------------------------ losses

    def _lose(self, loss: Loss) -> None:
        """A child is lost: start a recovery, or fail."""
        if self._is_ended:
            return
        try:
            may_recover = self._may_recover(loss)
        except Exception as error:  # every call would wait for a recovery that never begins
            loss.error.__cause__ = error
            may_recover = False
        if not may_recover:
            self._fail(loss.error)
            return
        self._report_later()
        self._recovery = EngineTask(self._recover(loss), name="aioengine-recovery", on_failure=self._fail)
        num_open = checks.counted(self._ledger.num_open, "request")
        warn(logger, "%s; new processes continue %s", _describe(loss.error), num_open)

    def _may_recover(self, loss: Loss) -> bool:
        """Whether the loss is one of ``max_restarts``, or caused by a request and so not counted."""
        now = time.monotonic()
        blame = self._ledger.crash(loss.rows, _describe(loss.error), now, is_scheduler_lost=not loss.is_mendable)
        if loss.is_final or not self._limits.max_restarts:
            return False
        if blame is Blame.GUILTY:
            self._window.give_back()
        return blame is not Blame.NOBODY or self._window.take(now)

    async def _recover(self, loss: Loss) -> None:
        """Replace the lost children. A start that fails counts as another loss of all.

        But a failed mend does not count: the scheduler was lost together with the detokenizer.
        """
        is_mendable, pause_s = loss.is_mendable, _MIN_RETRY_S
        while not self._is_ended:
            try:
                await (self._incarnation.mend() if is_mendable else self._replace_all())
            except Exception as startup_error:  # of any kind: every call would wait for ever
                if not is_mendable and not self._window.take(time.monotonic()):
                    loss.error.__cause__ = startup_error
                    self._fail(loss.error)
                    return
                warn(logger, "the engine's processes could not be replaced, trying again: %s", startup_error)
                if not is_mendable:
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _MAX_RETRY_S)
                is_mendable = False
                continue
            if not self._is_ended:  # which ``kill_now`` does on another thread
                self.num_restarts += is_mendable
                self._recovery = None
                num_open = checks.counted(self._ledger.num_open, "request")
                log(logger, logging.INFO, "the lost processes are replaced; the new ones continue %s", num_open)
                self._incarnation.send(self._ledger.replay())
            return

    async def _replace_all(self) -> None:
        """End the remaining children and start new ones.

        Raises:
            EngineStartupError: one could not start; none is left running.
        """
        await self._incarnation.end(polite_s=0.0)
        if self._is_ended:  # which ``kill_now`` does on another thread
            return
        self._incarnation = self._make()
        self._totals.restart()
        self.num_restarts += 1
        await self._incarnation.start()

    def _fail(self, error: EngineError) -> None:
        """End everything and report the failure, once."""
        if self._is_ended:
            return
        self._is_ended = True
        if self._window.num_taken:
            error.add_note(
                f"its processes were replaced {self._window.num_taken} times within "
                f"{self._window.window_s:g} seconds, which is all that max_restarts={self._window.max_restarts} allows"
            )
        try:
            self._incarnation.give_up(with_engine=True)
        finally:
            self._events.on_failure(error)


class RestartWindow:
    """How many restarts are allowed within a time."""

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self.max_restarts = max_restarts
        self.window_s = window_s
        self._times: deque[float] = deque()

    @property
    def num_taken(self) -> int:
        """Restarts that counted at the last ``take``."""
        return len(self._times)

    def take(self, now: float) -> bool:
        """Count a restart; False where there were too many."""
        while self._times and self._times[0] <= now - self.window_s:
            self._times.popleft()
        if len(self._times) >= self.max_restarts:
            return False
        self._times.append(now)
        return True

    def give_back(self) -> None:
        """Do not count the last restart: a single request caused it."""
        if self._times:
            self._times.pop()


class RisingTotals:
    """Keeps the totals of ``Stats`` from falling when a new scheduler counts from 0."""

    def __init__(self) -> None:
        self._before = self._last = dict.fromkeys(Totals.__struct_fields__, 0)

    def add(self, stats: Stats) -> Stats:
        """The same with the counts of earlier schedulers."""
        counts: dict[str, int] = msgspec.structs.asdict(stats)
        self._last = {name: counts[name] + before for name, before in self._before.items()}
        return msgspec.structs.replace(stats, **self._last)

    def restart(self) -> None:
        """A new scheduler counts from 0."""
        self._before = self._last


def _describe(error: EngineError) -> str:
    """The failure in one line."""
    return str(error).partition(";")[0]
