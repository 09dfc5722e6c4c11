"""Fleet: several replicas of a model behind one frontend. Each replica has its own children, ledger and restarts.

A request goes to one replica. A control call goes to all replicas, and their replies are merged into one. If a replica
fails, it leaves the fleet, and its requests continue in other replicas after their delivered tokens. If the last
replica fails, the fleet fails.

With ``max_restarts=0`` the first loss of a replica is final, even if a request caused it. A request that crashes every
process therefore ends two replicas: its first replica, and the replica that retries it. After the first crash, any
request of the step may be the cause. After the second crash, it ends with an error (see ``Ledger``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import cast

import msgspec

from aioengine.errors import EngineError
from aioengine.logs import warn
from aioengine.protocol.messages import Control, Reply, Stats, Submit, TextChunks, ToFrontend, ToScheduler, Totals
from aioengine.settings.config import LoadedWeights
from aioengine.supervision.incarnation import ProcessState
from aioengine.supervision.routing import Routes
from aioengine.supervision.supervisor import Events, Supervisor, describe_loss
from aioengine.supervision.tasks import EngineTask

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 1.0
_TIMES = ("sent_at", "step_ended_at")
_FOR_ONE_REPLICA = ("start_profile", "stop_profile")
"""Control calls whose replies cannot be merged, because every replica would return another file."""

_NUM_TOTALS = len(Totals.__struct_fields__)


class Fleet:
    """Owns the replicas of one engine from ``start`` to ``stop``. Belongs to one event loop."""

    def __init__(self, makers: Sequence[Callable[[Events], Supervisor]], events: Events, routing: str = "auto") -> None:
        """makers: one function per replica; it returns a ``Supervisor`` that reports to the given events."""
        self._events = events
        self._routes = Routes(len(makers), routing)
        self._stats: dict[int, Stats] = {}  # replica -> latest statistics
        self._num_open = dict.fromkeys(range(len(makers)), 0)  # replica -> number of requests in its detokenizer
        self._replies: dict[int, dict[int, Reply | None]] = {}  # call id -> replica -> reply
        self._stops: list[EngineTask] = []
        self._num_launched = 0
        self._replicas = [make(self._events_of(number)) for number, make in enumerate(makers)]

    def _events_of(self, number: int) -> Events:
        return Events(
            partial(self._on_messages, number),
            partial(self._on_failure, number),
            _ignore if number else self._events.on_progress,  # all replicas make the same progress
            self._on_launch,
        )

    async def start(self) -> dict[str, object]:
        """Start all replicas, wait until they are ready, and return the facts of the first replica.

        ``max_total_tokens`` is the minimum over all replicas, because any replica may get the longest request.
        ``max_running_requests`` is the sum.

        Raises:
            EngineStartupError: a replica could not start. No replica is left running.
        """
        starts = [asyncio.get_running_loop().create_task(replica.start()) for replica in self._replicas]
        try:
            facts = await asyncio.gather(*starts)
        except GeneratorExit:  # the loop is closed, so nothing can be awaited
            self.kill_now()
            raise
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.wait(starts)
            await self.stop(0.0)
            raise
        self._routes.cache_tokens = min(cast("int", replica["max_total_tokens"]) for replica in facts)
        return {
            **facts[0],
            "num_replicas": len(facts),
            "max_total_tokens": self._routes.cache_tokens,
            "max_running_requests": sum(cast("int", replica["max_running_requests"]) for replica in facts),
        }

    def send(self, messages: Sequence[ToScheduler]) -> None:
        """Send each request to one replica, and each control call to all replicas."""
        due: dict[int, list[ToScheduler]] = {}
        for message in messages:
            if isinstance(message, Submit):
                due.setdefault(self._routes.choose(message), []).append(message)
            elif isinstance(message, Control) and message.name in _FOR_ONE_REPLICA:
                text = f"{message.name} needs an engine with one replica; this engine has {len(self._replicas)}"
                replies: list[ToFrontend] = [Reply(message.call_id, False, text)]
                asyncio.get_running_loop().call_soon(self._events.on_messages, replies)
            elif isinstance(message, Control):
                self._replies[message.call_id] = dict.fromkeys(self._routes.replicas)
                for number in self._routes.replicas:
                    due.setdefault(number, []).append(message)
            else:  # a message about open requests
                uids_by_replica: dict[int, list[int]] = {}
                for uid in message.uids:
                    if (replica := self._routes.find(uid)) is not None:
                        uids_by_replica.setdefault(replica, []).append(uid)
                for number, uids in uids_by_replica.items():
                    due.setdefault(number, []).append(msgspec.structs.replace(message, uids=uids))
        for number, part in due.items():
            self._replicas[number].send(part)

    async def stop(self, timeout_s: float) -> None:
        """End all replicas within about ``timeout_s``. May be called again."""
        await asyncio.gather(*(replica.stop(timeout_s) for replica in self._replicas))
        for stop in self._stops:
            await stop.stop()

    def kill_now(self) -> None:
        """Kill all replicas. Needs no event loop."""
        for replica in self._replicas:
            replica.kill_now()

    def process_states(self) -> list[ProcessState]:
        """Return the states of the children of all replicas that have not failed."""
        return [state for replica in self._active for state in replica.process_states()]

    def uids_in_flight(self) -> Collection[int]:
        """Return the uids of the requests in the current steps of all replicas."""
        return {uid for replica in self._active for uid in replica.uids_in_flight()}

    def finished_ids(self, uid: int) -> list[int] | None:
        """Return the output ids of a request that finished lately; None: they are not kept."""
        return next(filter(None, (replica.finished_ids(uid) for replica in self._replicas)), None)

    @property
    def num_restarts(self) -> int:
        return sum(replica.num_restarts for replica in self._replicas)

    @property
    def weights(self) -> LoadedWeights:
        """The weights of a replica that has lost tensors, or of any other if there is none."""
        weights = [replica.weights for replica in self._active or self._replicas]
        return next((own for own in weights if own.are_lost), weights[0])

    @property
    def is_recovering(self) -> bool:
        return any(replica.is_recovering for replica in self._active)

    @property
    def _active(self) -> list[Supervisor]:
        """The replicas that have not failed."""
        return [self._replicas[number] for number in self._routes.replicas]

    # ------------------------------------------------------------ from the replicas

    def _on_launch(self) -> None:
        self._num_launched += 1
        if self._num_launched == len(self._replicas):
            self._events.on_launch()

    def _on_messages(self, number: int, messages: list[ToFrontend]) -> None:
        merged: list[ToFrontend] = []
        for message in messages:
            if isinstance(message, TextChunks):
                if message.num_open is not None:
                    self._num_open[number] = message.num_open
                    message.num_open = sum(self._num_open.values())
                message.first_tokens = [
                    msgspec.structs.replace(token, replica=number) for token in message.first_tokens
                ]
                for token in message.first_tokens:
                    self._routes.prompt_computed(token.uid)
                for end in message.ended:
                    self._routes.forget(end.uid)
            elif isinstance(message, Stats):
                self._stats[number] = message
                message = _sum(self._stats.values())
            elif isinstance(message, Reply):
                replies = self._replies.get(message.call_id)
                if replies is None:
                    continue
                replies[number] = message
                complete = [reply for reply in replies.values() if reply is not None]
                if len(complete) < len(replies):
                    continue
                del self._replies[message.call_id]
                message = _join(complete)
            merged.append(message)
        if merged:
            self._events.on_messages(merged)

    def _on_failure(self, number: int, error: EngineError) -> None:
        """Handle the failure of a replica: its requests continue in the other replicas."""
        self._routes.remove(number)
        if not self._routes.replicas:
            self._events.on_failure(error)
            return
        replica = self._replicas[number]
        reason = describe_loss(error)
        text = "replica %d has failed; its requests continue in the other replicas (number left: %d): %s"
        warn(logger, text, number, len(self._active), reason)
        self._stops.append(EngineTask(replica.stop(_STOP_TIMEOUT_S), name="aioengine-stop", on_failure=_ignore))
        requests, quarantined = replica.ledger.hand_over(reason, time.monotonic())
        reports = replica.ledger.take_reports()
        if number in self._stats:  # keep its totals; the current counts become 0
            reports.append(Stats(*msgspec.structs.astuple(self._stats[number])[:_NUM_TOTALS]))
        self._num_open[number] = 0
        self._on_messages(number, reports)
        for request in requests:
            if isinstance(request, Submit) and request.uid in quarantined:
                self._replicas[self._routes.choose(request)].adopt({request.uid: quarantined[request.uid]})
        self.send(requests)


Processes = Supervisor | Fleet
"""The processes of an engine with one replica, or with several."""


def _sum(parts: Iterable[Stats]) -> Stats:
    """Return the statistics of all replicas. Times are the latest; all other fields are sums."""
    columns = zip(*map(msgspec.structs.astuple, parts), strict=True)
    named = zip(Stats.__struct_fields__, columns, strict=True)
    return Stats(**{name: max(column) if name in _TIMES else sum(column) for name, column in named})


def _join(replies: list[Reply]) -> Reply:
    """Return the first failure, or the first reply if all succeeded. ``data`` is a JSON array of the data of all."""
    first = next((reply for reply in replies if not reply.success), replies[0])
    data = [msgspec.Raw(reply.data.encode()) for reply in replies if reply.data]
    return msgspec.structs.replace(first, data=msgspec.json.encode(data).decode() if data else "")


def _ignore(_: object) -> None:
    """Ignore the progress of all replicas except the first, and errors of stopping a failed replica."""
