"""The scheduler service without its process: requests, control calls, statistics, waits."""

from __future__ import annotations

import json
import threading
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from aioengine.constraints.grammars import BYTES_PER_GRAMMAR, Grammars
from aioengine.processes.scheduler_process import SchedulerService, build_service
from aioengine.protocol.messages import (
    Abort,
    Control,
    End,
    FinishCode,
    Grammar,
    Limits,
    Message,
    Progress,
    Reply,
    Sampling,
    Stats,
    StepOutput,
    Submit,
    TextChunks,
    TextRules,
)
from aioengine.runner.profile import Profile
from aioengine.scheduler.request_states import Requests
from aioengine.scheduler.scheduler import Scheduler
from aioengine.tokenization.tokenizer import Tokenizer
from tests.kit.grammar_walks import EOS, FOLDER, VOCAB_SIZE
from tests.kit.integrity import check_scheduler
from tests.kit.waiting import until
from tests.processes.engine_kit import fake_settings

M = TypeVar("M")


class Loop:
    """Calls a service like its process, at times chosen by the test."""

    def __init__(self, **options: str | int | float | bool) -> None:
        self.service: SchedulerService = build_service(fake_settings(**options), self.ignore)  # type: ignore[arg-type]
        self.outputs: list[StepOutput] = []
        self.said: list[Message] = []

    def ignore(self, progress: Progress) -> None: ...

    def give(self, now: float, *messages: Message) -> None:
        """Run one iteration of the loop."""
        self.service.handle(list(messages), now)
        outbox = self.service.step(now)
        self.outputs += [message for message in outbox.to_peer if isinstance(message, StepOutput)]
        self.said += outbox.to_frontend

    def run(self, now: float) -> None:
        """Run iterations until there is nothing to do."""
        while self.service.wait_s(now) == 0:
            self.give(now)
        check_scheduler(self.service._core.scheduler)

    def ends(self) -> dict[int, End]:
        return {end.uid: end for output in self.outputs for end in output.ended}

    def of(self, kind: type[M]) -> list[M]:
        return [message for message in self.said if isinstance(message, kind)]

    def call(self, name: str, now: float = 1.0, **arguments: Any) -> Reply:
        self.give(now, Control(len(self.said), name, arguments))
        return self.of(Reply)[-1]


def submit(uid: int, *, limits: Limits | None = None, num_prompt: int = 5) -> Submit:
    return Submit(uid, list(range(num_prompt)), Sampling(seed=1), limits or Limits(4), TextRules())


def test_requests_run_until_their_ends() -> None:
    loop = Loop()
    loop.give(1.0, submit(1), submit(2), Abort([2]))
    loop.run(1.0)
    assert {uid: end.code for uid, end in loop.ends().items()} == {1: FinishCode.LENGTH, 2: FinishCode.ABORT}
    assert sum(output.tokens.uids.count(1) for output in loop.outputs) == 4


def test_request_that_cannot_be_queued_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Requests.submit

    def refuse_second(self: Requests, submit: Submit, now: float) -> None:
        if submit.uid == 2:
            raise KeyError("broken")
        plain(self, submit, now)

    monkeypatch.setattr(Requests, "submit", refuse_second)
    loop = Loop()
    loop.give(1.0, submit(1), submit(2), submit(3))
    loop.run(1.0)
    failed = loop.ends().pop(2)
    assert (failed.code, failed.stage, failed.message) == (FinishCode.FAILED, "schedule", "KeyError: 'broken'")
    assert {loop.ends()[uid].code for uid in (1, 3)} == {FinishCode.LENGTH}


def test_statistics_are_sent_at_intervals_when_idle_and_as_heartbeats() -> None:
    loop = Loop()
    loop.give(1.0)
    assert len(loop.of(Stats)) == 1  # the first heartbeat
    loop.give(1.05, submit(1, limits=Limits(100)))
    loop.give(1.06)
    assert len(loop.of(Stats)) == 1
    loop.give(1.11)
    assert (len(loop.of(Stats)), loop.of(Stats)[-1].num_running) == (2, 1)
    loop.run(1.12)
    assert (len(loop.of(Stats)), loop.of(Stats)[-1].num_running) == (3, 0)
    assert loop.of(Stats)[-1].num_free_pages == 512
    assert loop.service.wait_s(1.12) == pytest.approx(1.0)
    loop.give(2.0)
    assert len(loop.of(Stats)) == 3
    loop.give(2.2)
    assert len(loop.of(Stats)) == 4


