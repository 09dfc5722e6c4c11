"""The process of a rank above 0: computes the plans that rank 0 sends.

Rank 0 is the runner in the scheduler process. If a rank ends, all processes are replaced.
"""

from __future__ import annotations

import pkgutil
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

import msgspec

from aioengine.child_process.child import Child, run_child
from aioengine.processes.adapter_loading import read_unchanged
from aioengine.processes.scheduler_process import prepare_process
from aioengine.protocol.messages import SCHEDULER, Adapter, Control, Fact, Message
from aioengine.protocol.rank_step import RankAdapter, RankStep
from aioengine.protocol.service import HEARTBEAT_S, Outbox
from aioengine.scheduler.plan import StepPlan
from aioengine.scheduler.runner import AdapterCopy, Runner, RunnerFactory


class RankService:
    """Launches and collects steps, places adapters and makes control calls in the order of rank 0.

    The results are dropped.

    Attributes:
        facts: empty, because rank 0 reports the facts.
    """

    def __init__(self, runner: Runner[Any]) -> None:
        self.facts: Mapping[str, Fact] = {}
        self._runner = runner
        self._decoder = msgspec.msgpack.Decoder(StepPlan)
        self._in_flight: deque[Any] = deque()
        self._adapters: dict[int, AdapterCopy] = {}  # by the number of the copy

    def handle(self, messages: list[Message], now: float) -> None:
        """Handle the messages of rank 0. Raises the exception of a step or of a control call."""
        for message in messages:
            if isinstance(message, RankStep):
                for _ in range(message.num_collected):
                    self._runner.collect(self._in_flight.popleft())
                if message.plan:
                    self._in_flight.append(self._runner.launch(self._decoder.decode(message.plan)))
            elif isinstance(message, RankAdapter):
                self._place(message)
            elif isinstance(message, Control):
                self._runner.controls[message.name](message)

    def _place(self, message: RankAdapter) -> None:
        """Copy an adapter into a slot, and wait for the copy. If a rank cannot read it, no rank copies it."""
        adapters = self._runner.adapters
        assert adapters is not None, "rank 0 has adapters"
        for number in message.dropped:
            del self._adapters[number]
        if message.number not in self._adapters:
            copy = None
            with suppress(ValueError, OSError):
                copy = read_unchanged(adapters, msgspec.msgpack.decode(message.adapter, type=Adapter))
            is_read_by_all = adapters.is_read_by_all(copy is not None)
            if copy is None or not is_read_by_all:
                return
            self._adapters[message.number] = copy
        adapters.place(message.slot, self._adapters[message.number]).result()

    def step(self, now: float) -> Outbox:
        """Return nothing to send."""
        return Outbox([], [])

    def wait_s(self, now: float) -> float:
        return HEARTBEAT_S

    def close(self) -> None:
        self._runner.close()


def work(child: Child) -> None:
    settings = prepare_process(child)
    factory: RunnerFactory = pkgutil.resolve_name(settings.runner.factory)
    child.serve(RankService(factory(settings, lambda progress: None)), SCHEDULER)


def main() -> NoReturn:
    run_child(work)
