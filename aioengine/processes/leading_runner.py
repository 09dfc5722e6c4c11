"""The runner of rank 0: launches plans in this process, and sends them to the other ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Generic

import msgspec
from msgspec.structs import replace

from aioengine.errors import describe
from aioengine.protocol.messages import Adapter, Control, Fact, Reply, RequestKind, Sampling
from aioengine.protocol.rank_step import RankAdapter, RankStep
from aioengine.protocol.weight_messages import WeightCall
from aioengine.scheduler.plan import NewRow, StepPlan, StepResult
from aioengine.scheduler.runner import AdapterCopy, DeviceAdapters, Runner, Ticket

Send = Callable[[RankStep | RankAdapter | Control], None]


class RanksBrokenError(BaseException):
    """A step failed on rank 0, so the ranks may have computed different steps.

    It is no ``Exception``, because the requests of the step must not end: the process ends, and all ranks are replaced.
    """


class LeadingRunner(Generic[Ticket]):
    """Implements ``scheduler.runner.Runner`` for all ranks.

    The other ranks must launch and collect in the same order. So each plan is sent with the number of steps that were
    collected since the last plan. When no step is in flight, the other ranks collect the last ones at once: then the
    next step does not wait for that.
    """

    def __init__(self, runner: Runner[Ticket], send: Send) -> None:
        """runner: of rank 0. send: sends a message to all other ranks.

        Raises ValueError if the runner cannot send its plans to other ranks.
        """
        if runner.use_ranks is None:
            raise ValueError("the runner of this engine cannot be divided among ranks; allowed: tp_size=1")
        self._runner = runner
        self._send = send
        self._num_in_flight = self._num_collected = 0
        self._encoder = msgspec.msgpack.Encoder()
        self.facts: Mapping[str, Fact] = runner.facts
        self.adapters = None if runner.adapters is None else LeadingAdapters(runner.adapters, send)
        self.use_grammars: Callable[[Any], None] | None = runner.use_grammars
        self.controls: Mapping[str, Callable[[Control], Reply]] = {
            name: call if name == WeightCall.CHECK else partial(self._call_ranks, call)
            for name, call in runner.controls.items()
        }
        self.use_ranks = None
        runner.use_ranks(self._send_plan)

    def launch(self, plan: StepPlan) -> Ticket:
        """See ``Runner``.

        Raises:
            RanksBrokenError: the step failed.
        """
        try:
            return self._runner.launch(plan)
        except Exception as error:
            raise RanksBrokenError(describe(error)) from error

    def collect(self, ticket: Ticket) -> StepResult:
        """See ``Runner``.

        Raises:
            RanksBrokenError: the step failed.
        """
        self._num_in_flight -= 1
        self._num_collected += 1
        try:
            result = self._runner.collect(ticket)
        except Exception as error:
            raise RanksBrokenError(describe(error)) from error
        if not self._num_in_flight:
            self._send_step(b"")
        return result

    def close(self) -> None:
        self._runner.close()

    def _call_ranks(self, call: Callable[[Control], Reply], control: Control) -> Reply:
        """Make a control call on all ranks. If it fails on another rank, that process ends, and all are replaced."""
        self._send(control)
        return call(control)

    def _send_plan(self, plan: StepPlan, failed: Collection[int]) -> None:
        self._num_in_flight += 1
        self._send_step(self._encoder.encode(plan_for_ranks(plan, failed)))

    def _send_step(self, plan: bytes) -> None:
        self._send(RankStep(self._num_collected, plan))
        self._num_collected = 0


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class RankCopy:
    """An adapter in host memory. own: the copy of rank 0. The other ranks read theirs when it gets its first slot."""

    number: int
    adapter: Adapter
    own: AdapterCopy

    @property
    def num_bytes(self) -> int:
        return self.own.num_bytes


class LeadingAdapters:
    """Implements ``scheduler.runner.DeviceAdapters`` for all ranks.

    The other ranks read an adapter when it gets its first slot, and keep it as long as rank 0 does.
    """

    def __init__(self, adapters: DeviceAdapters, send: Send) -> None:
        self.num_slots = adapters.num_slots
        self._adapters = adapters
        self._send = send
        self._numbers = count()
        self._sent: dict[int, weakref.ref[RankCopy]] = {}  # by number; a dead reference: the other ranks must drop it

    def read(self, adapter: Adapter) -> RankCopy:
        """See ``DeviceAdapters``."""
        return RankCopy(next(self._numbers), adapter, self._adapters.read(adapter))

    def is_read_by_all(self, is_read: bool) -> bool:
        return self._adapters.is_read_by_all(is_read)

    def place(self, slot: int, adapter: RankCopy) -> Future[None]:
        """See ``DeviceAdapters``. The other ranks have the adapter before they launch a later step.

        Raises:
            ValueError: another rank cannot read the adapter.
        """
        dropped = [number for number, sent in self._sent.items() if sent() is None]
        for number in dropped:
            del self._sent[number]
        self._send(RankAdapter(slot, adapter.number, dropped, msgspec.msgpack.encode(adapter.adapter)))
        if adapter.number not in self._sent and not self.is_read_by_all(True):
            raise ValueError(f"the files in {adapter.adapter.path} were removed or changed before all ranks read them")
        self._sent[adapter.number] = weakref.ref(adapter)
        return self._adapters.place(slot, adapter.own)


def plan_for_ranks(plan: StepPlan, failed: Collection[int]) -> StepPlan:
    """Return the part of a plan that the other ranks compute: the rows that have not failed on rank 0."""
    return StepPlan(
        rows=[row for row in plan.rows if row.uid not in failed],
        new_rows=[_without_sampling(row) for row in plan.new_rows if row.uid not in failed],
        closed=plan.closed,
        snapshots=[(uid, snapshot) for uid, snapshot in plan.snapshots if uid not in failed],
        needs_logits=plan.needs_logits,
    )


def _without_sampling(row: NewRow) -> NewRow:
    """Remove the parameters that only rank 0 needs: of logits processors, and of logprobs of output tokens.

    Hidden states and prompt logprobs are kept, because they decide which outputs a step computes.
    """
    full = row.sampling
    sampling = Sampling(seed=full.seed, temperature=full.temperature, hidden_states=full.hidden_states)
    rules = row.logprobs
    has_prompt_logprobs = rules is not None and (rules.start >= 0 or row.kind is RequestKind.SCORE)
    return replace(row, sampling=sampling, logprobs=rules if has_prompt_logprobs else None)