def test_last_tokens_are_sent_before_the_final_statistics() -> None:
    loop = Loop()
    loop.give(1.0, submit(1))
    while not loop.ends():
        loop.give(1.0)
    assert [stats.num_running for stats in loop.of(Stats)] == [1]
    assert loop.service.wait_s(1.0) == 0
    loop.give(1.0)
    assert [stats.num_running for stats in loop.of(Stats)] == [1, 0]
    assert loop.service.wait_s(1.0) > 0


def test_deadlines_pass_while_paused() -> None:
    loop = Loop()
    assert loop.call("pause", 1.0).success
    loop.give(1.0, submit(1, limits=Limits(4, deadlines={"total": 1.5})))
    loop.run(1.0)
    assert loop.service.wait_s(1.0) == pytest.approx(0.5)
    loop.give(1.6)
    assert (loop.ends()[1].code, loop.ends()[1].matched) == (FinishCode.DEADLINE, "total")
    loop.give(1.6, submit(2))
    assert loop.call("continue", 1.6).success
    loop.run(1.6)
    assert loop.ends()[2].code == FinishCode.LENGTH


def test_cache_is_flushed_only_while_nothing_runs_or_waits() -> None:
    loop = Loop()
    loop.call("pause")
    loop.give(1.0, submit(1, num_prompt=40))
    refused = loop.call("flush_cache")
    assert (refused.success, refused.message) == (
        False,
        "the cache is not flushed while requests use it: 0 running, 1 waiting",
    )
    loop.call("continue")
    loop.run(1.0)
    assert loop.of(Stats)[-1].num_cached_pages > 0
    assert loop.call("flush_cache").success
    assert loop.of(Stats)[-1].num_cached_pages == 0


def test_control_calls_are_answered_and_unknown_names_are_listed() -> None:
    loop = Loop()
    info = json.loads(loop.call("server_info").data)
    assert info["settings"]["memory"]["page_size"] == 16
    assert info["facts"]["num_pages"] == 512
    assert info["facts"]["start_imports_s"] >= 0
    assert info["stats"]["num_running"] == 0
    assert "objects" in loop.call("freeze_gc").message
    unknown = loop.call("flush_cash")
    assert not unknown.success
    assert "unknown control call 'flush_cash'; allowed: flush_cache, pause, continue" in unknown.message


def test_failed_control_call_has_a_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: Profile, **arguments: object) -> tuple[bool, str, str]:
        raise ZeroDivisionError("no profiler")

    monkeypatch.setattr(Profile, "start", start)
    loop = Loop()
    reply = loop.call("start_profile", folder="/tmp")
    assert (reply.success, reply.message) == (False, "start_profile failed: ZeroDivisionError: no profiler")
    loop.give(1.0, submit(1))
    loop.run(1.0)
    assert loop.ends()[1].code == FinishCode.LENGTH


def test_runner_that_fails_repeatedly_ends_the_service() -> None:
    loop = Loop(raise_at=1, raise_times=100)

    def go_on() -> None:
        for uid in range(5):
            loop.give(1.0, submit(uid))
            loop.run(1.0)

    with pytest.raises(RuntimeError, match="raise_at=1"):
        go_on()
    assert loop.ends()[0].code == FinishCode.FAILED


def test_no_statistics_are_sent_while_no_step_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    loop.give(1.0)
    monkeypatch.setattr(Scheduler, "schedule", lambda _self, _now: None)
    loop.give(1.5, submit(1))
    for tenth in range(20, 90):
        loop.give(tenth / 10)
    assert len(loop.of(Stats)) == 1
    assert loop.call("pause", 9.0).success  # it is paused now
    num_stats = len(loop.of(Stats))
    loop.give(10.5)
    loop.give(12.0)
    assert len(loop.of(Stats)) == num_stats + 2


class SlowGrammars(Grammars):
    """Grammars with two compilers that wait for the test."""

    def __init__(self) -> None:
        super().__init__(None, 100)
        self._num_threads = 2
        self.begun: list[str] = []
        self.may_end = threading.Event()

    def _compile(self, grammar: Grammar) -> str:
        self.begun.append(grammar.text)
        self.may_end.wait(10)
        return grammar.text


async def test_grammars_of_ended_requests_are_not_compiled() -> None:
    loop, grammars = Loop(), SlowGrammars()
    loop.service._grammars = grammars
    texts = ["a", "b", "c", "c", "d", "d"]
    for uid, text in enumerate(texts):
        request = submit(uid)
        grammar = Grammar("regex", text)
        loop.give(1.0, replace(request, sampling=replace(request.sampling, grammar=grammar)))
    await until(lambda: len(grammars.begun) == 2)
    loop.give(1.0, Abort([0, 2, 3, 4]))
    grammars.may_end.set()
    await until(lambda: loop.give(1.0) or not loop.service._compiling)
    loop.run(1.0)
    assert sorted(grammars.begun) == ["a", "b", "d"]
    assert {uid for uid, end in loop.ends().items() if end.code == FinishCode.LENGTH} == {1, 5}
    assert grammars.compile(Grammar("regex", "c")).result(10) == "c"


