"""Fleet: several replicas of a model behind one frontend, each with children, a ledger and restarts of its own.

Each request goes to one replica; controls go to all, and their replies become one. A replica that failed for good
leaves the fleet, and its requests go on in others behind what they have given; the fleet fails with the last replica.

With ``max_restarts=0`` the first loss of a replica is final, also where a request caused it: one that crashes each
process that computes it ends two replicas, the one that it came to and the one that tried it as a suspect. After the
first crash any request of that step may be the cause; after the second this one ends with an error (see ``Ledger``).
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from aioengine.logs import warn
from aioengine.protocol.messages import Abort, Control, Reply, Resume, Stats, Submit, Suspend, TextChunks, Totals
from aioengine.supervision.processes import Events
from aioengine.supervision.routing import Routes
from aioengine.supervision.tasks import EngineTask

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from aioengine.errors import EngineError
    from aioengine.protocol.messages import ToFrontend, ToScheduler
    from aioengine.supervision.processes import ProcessState
    from aioengine.supervision.supervisor import Supervisor

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 1.0
_LATEST = ("sent_at", "step_ended_at")
_NUM_TOTALS = len(Totals.__struct_fields__)


class Fleet:
    """Owns the replicas of one engine, from ``start`` to ``stop``, on one loop."""

    def __init__(self, makers: Sequence[Callable[[Events], Supervisor]], events: Events) -> None:
        """``makers``: make one replica each, which reports to the given events."""
        self._events = events
        self._routes = Routes(len(makers))
        self._stats: dict[int, Stats] = {}  # replica -> its last ones
        self._num_open = dict.fromkeys(range(len(makers)), 0)  # replica -> requests in its detokenizer
        self._asked: dict[int, dict[int, Reply | None]] = {}  # call id -> replica -> its reply
        self._stops: list[EngineTask] = []
        self._replicas = [make(self._events_of(number)) for number, make in enumerate(makers)]

    def _events_of(self, number: int) -> Events:
        return Events(
            partial(self._on_messages, number),
            partial(self._on_failure, number),
            _ignore if number else self._events.on_progress,  # they start side by side and do the same
        )

    async def start(self) -> dict[str, object]:
        """Start all replicas, wait until they are ready, and return the facts of the first, with the smallest pool.

        Raises:
            EngineStartupError: one could not start; none is left running.
        """
        starts = [asyncio.get_running_loop().create_task(replica.start()) for replica in self._replicas]
        try:
            facts = await asyncio.gather(*starts)
        except GeneratorExit:  # the loop was closed, and nothing can be awaited
            self.kill_now()
            raise
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.wait(starts)
            await self.stop(0.0)
            raise
        sizes = [size for one in facts if isinstance(size := one.get("max_total_tokens"), int)]
        return {**facts[0], **({"max_total_tokens": min(sizes)} if sizes else {})}

    def send(self, messages: Sequence[ToScheduler]) -> None:
        """Send requests to a replica each, and controls to all."""
        due: dict[int, list[ToScheduler]] = {}
        for message in messages:
            if isinstance(message, Submit):
                due.setdefault(self._routes.choose(message), []).append(message)
            elif isinstance(message, Control):
                self._asked[message.call_id] = dict.fromkeys(self._routes.replicas)
                for number in self._routes.replicas:
                    due.setdefault(number, []).append(message)
            else:
                for number, uids in self._by_replica(message.uids).items():
                    due.setdefault(number, []).append(_with_uids(message, uids))
        for number, part in due.items():
            self._replicas[number].send(part)

    def _by_replica(self, uids: Iterable[int]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for uid in uids:
            if (number := self._routes.find(uid)) is not None:
                found.setdefault(number, []).append(uid)
        return found

    async def stop(self, timeout_s: float) -> None:
        """End all replicas within about ``timeout_s``. Harmless when repeated."""
        await asyncio.gather(*(replica.stop(timeout_s) for replica in self._replicas))
        for stop in self._stops:
            await stop.stop()

    def kill_now(self) -> None:
        """End all replicas at once, without a loop."""
        for replica in self._replicas:
            replica.kill_now()

    def processes(self) -> list[ProcessState]:
        """The children of all replicas that have not failed."""
        return [state for replica in self._living for state in replica.processes()]

    def rows_in_flight(self) -> Collection[int]:
        """The uids of the requests in the steps of all replicas."""
        return {uid for replica in self._living for uid in replica.rows_in_flight()}

    @property
    def num_restarts(self) -> int:
        return sum(replica.num_restarts for replica in self._replicas)

    @property
    def is_recovering(self) -> bool:
        return any(replica.is_recovering for replica in self._living)

    @property
    def _living(self) -> list[Supervisor]:
        return [self._replicas[number] for number in self._routes.replicas]

    # ------------------------------------------------------------ from the replicas

    def _on_messages(self, number: int, messages: list[ToFrontend]) -> None:
        merged: list[ToFrontend] = []
        for message in messages:
            if isinstance(message, TextChunks):
                if message.num_open is not None:
                    self._num_open[number] = message.num_open
                    message.num_open = sum(self._num_open.values())
                for end in message.ended:
                    self._routes.forget(end.uid)
            elif isinstance(message, Stats):
                self._stats[number] = message
                message = _sum(self._stats.values())
            elif isinstance(message, Reply):
                if (reply := self._merged(number, message)) is None:
                    continue
                message = reply
            merged.append(message)
        if merged:
            self._events.on_messages(merged)

    def _merged(self, number: int, reply: Reply) -> Reply | None:
        """One reply for those of all replicas, once the last one has come."""
        replies = self._asked.get(reply.call_id)
        if replies is None:
            return None
        replies[number] = reply
        if None in replies.values():
            return None
        del self._asked[reply.call_id]
        return _join([one for one in replies.values() if one is not None])

    def _on_failure(self, number: int, error: EngineError) -> None:
        """A replica has failed for good: its requests go on in the others."""
        self._routes.remove(number)
        if not self._routes.replicas:
            self._events.on_failure(error)
            return
        replica = self._replicas[number]
        reason = str(error).partition(";")[0]
        warn(logger, "replica %d has failed, its requests go on in %d others: %s", number, len(self._living), reason)
        self._stops.append(EngineTask(replica.stop(_STOP_TIMEOUT_S), name="aioengine-stop", on_failure=_ignore))
        reports, requests, suspects = replica.hand_over(error)
        if number in self._stats:  # of which the totals remain
            reports.append(Stats(*msgspec.structs.astuple(self._stats[number])[:_NUM_TOTALS]))
        self._num_open[number] = 0
        self._on_messages(number, reports)
        for request in requests:
            if isinstance(request, Submit) and request.uid in suspects:
                replica = self._replicas[self._routes.choose(request)]
                replica.adopt({request.uid: suspects[request.uid]})
        self.send(requests)


def _with_uids(message: Abort | Suspend | Resume, uids: list[int]) -> Abort | Suspend | Resume:
    return msgspec.structs.replace(message, uids=uids)


def _sum(parts: Iterable[Stats]) -> Stats:
    """The statistics of all replicas: times are the latest, everything else is a sum."""
    columns = zip(*map(msgspec.structs.astuple, parts), strict=True)
    named = zip(Stats.__struct_fields__, columns, strict=True)
    return Stats(**{name: max(column) if name in _LATEST else sum(column) for name, column in named})


def _join(replies: list[Reply]) -> Reply:
    """The first reply that is no success, else the first; with the data of all as a JSON array, where there is any."""
    first = next((reply for reply in replies if not reply.success), replies[0])
    data = [msgspec.Raw(reply.data.encode()) for reply in replies if reply.data]
    return msgspec.structs.replace(first, data=msgspec.json.encode(data).decode() if data else "")


def _ignore(_: object) -> None:
    """The progress of all replicas but the first, and how the end of one that has failed went."""
