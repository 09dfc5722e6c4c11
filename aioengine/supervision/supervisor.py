"""Supervisor: runs the children of one replica, passes messages on, and replaces lost children.

If the scheduler dies or stalls, it is replaced together with the detokenizer. If only the detokenizer is lost, it is
replaced alone if possible. Except for the weights and the prefix cache, the ledger has all state of the children, so
the frontend notices a replacement only as a delay.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable  # a field of a Struct
from typing import TYPE_CHECKING, Final

import msgspec

from aioengine import plugins
from aioengine.api import checks
from aioengine.errors import EngineError
from aioengine.logs import log, warn
from aioengine.protocol.messages import SCHEDULER, Progress, Reply, Stats, TextChunks, ToFrontend, Totals
from aioengine.protocol.orders import ROLES
from aioengine.supervision.incarnation import Incarnation, Loss, ProcessState
from aioengine.supervision.ledger import CrashCause, Ledger
from aioengine.supervision.tasks import EngineTask

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from aioengine.protocol.messages import Role, ToScheduler
    from aioengine.settings.config import LoadedWeights, Settings, SupervisionConfig
    from aioengine.supervision.incarnation import MakeLauncher

logger = logging.getLogger(__name__)

_EXIT_FRACTION: Final = 0.6
"""The fraction of the timeout of ``stop`` after which children that have not exited are killed."""

_STARTUP_TIMEOUT_FACTOR: Final = 10.0
_MIN_STARTUP_TIMEOUT_S: Final = 60.0
"""The start of a replacement times out after the duration of the first start times the factor, or after the minimum if
that is longer."""

_MIN_RETRY_S: Final = 0.1
_MAX_RETRY_S: Final = 3.0
"""The pause before a failed replacement is tried again. It doubles each time, because the cause may be temporary, such
as a lack of memory."""

_TICK_S: Final = 0.05
"""The interval in which the deadlines of requests in the ledger are checked."""


class Events(msgspec.Struct):
    """Callbacks of a supervisor or a fleet. They run on the event loop of ``start``, and may be replaced at any time.

    on_messages: receives ``TextChunks``, ``Stats`` and ``Reply``. on_progress: receives the progress of a start.
    on_failure: called once if the engine fails. on_launch: called once, when all children are started but not ready.
    """

    on_messages: Callable[[list[ToFrontend]], None]
    on_failure: Callable[[EngineError], None]
    on_progress: Callable[[Progress], None]
    on_launch: Callable[[], None]


class Supervisor:
    """Owns the children of one replica from ``start`` to ``stop``. Belongs to one event loop.

    A child that dies, or has no heartbeat for ``stall_timeout_s``, is replaced, and requests continue after their
    delivered tokens. This may happen ``max_restarts`` times within ``restart_window_s``. If one request causes repeated
    losses, they do not count, and the request ends with an error. After more losses, or if messages cannot be handled,
    the children are killed and ``on_failure`` is called. Then ``stop`` must still be called.

    Attributes:
        ledger: the open requests. num_restarts: number of times that children were replaced.
    """

    def __init__(
        self,
        settings: Settings,
        config: SupervisionConfig,
        *,
        launcher: str | MakeLauncher,
        events: Events,
        roles: Sequence[Role] = ROLES,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        """launcher: name of a plug-in in ``launchers/``, or a function that makes a launcher. roles: one child is
        started for each role. on_end: called after the last child has ended, perhaps several times.
        """
        self._settings = settings
        self._roles = roles
        self._config = config
        # Load the plug-in now: later there may be no free file descriptor, or the package may have been removed.
        self._make_launcher: MakeLauncher = (
            plugins.load("supervision/launchers", launcher) if isinstance(launcher, str) else launcher
        )
        self._on_end = on_end
        self._events = events
        self.ledger = Ledger()
        self._window = RestartWindow(config.max_restarts, config.restart_window_s)
        self._totals = AccumulatedTotals()
        self._startup_timeout_s = config.startup_timeout_s
        self._incarnation = self._make()
        self._recovery: EngineTask | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.num_restarts = 0
        self._owner_pid = os.getpid()
        self._is_ended = False  # True after a failure, stop or kill

    async def start(self) -> dict[str, object]:
        """Start the children, wait until all are ready, and return their facts. May be called once.

        Raises:
            EngineStartupError: a child failed. Has the child's message, and its traceback as a note. No child is left
                running.
        """
        began_at = time.monotonic()
        facts = await self._incarnation.start(self._events.on_progress, self._events.on_launch)
        took_s = time.monotonic() - began_at
        self._startup_timeout_s = min(
            self._startup_timeout_s, max(_MIN_STARTUP_TIMEOUT_S, _STARTUP_TIMEOUT_FACTOR * took_s)
        )
        # Replacements allocate a KV pool of the same size, because the frontend checks calls against this size.
        if isinstance(num_tokens := facts.get("max_total_tokens"), int):
            num_pages = num_tokens // self._settings.memory.page_size
            memory = msgspec.structs.replace(self._settings.memory, num_pages=num_pages)
            self._settings = msgspec.structs.replace(self._settings, memory=memory)
        return facts

    def send(self, messages: Sequence[ToScheduler]) -> None:
        """Send messages to the scheduler, or keep them for the next scheduler. Does nothing after the end."""
        if self._is_ended:
            return
        if due := self.ledger.record(messages, time.monotonic()):
            self._incarnation.send(due)
        else:
            self._report_later()  # unsent requests may pass their deadlines

    def adopt(self, quarantined: Mapping[int, int]) -> None:
        """Quarantine requests of a replica that has failed. They are sent next."""
        self.ledger.adopt(quarantined)
        self._report_later()

    async def stop(self, timeout_s: float) -> None:
        """Ask the children to exit, then kill them, within about ``timeout_s``. May be repeated."""
        self._is_ended = True
        recovery, self._recovery = self._recovery, None
        if recovery is not None:
            await recovery.stop()
        await self._incarnation.end(timeout_s * _EXIT_FRACTION)
        if self._on_end is not None:
            self._on_end()

    def kill_now(self) -> None:
        """Kill the children without an event loop, at exit of the interpreter or for engines that were not shut down.

        Does nothing in a fork of this process, because the children belong to the original process.
        """
        if os.getpid() != self._owner_pid:
            return
        self._is_ended = True
        if self._recovery is not None:
            self._recovery.cancel()
        self._incarnation.kill_now()
        if self._on_end is not None:
            self._on_end()

    def process_states(self) -> list[ProcessState]:
        """Return the current state of each child."""
        return self._incarnation.process_states()

    def uids_in_flight(self) -> Collection[int]:
        """Return the uids of the requests in the current steps of the scheduler process."""
        return self._incarnation.uids_in_flight(SCHEDULER)

    def finished_ids(self, uid: int) -> list[int] | None:
        """Return the output ids of a request that finished lately; None: they are not kept."""
        return self.ledger.finished.get(uid)

    @property
    def weights(self) -> LoadedWeights:
        """The weights that compute new requests."""
        return self.ledger.controls.weights

    @property
    def is_recovering(self) -> bool:
        """Whether requests wait for replaced children."""
        return not self.ledger.is_connected and not self._is_ended

    # ------------------------------------------------------------ from the children

    def _make(self) -> Incarnation:
        if self.weights.number:
            model = self._settings.model.with_weights(self.weights)
            self._settings = msgspec.structs.replace(self._settings, model=model)
        return Incarnation(
            self._settings,
            self._roles,
            self._make_launcher,
            startup_timeout_s=self._startup_timeout_s,
            stall_timeout_s=self._config.stall_timeout_s,
            on_messages=self._receive,
            on_loss=self._lose,
        )

    def _receive(self, messages: list[ToFrontend]) -> None:
        """Record messages from the children in the ledger, and deliver them."""
        for index, message in enumerate(messages):
            if isinstance(message, TextChunks):
                if due := self.ledger.receive(message):
                    self._incarnation.send(due)
            elif isinstance(message, Stats):
                messages[index] = self._totals.add(message)
            elif isinstance(message, Reply):
                self.ledger.controls.receive(message)
        self._events.on_messages(messages)

    def _report_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._report_waiting)

    def _report_waiting(self) -> None:
        """Deliver reports that no child will send: ends of unsent requests, and replies to lost control calls."""
        self._timer = None
        if self._is_ended:
            return
        self.ledger.expire(time.monotonic())
        if reports := self.ledger.take_reports():
            self._events.on_messages(reports)
        if self.ledger.has_unsent:
            self._report_later()

    # ------------------------------------------------------------ losses

    def _lose(self, loss: Loss) -> None:
        """Handle the loss of a child: start a recovery, or fail."""
        if self._is_ended:
            return
        config, now = self._config, time.monotonic()
        try:
            cause = self.ledger.crash(loss.rows, describe_loss(loss.error), now, is_scheduler_lost=not loss.is_mendable)
            if cause is CrashCause.REQUEST:  # its first crash counted as a restart
                self._window.give_back()
            may_recover = bool(config.max_restarts and not loss.is_final)
            if may_recover and cause is CrashCause.UNKNOWN:  # the loss counts as a restart
                may_recover = self._window.take(now)
        except Exception as error:  # otherwise every call would wait for a recovery that never begins
            loss.error.__cause__ = error
            may_recover = False
        if not may_recover:
            self._fail(loss.error)
            return
        self._report_later()
        self._recovery = EngineTask(self._recover(loss), name="aioengine-recovery", on_failure=self._fail)
        num_open = checks.counted(self.ledger.num_open, "request")
        warn(logger, "%s; new processes continue %s", describe_loss(loss.error), num_open)

    async def _recover(self, loss: Loss) -> None:
        """Replace the lost children: only the detokenizer (a mend), or all.

        A failed start counts as another loss. A failed mend does not count, and then all children are replaced.
        """
        is_mendable, pause_s = loss.is_mendable, _MIN_RETRY_S
        while not self._is_ended:
            try:
                await (self._incarnation.mend() if is_mendable else self._replace_all())
            except Exception as startup_error:  # all kinds, otherwise every call would wait forever
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
            if not self._is_ended:  # ``kill_now`` may set it in another thread
                self.num_restarts += is_mendable  # ``_replace_all`` counts its own restarts
                self._recovery = None
                num_open = checks.counted(self.ledger.num_open, "request")
                log(logger, logging.INFO, "the lost processes are replaced; the new ones continue %s", num_open)
                self._incarnation.send(self.ledger.replay())
            return

    async def _replace_all(self) -> None:
        """End the remaining children and start new ones.

        Raises:
            EngineStartupError: a child could not start. No child is left running.
        """
        await self._incarnation.end(exit_timeout_s=0.0)
        if self._is_ended:  # ``kill_now`` may set it in another thread
            return
        self._incarnation = self._make()
        self._totals.restart()
        self.num_restarts += 1
        await self._incarnation.start()

    def _fail(self, error: EngineError) -> None:
        """Kill the children and report the failure once."""
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
    """Limits the number of restarts within a time window."""

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self.max_restarts = max_restarts
        self.window_s = window_s
        self._times: deque[float] = deque()

    @property
    def num_taken(self) -> int:
        """The number of restarts that counted at the last ``take``."""
        return len(self._times)

    def take(self, now: float) -> bool:
        """Count a restart and return True. If the limit is reached, return False."""
        while self._times and self._times[0] <= now - self.window_s:
            self._times.popleft()
        if len(self._times) >= self.max_restarts:
            return False
        self._times.append(now)
        return True

    def give_back(self) -> None:
        """Undo the last ``take``, because a single request caused the restart."""
        if self._times:
            self._times.pop()


class AccumulatedTotals:
    """Adds the totals of earlier schedulers to ``Stats``, because a new scheduler counts from 0."""

    def __init__(self) -> None:
        self._before = self._last = dict.fromkeys(Totals.__struct_fields__, 0)

    def add(self, stats: Stats) -> Stats:
        """Return the statistics including the totals of earlier schedulers."""
        counts: dict[str, int] = msgspec.structs.asdict(stats)
        self._last = {name: counts[name] + before for name, before in self._before.items()}
        return msgspec.structs.replace(stats, **self._last)

    def restart(self) -> None:
        """Record that a new scheduler counts from 0."""
        self._before = self._last


def describe_loss(error: EngineError) -> str:
    """Return the first part of the message, without advice."""
    return str(error).partition(";")[0]