async def test_only_streams_get_a_message_when_their_grammar_is_compiled() -> None:
    loop, grammars = Loop(), SlowGrammars()
    loop.service._grammars = grammars
    loop.call("pause")  # a request need not be admitted for it
    for uid, is_stream in enumerate((True, False, True)):
        request = replace(submit(uid), text=TextRules(stream=is_stream))
        loop.give(1.0, replace(request, sampling=replace(request.sampling, grammar=Grammar("regex", "a"))))
    loop.give(1.0, Abort([2]))
    assert loop.of(TextChunks) == []
    grammars.may_end.set()
    await until(lambda: loop.give(1.0) or not loop.service._compiling)
    assert [message.compiled for message in loop.of(TextChunks)] == [[0]]
    request = replace(submit(3), sampling=replace(submit(3).sampling, grammar=Grammar("regex", "a")))
    loop.give(1.0, request)  # its grammar is compiled
    assert loop.of(TextChunks)[-1].compiled == [3]


async def test_grammars_are_prepared_once_nothing_has_run_for_a_second() -> None:
    loop, grammars = Loop(), Grammars(str(FOLDER), VOCAB_SIZE, (EOS,))
    loop.service._grammars = grammars
    loop.give(1.0)
    loop.give(1.5, submit(1))
    loop.run(2.0)
    loop.give(2.5)
    assert grammars._prepared is None
    loop.give(3.0)
    await until(lambda: bool(json.loads(loop.call("server_info", 4.0).data)["stats"]["grammars_prepared"]))
    assert grammars._vocabulary is not None
    assert grammars._vocabulary.tokenizer.eos_tokens == [EOS]
    grammars.close()


async def test_without_a_tokenizer_nothing_is_prepared() -> None:
    loop, grammars = Loop(), Grammars(None, VOCAB_SIZE)
    loop.service._grammars = grammars
    loop.give(1.0)
    loop.give(9.0)
    assert grammars._prepared is None
    assert not json.loads(loop.call("server_info", 9.0).data)["stats"]["grammars_prepared"]


async def test_preparation_waits_for_running_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    is_read, may_go_on = threading.Event(), threading.Event()
    plain = Tokenizer.__init__

    def read(own: Tokenizer, folder: str) -> None:
        is_read.set()
        may_go_on.wait(10)
        plain(own, folder)

    monkeypatch.setattr(Tokenizer, "__init__", read)
    grammars = Grammars(str(FOLDER), VOCAB_SIZE, (EOS,))
    waits: list[float] = []
    wait = grammars._is_needed.wait
    monkeypatch.setattr(grammars._is_needed, "wait", lambda seconds: waits.append(seconds) or wait(seconds))
    for now in (1.0, 2.0):
        grammars.prepare_when_quiet(now, is_busy=False)
    await until(is_read.is_set)
    grammars.prepare_when_quiet(2.5, is_busy=True)
    may_go_on.set()
    await until(lambda: len(waits) > 1)
    assert not grammars.is_prepared
    assert grammars.compile(Grammar("regex", "a", eos_token_ids=(EOS,))).result(20)
    assert grammars.is_prepared
    grammars.close()


async def test_grammars_of_requests_stay_cached_with_larger_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioengine.constraints.grammars.MAX_CACHED_BYTES", 3 * BYTES_PER_GRAMMAR)
    grammars = SlowGrammars()
    grammars.may_end.set()
    loop = Loop()
    loop.service._grammars = grammars
    grammars.needed = loop.service._needed_grammars
    request = submit(1, limits=Limits(1000))
    loop.give(1.0, replace(request, sampling=replace(request.sampling, grammar=Grammar("regex", "mine"))))
    await until(lambda: loop.give(1.0) or not loop.service._compiling)
    for number in range(9):
        grammars.compile(Grammar("regex", f"{number}")).result(10)
    assert grammars.compile(Grammar("regex", "mine")).done()
    assert grammars.begun.count("mine") == 1
    loop.give(1.0, Abort([1]))
    for number in range(9, 18):
        grammars.compile(Grammar("regex", f"{number}")).result(10)
    grammars.compile(Grammar("regex", "mine")).result(10)
    assert grammars.begun.count("mine") == 2
