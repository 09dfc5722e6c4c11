"""The ledger with a simple scheduler that loses its state when it dies. The reader must not see a difference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aioengine.protocol.columns import TokenColumns
from aioengine.protocol.messages import (
    LOAD_ADAPTER,
    UNLOAD_ADAPTER,
    Abort,
    Adapter,
    Continuation,
    Control,
    End,
    FinishCode,
    FirstToken,
    Limits,
    Reply,
    Resume,
    Sampling,
    Stats,
    Submit,
    Suspend,
    TextChunks,
    TextRules,
)
from aioengine.protocol.weight_messages import WeightCall
from aioengine.settings.config import LoadedWeights
from aioengine.supervision.ledger import CRASH_STAGE, CrashCause, Ledger
from aioengine.supervision.supervisor import AccumulatedTotals, RestartWindow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioengine.protocol.messages import ToScheduler


def submit_of(uid: int, *, limits: Limits | None = None, num_prompt: int = 3) -> Submit:
    return Submit(uid, [1] * num_prompt, Sampling(seed=uid), limits or Limits(8), TextRules(stream_interval=4))


def chunks_of(uid: int, token_ids: Sequence[int], *, begins: bool = False, ends: bool = False) -> TextChunks:
    begun = [FirstToken(uid, 0, 1.0, 2.0)] if begins else []
    finished = [End(uid, FinishCode.LENGTH)] if ends else []
    tokens = TokenColumns()
    if token_ids:
        tokens.add(uid, token_ids)
    return TextChunks(tokens, ["x"] * len(tokens.uids), finished, 0, begun)


def ends_of(ledger: Ledger) -> list[End]:
    """Return the ends of requests that the ledger reports."""
    return [end for message in ledger.take_reports() if isinstance(message, TextChunks) for end in message.ended]


def lost_calls_of(ledger: Ledger) -> list[Reply]:
    """Return the control calls that the ledger reports as lost."""
    return [message for message in ledger.take_reports() if isinstance(message, Reply)]


class World:
    """A ledger, and the messages to the current scheduler."""

    def __init__(self, *uids: int) -> None:
        self.ledger = Ledger()
        self.sent = self.ledger.record([submit_of(uid) for uid in uids], 0.0)

    def hear(self, uid: int, token_ids: Sequence[int], *, begins: bool = False, ends: bool = False) -> None:
        self.sent += self.ledger.receive(chunks_of(uid, token_ids, begins=begins, ends=ends))

    def tell(self, *messages: ToScheduler, now: float = 0.0) -> None:
        self.sent += self.ledger.record(messages, now)

    def crash(self, *uids: int, end: int = 0) -> CrashCause:
        self.sent = []
        return self.ledger.crash(dict.fromkeys(uids, end), "it died", 9.0)

    def restart(self, *uids: int, end: int = 0) -> None:
        """Lose the process in a step of these requests, and replace it."""
        self.crash(*uids, end=end)
        self.sent = self.ledger.replay()

    def uids(self) -> list[int]:
        return [message.uid for message in self.sent if isinstance(message, Submit)]

    def continuation(self, uid: int) -> Continuation | None:
        (submit,) = [message for message in self.sent if isinstance(message, Submit) and message.uid == uid]
        return submit.continuation


def test_open_requests_continue_after_the_tokens_already_received() -> None:
    world = World(1, 2, 3)
    world.hear(1, [7, 8], begins=True)
    world.hear(2, [9], begins=True, ends=True)
    world.hear(1, [5])
    world.restart()
    assert world.uids() == [1, 3]
    assert world.continuation(1) == Continuation(FirstToken(1, 0, 1.0, 2.0), [7, 8, 5])
    assert world.continuation(3) is None
    world.hear(1, [6])
    world.restart()
    assert world.continuation(1) == Continuation(FirstToken(1, 0, 1.0, 2.0), [7, 8, 5, 6])


def test_request_with_a_first_token_and_no_text_keeps_its_first_token_times() -> None:
    world = World(1)
    world.hear(1, [], begins=True)
    world.restart()
    assert world.continuation(1) == Continuation(FirstToken(1, 0, 1.0, 2.0), [])


def test_preemptions_are_counted_across_restarts() -> None:
    world = World(1)
    world.hear(1, [7], begins=True)
    for _ in range(2):
        world.ledger.receive(TextChunks(preempted=[1, 9]))
        world.restart()
    resumed = world.continuation(1)
    assert resumed is not None
    assert resumed.num_preemptions == 2


def test_messages_without_a_scheduler_are_sent_to_the_next_one() -> None:
    world = World(1)
    world.crash()
    world.tell(submit_of(2), Control(1, "flush_cache"))
    assert world.sent == []
    assert world.ledger.has_unsent
    world.sent = world.ledger.replay()
    assert world.uids() == [1, 2]
    assert world.sent[-1] == Control(1, "flush_cache")
    assert not world.ledger.has_unsent


def test_after_a_crash_aborts_end_requests_not_begun_and_are_sent_again_for_others() -> None:
    world = World(1, 2)
    world.hear(1, [7], begins=True)
    world.crash()
    world.tell(Abort([1, 2, 9], FinishCode.SHUTDOWN, "why"), now=4.0)
    assert ends_of(world.ledger) == [End(2, FinishCode.SHUTDOWN, message="why", ended_at=4.0)]
    world.sent = world.ledger.replay()
    assert [type(message) for message in world.sent] == [Submit, Abort]
    assert world.sent[1] == Abort([1], FinishCode.SHUTDOWN, "why")
    assert ends_of(world.ledger) == []


def test_unanswered_abort_is_sent_again() -> None:
    world = World(1)
    world.tell(Abort([1]))
    assert world.sent[-1] == Abort([1])
    world.restart()
    assert world.sent[1] == Abort([1])


def test_ledger_keeps_deadlines_while_there_is_no_scheduler() -> None:
    ledger = Ledger()
    limits = {
        1: Limits(8, deadlines={"total": 3.0, "queue": 5.0}),
        2: Limits(8, deadlines={"queue": 5.0}),
        3: Limits(8, deadlines={"first_token": 2.0}),
        4: Limits(8),
        5: Limits(8, deadlines={"total": 1.0}),
    }
    ledger.record([submit_of(uid, limits=limit) for uid, limit in limits.items()], 0.0)
    ledger.receive(chunks_of(5, [1], begins=True))
    ledger.expire(9.0)
    assert ends_of(ledger) == []  # the scheduler expires the requests that it has
    ledger.crash({}, "", 0.0)
    ledger.expire(3.0)
    assert [(end.uid, end.code, end.matched) for end in ends_of(ledger)] == [
        (1, FinishCode.DEADLINE, "total"),
        (3, FinishCode.DEADLINE, "first_token"),
    ]
    ledger.expire(9.0)
    assert [(end.uid, end.matched) for end in ends_of(ledger)] == [(2, "queue")]
    assert ledger.num_open == 2


def test_pinned_adapters_are_loaded_again_into_each_new_scheduler() -> None:
    world = World()
    adapters = [Adapter(number, f"a{number}", "/a", "", is_pinned=number != 2) for number in range(1, 5)]
    loads = [Control(adapter.id, LOAD_ADAPTER, msgspec.structs.asdict(adapter)) for adapter in adapters]
    world.tell(*loads)
    for load in loads[:3]:
        world.ledger.controls.receive(Reply(load.call_id, True))
    world.ledger.controls.receive(Reply(4, False, "it cannot be read"))
    world.tell(Control(9, UNLOAD_ADAPTER, msgspec.structs.asdict(adapters[2])))
    world.crash()
    again = [message for message in world.ledger.replay() if isinstance(message, Control)]
    assert [(message.call_id, message.name, message.arguments["id"]) for message in again] == [(-1, LOAD_ADAPTER, 1)]


def test_weights_that_nobody_keeps_count_only_after_their_load_is_sent() -> None:
    world = World()
    controls, new = world.ledger.controls, LoadedWeights(version="v2", number=1, are_kept=False)
    load = Control(1, WeightCall.LOAD, {"is_part": True, "weights": msgspec.json.encode(new).decode()})
    world.crash()
    world.tell(load)
    assert controls.weights == LoadedWeights()  # with which the new process starts
    assert load in world.ledger.replay()
    assert controls.weights == new
    controls.receive(Reply(1, False, "no update is open"))
    assert controls.weights == LoadedWeights()


@pytest.mark.parametrize("is_sent", [False, True])
def test_load_that_was_given_up_is_not_sent_again(is_sent: bool) -> None:
    world = World()
    adapter = msgspec.structs.asdict(Adapter(1, "a", "/a", "", is_pinned=True))
    if not is_sent:
        world.crash()
    world.tell(Control(1, LOAD_ADAPTER, adapter))
    world.tell(Control(2, UNLOAD_ADAPTER, adapter))
    world.ledger.controls.receive(Reply(1, True))
    world.ledger.controls.put_back()
    assert [call.name for call in world.ledger.controls.take() if isinstance(call, Control)] == [UNLOAD_ADAPTER]
    assert not world.ledger.controls.pinned


def test_pause_survives_a_restart_of_the_scheduler() -> None:
    world = World(1)
    world.tell(Control(1, "pause"))
    world.ledger.controls.receive(Reply(1, True))
    world.restart()
    assert [type(message) for message in world.sent] == [Control, Submit]
    world.tell(Control(2, "continue"))
    world.ledger.controls.receive(Reply(2, True))
    world.restart()
    assert world.uids() == [1]
    assert len(world.sent) == 1


def test_control_calls_in_flight_at_a_crash_fail() -> None:
    world = World(1)
    world.tell(Control(1, "pause"), Control(2, "flush_cache"), Control(3, "server_info"))
    world.ledger.controls.receive(Reply(2, True))
    world.crash()
    assert world.ledger.has_unsent
    assert lost_calls_of(world.ledger) == [
        Reply(1, False, "it died before it answered 'pause'; this call was not repeated", stage=CRASH_STAGE),
        Reply(3, False, "it died before it answered 'server_info'; this call was not repeated", stage=CRASH_STAGE),
    ]
    world.tell(Control(4, "flush_cache"))
    world.sent = world.ledger.replay()
    assert [type(message) for message in world.sent] == [Submit, Control]  # the engine is not paused
    assert world.sent[-1] == Control(4, "flush_cache")
    world.crash()
    assert [lost.call_id for lost in lost_calls_of(world.ledger)] == [4]
    assert lost_calls_of(world.ledger) == []
    world.sent = world.ledger.replay()
    assert [type(message) for message in world.sent] == [Submit]


def test_control_calls_are_sent_again_if_only_the_detokenizer_was_lost() -> None:
    world = World(1)
    world.tell(Control(1, "pause"), Control(2, "server_info"))
    world.ledger.controls.receive(Reply(2, True))
    world.sent = []
    world.ledger.crash({}, "the other one died", 9.0, is_scheduler_lost=False)
    world.tell(Control(3, "flush_cache"))
    assert lost_calls_of(world.ledger) == []
    world.sent = world.ledger.replay()
    assert world.sent[-2:] == [Control(1, "pause"), Control(3, "flush_cache")]


def test_continue_in_flight_at_a_crash_succeeds() -> None:
    world = World(1)
    world.tell(Control(1, "pause"))
    world.ledger.controls.receive(Reply(1, True))
    world.tell(Control(2, "continue"))
    world.restart()
    assert lost_calls_of(world.ledger) == [Reply(2, True)]
    assert [type(message) for message in world.sent] == [Submit]


def test_abort_lost_with_two_processes_is_ended_by_the_ledger() -> None:
    """Otherwise an aborted request could kill every process, because it is never quarantined."""
    world = World(1, 2)
    world.hear(1, [7], begins=True)
    world.restart(1)
    world.tell(Abort([1], FinishCode.ABORT, "why"))
    world.restart(1)
    assert [type(message) for message in world.sent] == [Submit, Abort, Submit]
    assert ends_of(world.ledger) == []
    world.restart(1)
    assert ends_of(world.ledger) == [End(1, FinishCode.ABORT, message="why", ended_at=9.0)]
    assert world.uids() == [2]


def test_suspended_request_is_suspended_again_after_a_restart() -> None:
    world = World(1, 2)
    world.tell(Suspend([1, 2]), Resume([2]))
    assert world.sent[-2:] == [Suspend([1, 2]), Resume([2])]
    world.crash()
    world.tell(Suspend([2]), Resume([1]))
    assert world.sent == []
    world.sent = world.ledger.replay()
    assert world.sent[-1] == Suspend([2])
    assert world.uids() == [1, 2]


def test_other_requests_do_not_wait_for_a_suspended_retry() -> None:
    world = World(1, 2)
    world.restart(1)
    assert world.uids() == [1]
    world.tell(Suspend([1]))
    assert world.uids() == [1, 2]
    assert not world.ledger.has_unsent


def test_suspended_request_is_suspended_again_after_its_retry() -> None:
    world = World(1, 2)
    world.tell(Suspend([1]))
    world.restart(1)
    assert [type(message) for message in world.sent] == [Submit]
    world.hear(1, [5], begins=True)
    assert world.sent[1] == Suspend([1])
    assert world.uids() == [1, 2]


# ---------------------------------------------------------------- quarantine


def test_quarantined_requests_are_retried_one_by_one_before_requests_not_begun() -> None:
    world = World(1, 2, 3, 4)
    for uid in (1, 2, 3):
        world.hear(uid, [7], begins=True)
    world.restart(1, 3, end=5)
    assert world.uids() == [1, 2]
    world.tell(submit_of(5))
    world.hear(1, [8])
    assert world.uids() == [1, 2]  # it had computed more tokens when it died
    world.hear(1, [8])
    assert world.uids() == [1, 2, 3]
    world.hear(2, [8])
    world.hear(3, [8], ends=True)
    assert world.uids() == [1, 2, 3, 4, 5]
    assert not world.ledger.has_unsent


def test_retried_request_delivers_every_token() -> None:
    world = World(1)
    world.restart(1)
    (submit,) = world.sent
    assert isinstance(submit, Submit)
    assert (submit.text.stream, submit.text.stream_interval) == (True, 1)


def test_request_that_crashes_again_is_retried_alone_and_ends_alone() -> None:
    world = World(1, 2, 3, 4)
    for uid in (1, 4):
        world.hear(uid, [5], begins=True)
    assert world.crash(1, 2) is CrashCause.UNKNOWN
    world.sent = world.ledger.replay()
    assert world.uids() == [1, 4]
    world.hear(1, [5])
    assert world.uids() == [1, 4, 2]
    assert world.crash(1, 2, 4) is CrashCause.RETRY
    assert ends_of(world.ledger) == []
    world.sent = world.ledger.replay()
    assert world.uids() == [2]
    assert world.crash(2) is CrashCause.REQUEST
    (end,) = ends_of(world.ledger)
    assert (end.uid, end.code, end.stage) == (2, FinishCode.FAILED, CRASH_STAGE)
    assert end.message.startswith("it died each time it computed this request")
    world.sent = world.ledger.replay()
    assert world.uids() == [1]
    world.hear(1, [5])
    world.hear(4, [5])
    assert world.uids() == [1, 4, 3]


def test_request_that_survives_its_retry_alone_leaves_the_quarantine() -> None:
    world = World(1, 2)
    world.restart(1)
    world.restart(1)
    assert world.uids() == [1]
    world.hear(1, [5], begins=True)
    assert world.uids() == [1, 2]
    world.restart(1)
    world.restart(1)
    assert ends_of(world.ledger) == []


def test_crash_without_the_retried_request_quarantines_more_requests() -> None:
    world = World(1, 2, 3)
    world.restart(1, 2)
    world.hear(1, [5], begins=True)
    assert world.crash(1) is CrashCause.UNKNOWN
    world.sent = world.ledger.replay()
    assert world.uids() == [1]
    world.hear(1, [5])
    assert world.uids() == [1, 2]


def test_if_every_process_crashes_the_cause_is_unknown() -> None:
    world = World(1, 2, 3)
    causes: list[CrashCause] = []
    for uid in (1, 1, 1, 2, 2, 2):
        causes.append(world.crash(uid))
        world.sent = world.ledger.replay()
        assert uid in world.uids() or ends_of(world.ledger)
    assert causes == [
        CrashCause.UNKNOWN,
        CrashCause.RETRY,
        CrashCause.REQUEST,
        CrashCause.UNKNOWN,
        CrashCause.UNKNOWN,
        CrashCause.UNKNOWN,
    ]
    world.hear(3, [5], begins=True)
    causes = []
    for _ in range(3):
        causes.append(world.crash(3))
        world.sent = world.ledger.replay()
    assert causes == [CrashCause.UNKNOWN, CrashCause.RETRY, CrashCause.REQUEST]


def test_request_that_is_retried_alone_can_be_aborted() -> None:
    for is_up in (True, False):
        world = World(1, 2, 3)
        world.hear(2, [7], begins=True)
        world.restart(1)
        world.crash(1)
        if is_up:
            world.sent = world.ledger.replay()
            assert world.uids() == [1]
        world.tell(Abort([1, 2]))
        if not is_up:
            world.sent = world.ledger.replay()
        assert world.uids()[-2:] == [2, 3]


def test_nothing_is_sent_until_the_new_scheduler_is_ready() -> None:
    world = World(1, 2)
    world.restart(1)
    world.restart(1)
    assert world.crash(1) is CrashCause.REQUEST
    assert world.ledger.receive(TextChunks()) == []  # a sign of life of the new detokenizer
    world.sent = world.ledger.replay()
    assert world.uids() == [2]


def test_aborted_request_is_not_quarantined() -> None:
    world = World(1, 2)
    world.tell(Abort([1]))
    world.restart(1, 2)
    assert [type(message) for message in world.sent] == [Submit, Abort, Submit]


def test_quarantined_request_that_waits_can_be_aborted() -> None:
    world = World(1, 2, 3)
    for uid in (1, 2):
        world.hear(uid, [7], begins=True)
    world.restart(1, 2, 3)
    world.tell(Abort([2, 3]))
    assert [type(message) for message in world.sent] == [Submit, Submit, Abort]
    assert [end.uid for end in ends_of(world.ledger)] == [3]
    world.hear(1, [7])
    assert not world.ledger.has_unsent


# ---------------------------------------------------------------- another replica


def test_requests_can_be_handed_over_to_another_ledger() -> None:
    world = World(1, 2, 3, 4)
    world.hear(1, [7, 8], begins=True)
    world.hear(2, [9], begins=True, ends=True)
    world.tell(Suspend([1]), Abort([3], FinishCode.SHUTDOWN))
    world.restart(1)
    assert world.uids() == [1, 3]  # the others wait for the retry of 1
    messages, quarantined = world.ledger.hand_over("it died again", 9.0)
    assert list(quarantined) == [1]
    other = World()
    other.tell(*messages)
    assert other.uids() == [1, 4]
    assert other.continuation(1) == Continuation(FirstToken(1, 0, 1.0, 2.0), [7, 8])
    assert ends_of(world.ledger) == [End(3, FinishCode.SHUTDOWN, ended_at=9.0)]
    assert world.ledger.num_open == 0
    assert Suspend([1]) in other.sent
    other.hear(1, [5])
    other.restart()
    assert other.continuation(1) == Continuation(FirstToken(1, 0, 1.0, 2.0), [7, 8, 5])


def test_requests_are_retried_by_a_second_ledger_but_not_a_third() -> None:
    world = World(1, 2, 3)
    world.hear(1, [7], begins=True)
    world.crash(1, 2)
    messages, quarantined = world.ledger.hand_over("it died", 9.0)
    assert ends_of(world.ledger) == []
    other = World(4)
    other.hear(4, [7], begins=True)
    other.ledger.adopt(quarantined)
    other.tell(*messages)
    assert other.uids() == [4, 1]  # 2 and 3 wait
    other.crash(1, 4)
    messages, quarantined = other.ledger.hand_over("it died", 10.0)
    [end] = ends_of(other.ledger)
    assert (end.uid, end.stage) == (1, "crash")
    assert end.message == "it died each time it computed this request; the other requests continue"
    assert [message.uid for message in messages if isinstance(message, Submit)] == [4, 2, 3]
    assert set(quarantined) == {2, 4}


def test_control_calls_are_not_handed_over() -> None:
    world = World()
    world.tell(Control(1, "flush_cache"), Control(2, "continue"))
    world.crash()
    world.tell(Control(3, "server_info"))
    assert world.ledger.hand_over("it died", 9.0) == ([], {})
    assert [(lost.call_id, lost.success) for lost in lost_calls_of(world.ledger)] == [(1, False), (2, True), (3, False)]


# ---------------------------------------------------------------- random events


class NaiveWorld(RuleBasedStateMachine):
    """Each request has up to six ids, 10 * uid, 10 * uid + 1, ..., in spite of losses.

    The scheduler is a dict of its received messages. The reader compares its tokens with the expected tokens. Requests
    whose uid is a multiple of five kill the process after two ids.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.num_made = 0
        self.running: dict[int, int] = {}  # uid -> ids that the scheduler has sent or received
        self.resumed: set[int] = set()
        self.given: dict[int, list[int]] = {}
        self.open: set[int] = set()
        self.aborted: set[int] = set()
        self.crashing: set[int] = set()
        self.is_up = True

    def take(self, messages: Sequence[ToScheduler]) -> None:
        for message in messages:
            if isinstance(message, Submit):
                assert message.uid not in self.running, "sent twice"
                known = message.continuation.token_ids if message.continuation else []
                assert known == self.given[message.uid]
                self.running[message.uid] = len(known)
            elif isinstance(message, Abort):
                for uid in message.uids:
                    if self.running.pop(uid, None) is not None:
                        self.hear(TextChunks(ended=[End(uid, message.code)]))
                        self.close(uid)

    def hear(self, chunks: TextChunks) -> None:
        self.take(self.ledger.receive(chunks))

    def close(self, uid: int) -> None:
        assert uid in self.open, "ended twice"
        self.open.remove(uid)

    def take_ended(self) -> None:
        for end in ends_of(self.ledger):
            self.close(end.uid)
            if end.code is FinishCode.FAILED:
                assert end.uid % 5 == 0, "a request that crashes nothing was ended"
                self.crashing.add(end.uid)
            else:
                assert end.uid in self.aborted
                assert self.given[end.uid] == []

    @rule()
    def submit(self) -> None:
        self.num_made += 1
        uid = self.num_made
        self.open.add(uid)
        self.given[uid] = []
        self.take(self.ledger.record([submit_of(uid)], 0.0))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.open)))
        self.aborted.add(uid)
        self.take(self.ledger.record([Abort([uid])], 0.0))
        self.take_ended()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), is_heard=st.booleans())
    def step(self, data: st.DataObject, is_heard: bool) -> None:
        """Compute one token of one request. Undelivered tokens are lost when the process dies."""
        uid = data.draw(st.sampled_from(sorted(self.running)))
        if uid % 5 == 0 and self.running[uid] >= 2:
            self.die(self.rows())
            return
        self.running[uid] = min(6, self.running[uid] + 1)
        if is_heard:
            self.deliver(uid)

    def deliver(self, uid: int) -> None:
        num_given, num_made = len(self.given[uid]), self.running[uid]
        new = list(range(10 * uid + num_given, 10 * uid + num_made))
        self.given[uid] += new
        is_over = num_made >= 6
        if is_over:
            del self.running[uid]
            self.close(uid)
        self.hear(chunks_of(uid, new, begins=num_given == 0, ends=is_over))

    def rows(self) -> dict[int, int]:
        """Return the rows of a step of all requests."""
        return {uid: 3 + num_made for uid, num_made in self.running.items()}

    def die(self, rows: dict[int, int]) -> None:
        self.running.clear()
        self.is_up = False
        self.ledger.crash(rows, "it died", 0.0)
        self.take_ended()

    @precondition(lambda self: self.is_up)
    @rule()
    def kill(self) -> None:
        """Kill the process between two steps."""
        self.die({})

    @precondition(lambda self: not self.is_up)
    @rule()
    def restart(self) -> None:
        self.is_up = True
        self.take(self.ledger.replay())

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.ledger.num_open == len(self.open)

    def teardown(self) -> None:
        """Without further losses, all requests end."""
        for _ in range(1000):
            if not self.is_up:
                self.restart()
            elif self.running:
                uid = min(self.running, key=lambda uid: self.running[uid])
                if uid % 5 == 0 and self.running[uid] >= 2:
                    self.die(self.rows())
                else:
                    self.running[uid] = min(6, self.running[uid] + 1)
                    self.deliver(uid)
        assert self.open == set()
        assert not self.ledger.has_unsent
        for uid, ids in self.given.items():
            if uid not in self.aborted | self.crashing:
                assert ids == list(range(10 * uid, 10 * uid + 6)), uid
        assert self.crashing.isdisjoint(uid for uid in self.given if uid % 5)


TestNaiveWorld = NaiveWorld.TestCase


# ---------------------------------------------------------------- restarts


def test_restarts_within_the_window_are_limited() -> None:
    window = RestartWindow(2, 10.0)
    assert window.take(0.0)
    assert window.take(5.0)
    assert not window.take(9.0)
    assert window.take(10.0)
    assert not window.take(14.0)
    window.give_back()
    assert window.take(14.0)


def test_limit_of_0_restarts_allows_none() -> None:
    window = RestartWindow(0, 10.0)
    assert not window.take(0.0)
    window.give_back()
    assert not window.take(1.0)


def test_totals_do_not_fall_across_restarts() -> None:
    totals = AccumulatedTotals()
    stats = Stats(*range(1, 10), 1.0, 1.5, 1, 2, 64, 60, 5)
    assert totals.add(stats) == stats
    totals.restart()
    new = msgspec.structs.replace(stats, num_steps=1, num_running=3, num_free_pages=9)
    added = totals.add(new)
    assert (added.num_steps, added.output_tokens, added.num_running, added.num_free_pages) == (3, 10, 3, 9)
    totals.restart()
    assert totals.add(new).num_steps == 4
