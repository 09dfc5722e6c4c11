"""Children as processes and as tasks: starts, work, losses, failed starts and stops."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import psutil
import pytest
import uvloop

from aioengine.errors import EngineDeadError, EngineError, EngineStalledError, EngineStartupError
from aioengine.processes import detokenizer_process
from aioengine.protocol.messages import (
    SCHEDULER,
    Abort,
    Control,
    FinishCode,
    Limits,
    Progress,
    Reply,
    Role,
    Sampling,
    Submit,
    TextChunks,
    TextRules,
)
from aioengine.protocol.orders import ROLES
from aioengine.supervision import handshake
from aioengine.supervision.handshake import Handshake
from aioengine.supervision.launchers._process_child import ProcessChild
from aioengine.testing.fake_runner import FakeModel, FakeRunner, build
from aioengine.transport.base import BacklogFullError
from aioengine.transport.local import LocalSender
from aioengine.transport.zmq import ZmqError
from tests.kit.fake_reference import reference_output
from tests.kit.waiting import until
from tests.processes.engine_kit import Frontend, fake_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aioengine.protocol.messages import Message
    from aioengine.settings.config import Settings

DEMO = str(Path(detokenizer_process.__file__).parents[1] / "demo")

process = pytest.mark.process
launchers = pytest.mark.parametrize("launcher", ["inline", pytest.param("process", marks=process)])
factory_of = f"{__name__}:{{}}".format


def children_of(frontend: Frontend) -> list[psutil.Process]:
    return [psutil.Process(state.pid) for state in frontend.supervisor.process_states()]


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder of the private directories. Other engines do not use it."""
    with tempfile.TemporaryDirectory(prefix="aio-", dir="/tmp") as place:
        monkeypatch.setenv("XDG_RUNTIME_DIR", place)
        yield Path(place)
        assert list(Path(place).iterdir()) == []


@launchers
async def test_requests_stream_to_their_ends(launcher: str) -> None:
    async with Frontend(fake_settings(tokenizer_path=DEMO), launcher=launcher) as frontend:
        for uid in range(20):
            frontend.submit(uid, num_tokens=10, text=TextRules(stream=uid % 2 == 0))
        for uid in range(20):
            end = await frontend.finished(uid)
            assert end.code == FinishCode.LENGTH
            assert len(frontend.token_ids(uid)) == 10
            assert end.admitted_at is not None
            assert end.admitted_at <= (end.first_token_at or 0) <= end.ended_at
        assert frontend.text(0) != ""
        stats = await frontend.idle_stats()
        assert stats.num_free_pages == stats.num_pages
        assert stats.output_tokens == 200
        scheduler, detokenizer = frontend.supervisor.process_states()
        assert (scheduler.role, detokenizer.role) == ("scheduler", "detokenizer")
        assert scheduler.alive
        assert detokenizer.alive
        assert 0 <= (scheduler.last_heartbeat_s or 0) < 30
        assert scheduler.last_step_s is not None
    assert frontend.failures == []


@launchers
async def test_launchers_give_the_same_tokens(launcher: str) -> None:
    async with Frontend(fake_settings(), launcher=launcher) as frontend:
        frontend.submit(3)
        await frontend.finished(3)
        prompt = [(3 * 7 + index) % 900 for index in range(5)]
        model = FakeModel(vocab_size=1000)
        assert frontend.token_ids(3) == reference_output(prompt, Sampling(seed=3), Limits(8), model)


@launchers
async def test_aborts_and_stop_strings_free_the_request(launcher: str) -> None:
    async with Frontend(fake_settings(tokenizer_path=DEMO), launcher=launcher) as frontend:
        frontend.submit(1, num_tokens=3000, text=TextRules(stop=("a", "e", "i", "o", "u")))
        frontend.submit(2, num_tokens=3000)
        frontend.supervisor.send([Abort([2])])
        assert (await frontend.finished(1)).code == FinishCode.STOP
        assert (await frontend.finished(2)).code == FinishCode.ABORT
        stats = await frontend.idle_stats()
        assert stats.num_free_pages == stats.num_pages


@launchers
async def test_mixed_requests_end_exactly_once(launcher: str) -> None:
    draw = random.Random(5)
    async with Frontend(fake_settings(tokenizer_path=DEMO), launcher=launcher) as frontend:
        for uid in range(300):
            stop = ("e", "an") if draw.random() < 0.3 else ()
            rules = TextRules(stop=stop, stream=draw.random() < 0.5, stream_interval=draw.choice([1, 4]))
            frontend.submit(uid, num_tokens=draw.randint(1, 20), text=rules, num_prompt=draw.randint(1, 60))
            if draw.random() < 0.3:
                frontend.supervisor.send([Abort([draw.randint(0, uid)])])
                await asyncio.sleep(0)
        ends = [await frontend.finished(uid) for uid in range(300)]
        assert {end.code for end in ends} == {FinishCode.STOP, FinishCode.LENGTH, FinishCode.ABORT}
        stats = await frontend.idle_stats()
        assert stats.num_free_pages == stats.num_pages
        assert stats.num_finished + stats.num_aborted == 300
        assert not any(
            message.ended for message in frontend.heard if isinstance(message, TextChunks)
        )  # no second end later


@launchers
async def test_control_calls_are_answered(launcher: str) -> None:
    async with Frontend(launcher=launcher) as frontend:
        assert (await frontend.call("flush_cache", 1)).success
        assert "unknown control call" in (await frontend.call("nonsense", 2)).message


async def test_messages_of_one_loop_iteration_are_sent_in_one_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Frontend(launcher="inline") as frontend:
        frames: list[int] = []
        sender = frontend.supervisor._incarnation._launcher.sender
        plain = type(sender).send
        monkeypatch.setattr(type(sender), "send", lambda own, sent: (frames.append(len(sent)), plain(own, sent))[1])
        for uid in range(5):
            frontend.submit(uid)
        assert frames == []
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert frames[0] == 5
        for uid in range(5):
            await frontend.finished(uid)


async def test_prompts_that_fill_a_quarter_of_a_step_are_sent_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = fake_settings()
    step_tokens = settings.scheduler.chunk_tokens
    async with Frontend(settings, launcher="inline") as frontend:
        frames: list[int] = []
        sender = frontend.supervisor._incarnation._launcher.sender
        plain = type(sender).send
        monkeypatch.setattr(type(sender), "send", lambda own, sent: (frames.append(len(sent)), plain(own, sent))[1])
        for uid in range(5):
            frontend.submit(uid, num_tokens=3, num_prompt=step_tokens // 8)
        assert frames == [2, 2]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert frames[:3] == [2, 2, 1]
        for uid in range(5):
            assert (await frontend.finished(uid)).code == FinishCode.LENGTH


# ---------------------------------------------------------------- losses


@process
async def test_child_of_another_rank_ends_with_its_replica() -> None:
    async with Frontend(roles=[*ROLES, Role("detokenizer", 1)], max_restarts=1) as frontend:
        frontend.submit(1)
        assert (await frontend.finished(1)).code == FinishCode.LENGTH
        states = frontend.supervisor.process_states()
        assert [state.role for state in states] == ["scheduler", "detokenizer", "detokenizer-1"]
        assert [child.name() for child in children_of(frontend)] == [
            "aioengine:sched",
            "aioengine:detok",
            "aioengine:de-1",
        ]
        os.kill(states[2].pid, signal.SIGKILL)
        frontend.submit(2, num_tokens=30)
        await until(lambda: frontend.supervisor.num_restarts == 1 and not frontend.supervisor.is_recovering)
        await frontend.finished(2)
        assert len(frontend.token_ids(2)) == 30
        after = frontend.supervisor.process_states()
        assert [state.role for state in after] == [state.role for state in states]
        assert {state.pid for state in states}.isdisjoint(state.pid for state in after)


@process
@pytest.mark.parametrize(("role", "kind"), [("scheduler", "asyncio"), ("detokenizer", "uvloop")])
def test_killed_child_is_an_error_within_a_second(role: str, kind: str) -> None:
    async def main() -> tuple[EngineError, float]:
        async with Frontend(fake_settings(step_time_s=0.02)) as frontend:
            frontend.submit(1, num_tokens=1000)
            states = {state.role: state for state in frontend.supervisor.process_states()}
            os.kill(states[role].pid, signal.SIGKILL)
            start = time.monotonic()
            error = await frontend.failure()
            took_s = time.monotonic() - start
            other = next(state for name, state in states.items() if name != role)
            ends_at = start + 20
            while psutil.pid_exists(other.pid) and time.monotonic() < ends_at:
                await asyncio.sleep(0.005)
                if not any(state.alive for state in frontend.supervisor.process_states()):
                    break
            assert not any(state.alive for state in frontend.supervisor.process_states())
            frontend.submit(2)  # it has no effect
        assert len(frontend.failures) == 1
        return error, took_s

    factory = uvloop.new_event_loop if kind == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        error, took_s = runner.run(main())
    assert isinstance(error, EngineDeadError)
    assert (error.role, error.signal) == (role, signal.SIGKILL)
    assert took_s < 10  # far less than stall_timeout, which would detect it, too


@launchers
async def test_exception_in_the_loop_of_a_child_is_reported_with_its_traceback(launcher: str) -> None:
    async with Frontend(fake_settings(raise_at=3, raise_times=1000), launcher=launcher) as frontend:
        for uid in range(5):
            frontend.submit(uid, num_tokens=100)
            await asyncio.sleep(0.02)
        error = await frontend.failure()
    assert isinstance(error, EngineDeadError)
    assert (error.role, error.exit_code) == ("scheduler", 1)
    assert any("InjectedFault" in line for line in error.log_lines)
    assert "InjectedFault" in str(error)


@process
async def test_child_that_exits_without_a_message_is_reported(tmp_path: Path) -> None:
    async with Frontend(fake_settings(exit_at=2, exit_code=7)) as frontend:
        frontend.submit(1, num_tokens=100)
        error = await frontend.failure()
    assert isinstance(error, EngineDeadError)
    assert (error.exit_code, error.signal) == (7, None)
    assert "exited with code 7" in str(error)


@process
async def test_exits_are_noticed_by_polling_without_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, flags: int = 0) -> NoReturn:
        raise OSError("not here")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    async with Frontend() as frontend:
        os.kill(frontend.supervisor.process_states()[1].pid, signal.SIGKILL)
        assert isinstance(await frontend.failure(), EngineDeadError)


async def test_exception_in_the_message_handler_ends_the_engine() -> None:
    async with Frontend(launcher="inline") as frontend:
        frontend.heard = None  # type: ignore[assignment]
        frontend.submit(1)
        error = await frontend.failure()
        assert "could not be handled" in str(error)
        assert isinstance(error.__cause__, TypeError)


async def test_request_that_waits_for_an_adopted_request_keeps_its_deadline() -> None:
    async with Frontend(launcher="inline") as frontend:
        assert (await frontend.call("pause")).success
        frontend.supervisor.adopt({1: 1_000_000})
        limits = (Limits(8), Limits(8, deadlines={"total": 0.0}))
        submits = [Submit(uid, [uid], Sampling(seed=uid), limit, TextRules()) for uid, limit in enumerate(limits, 1)]
        frontend.supervisor.send(submits)
        assert (await frontend.finished(2)).code is FinishCode.DEADLINE
        assert frontend.supervisor.ledger.num_open == 1


class OtherStr(str):
    """A string that messages cannot contain."""

    __slots__ = ()


@launchers
async def test_message_that_cannot_be_encoded_fails_alone(launcher: str) -> None:
    async with Frontend(launcher=launcher) as frontend:
        frontend.submit(1)
        frontend.submit(2, text=TextRules(stop=(OtherStr("a"),)))
        frontend.submit(3, text=TextRules(stop=("\ud800",)))
        frontend.supervisor.send([Control(7, "flush_cache", {"size": 2**70})])
        frontend.submit(4)
        for uid in (2, 3):
            end = await frontend.finished(uid)
            assert (end.code, end.stage) == (FinishCode.FAILED, "submit")
            assert "it cannot be sent to the scheduler process" in end.message
        for uid in (1, 4):
            assert (await frontend.finished(uid)).code == FinishCode.LENGTH
        reply = next(message for message in frontend.heard if isinstance(message, Reply))
        assert (reply.call_id, reply.success, reply.stage) == (7, False, "submit")
        assert frontend.supervisor.ledger.num_open == 0
        assert frontend.failures == []


async def test_error_of_the_sockets_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(own: object, messages: list[Message]) -> NoReturn:
        raise TypeError("no socket")

    async with Frontend(launcher="inline") as frontend:
        monkeypatch.setattr(LocalSender, "send", fail)
        frontend.submit(1)
        assert "messages for the scheduler could not be sent" in str(await frontend.failure())


async def test_scheduler_that_takes_no_messages_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(own: object, messages: list[Message]) -> NoReturn:
        raise BacklogFullError("the scheduler process has not read for too long")

    async with Frontend(launcher="inline") as frontend:
        monkeypatch.setattr(LocalSender, "send", refuse)
        frontend.submit(1)
        error = await frontend.failure()
    assert isinstance(error, EngineStalledError)
    assert "the scheduler process has not read" in str(error)


# ---------------------------------------------------------------- failing starts


def build_badly(settings: object, report: object) -> NoReturn:
    raise MemoryError("the pool needs 12 GiB, there are 3")


def build_without_end(settings: object, report: Callable[[Progress], None]) -> NoReturn:
    report(Progress("weights", 3, 7, "shards"))
    time.sleep(100)
    sys.exit(1)


def build_slowly(settings: Settings, report: Callable[[Progress], None]) -> FakeRunner:
    time.sleep(1.0)
    return build(settings, report)


def build_and_vanish(settings: object, report: object) -> NoReturn:
    print("a last word")
    os._exit(3)


@launchers
@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (factory_of("build_badly"), ["MemoryError: the pool needs 12 GiB, there are 3", "in build_badly"]),
        (factory_of("nowhere"), ["AttributeError", "has no attribute 'nowhere'"]),
        ("no_such_module:build", ["ModuleNotFoundError", "no_such_module"]),
    ],
)
async def test_failed_start_raises_the_message_of_the_child(launcher: str, factory: str, words: list[str]) -> None:
    frontend = Frontend(fake_settings(factory=factory), launcher=launcher)
    with pytest.raises(EngineStartupError) as caught:
        await frontend.supervisor.start()
    for word in ["the scheduler process could not start", *words]:
        assert word in "\n".join([str(caught.value), *caught.value.__notes__])
    assert "Traceback" not in str(caught.value)
    assert not any(state.alive for state in frontend.supervisor.process_states())
    assert frontend.failures == []
    await frontend.supervisor.stop(1.0)


@process
async def test_child_that_exits_while_it_starts_is_reported_with_its_last_lines() -> None:
    with pytest.raises(EngineStartupError, match=r"exited with code 3 while it started\n  scheduler: a last word"):
        await Frontend(fake_settings(factory=factory_of("build_and_vanish"))).supervisor.start()


@process
async def test_error_while_an_exit_during_the_start_is_handled_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: ProcessChild) -> NoReturn:
        raise ZeroDivisionError("unforeseen")

    monkeypatch.setattr(ProcessChild, "log_lines", fail)
    with pytest.raises(EngineStartupError, match="scheduler process could not be handled: ZeroDivisionError"):
        await Frontend(fake_settings(factory=factory_of("build_and_vanish"))).supervisor.start()


@process
async def test_child_that_is_killed_while_it_starts_is_reported_with_the_signal() -> None:
    frontend = Frontend(fake_settings(factory=factory_of("build_without_end")))
    starting = asyncio.create_task(frontend.supervisor.start())
    await until(frontend.supervisor.process_states)
    os.kill(frontend.supervisor.process_states()[0].pid, signal.SIGKILL)
    words = r"the scheduler process .* was killed by signal 9 \(perhaps because memory was short\) while it started"
    with pytest.raises(EngineStartupError, match=words):
        await starting


@process
async def test_start_that_takes_too_long_ends() -> None:
    frontend = Frontend(fake_settings(factory=factory_of("build_without_end")), startup_timeout_s=1.0)
    with pytest.raises(
        EngineStartupError, match=r"scheduler process.* not ready within 1 seconds.*with startup_timeout"
    ):
        await frontend.supervisor.start()
    assert not any(state.alive for state in frontend.supervisor.process_states())


async def test_timeout_of_the_start_names_the_progress() -> None:
    handshake = Handshake([SCHEDULER])
    handshake.receive(Progress("weights", 3, 7, "shards"))
    with pytest.raises(EngineStartupError, match=r"scheduler process was not ready .*weights: 3 of 7 shards"):
        await handshake.wait(0)


@process
@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.2])
async def test_cancelled_start_leaves_no_process(after_s: float) -> None:
    frontend = Frontend(fake_settings(factory=factory_of("build_without_end")))
    starting = asyncio.create_task(frontend.supervisor.start())
    await asyncio.sleep(after_s)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not any(state.alive for state in frontend.supervisor.process_states())


@launchers
@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.2])
async def test_stop_during_the_start_fails_the_start(launcher: str, after_s: float) -> None:
    frontend = Frontend(fake_settings(factory=factory_of("build_slowly")), launcher=launcher)
    starting = asyncio.create_task(frontend.supervisor.start())
    await asyncio.sleep(after_s)
    await frontend.supervisor.stop(1.0)
    if launcher == "inline" and after_s > 0:  # a task is ready at once
        await starting
    else:
        with pytest.raises(EngineStartupError, match="the engine was shut down while it started"):
            await starting
    assert not any(state.alive for state in frontend.supervisor.process_states())


async def test_another_version_of_the_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "fingerprint", lambda: "ours")
    with pytest.raises(EngineStartupError, match="runs another version of aioengine: its protocol is .*, ours ours"):
        await Frontend(launcher="inline").supervisor.start()


def test_unknown_launcher_is_named() -> None:
    with pytest.raises(ValueError, match=r"no plug-in 'proces'.*did you mean 'process'"):
        asyncio.run(Frontend(launcher="proces").supervisor.start())


@process
async def test_start_without_a_directory_for_sockets_names_the_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioengine.transport.addresses.os.access", lambda *_: False)
    with pytest.raises(EngineStartupError, match=r"the engine has no place for its sockets: .* set TMPDIR"):
        await Frontend().supervisor.start()


# ---------------------------------------------------------------- stops


@launchers
async def test_stop_is_fast_and_silent_and_may_be_repeated(launcher: str, capfd: pytest.CaptureFixture[str]) -> None:
    await Frontend(launcher=launcher).supervisor.stop(1.0)  # never started
    frontend = Frontend(fake_settings(step_time_s=0.01), launcher=launcher)
    await frontend.supervisor.start()
    children = children_of(frontend)
    frontend.submit(1, num_tokens=1000)
    await asyncio.sleep(0.05)
    start = time.monotonic()
    await frontend.supervisor.stop(50.0)
    assert time.monotonic() - start < 40  # less than the time after which children are killed
    await frontend.supervisor.stop(5.0)
    frontend.supervisor.kill_now()
    frontend.submit(2)
    if launcher == "process":
        assert not any(child.is_running() for child in children)
    assert [state.alive for state in frontend.supervisor.process_states()] == [False, False]
    assert frontend.failures == []
    assert capfd.readouterr() == ("", "")


@process
async def test_child_that_ignores_sigterm_is_killed() -> None:
    frontend = Frontend()
    await frontend.supervisor.start()
    for child in children_of(frontend):
        child.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    await frontend.supervisor.stop(0.5)
    assert time.monotonic() - start < 20
    assert not any(state.alive for state in frontend.supervisor.process_states())


@process
def test_engine_can_be_killed_without_its_loop() -> None:

    async def begin() -> Frontend:
        frontend = Frontend()
        await frontend.supervisor.start()
        assert all(state.alive for state in frontend.supervisor.process_states())
        return frontend

    frontend = asyncio.run(begin())  # this cancels the engine's tasks, so that it may have started to end
    frontend.supervisor.kill_now()
    frontend.supervisor.kill_now()
    assert not any(state.alive for state in frontend.supervisor.process_states())


@process
async def test_starting_and_stopping_many_times_leaks_nothing() -> None:
    async def cycle() -> None:
        async with Frontend() as frontend:
            frontend.submit(1)
            await frontend.finished(1)

    def holdings() -> tuple[int, int, int]:
        own = psutil.Process()
        return own.num_fds(), own.num_threads(), len(own.children(recursive=True))

    await cycle()
    before = holdings()
    for _ in range(2):
        await asyncio.gather(cycle(), cycle())
    # Threads end a moment after the shutdown.
    await until(lambda: all(now <= then for now, then in zip(holdings(), before, strict=True)))


# ---------------------------------------------------------------- logs and resources of children


def build_and_log(settings: Settings, report: Callable[[Progress], None]) -> FakeRunner:
    logger = logging.getLogger("aioengine.runner")
    for number in range(1000):
        logger.error("line %d", number)
    logging.getLogger("somebody.else").error("not forwarded")
    print("to nobody's terminal")
    from aioengine.testing.fake_runner import build

    return build(settings, report)  # type: ignore[arg-type]


@process
async def test_log_records_are_forwarded_to_the_parent_up_to_a_rate(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    async with Frontend(fake_settings(factory=factory_of("build_and_log"))):
        pass
    lines = [record.getMessage() for record in caplog.records if record.name == "aioengine.runner"]
    assert lines[:2] == ["line 0", "line 1"]
    assert 200 <= len(lines) < 300
    assert {record.name for record in caplog.records} <= {"aioengine.runner", "asyncio"}
    assert capfd.readouterr() == ("", "")


@process
async def test_idle_engine_uses_no_cpu_time() -> None:
    async with Frontend() as frontend:
        frontend.submit(1)
        await frontend.finished(1)
        processes = [psutil.Process(), *children_of(frontend)]
        await asyncio.sleep(0.1)
        before = [sum(process.cpu_times()[:2]) for process in processes]
        await asyncio.sleep(1.0)
        used = [sum(process.cpu_times()[:2]) - start for process, start in zip(processes, before, strict=True)]
    assert sum(used) < 0.8  # ticks of 10 ms; a loop that spins takes a second


@pytest.mark.parametrize("num_turns", range(8))
@pytest.mark.parametrize("place_of_child", [0, 1])
async def test_inline_child_ends_while_a_message_arrives(place_of_child: int, num_turns: int) -> None:
    async with Frontend(launcher="inline") as frontend:
        await asyncio.sleep(0.02)  # both wait for messages
        frontend.submit(1, num_tokens=3000)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        child = frontend.supervisor._incarnation._launcher.children[place_of_child]
        child.terminate()
        for _ in range(10):
            await asyncio.sleep(0)
        assert child.exit_code == 0


async def test_unexpected_exception_in_a_replacement_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise calls would wait forever."""

    async def launch(_: object) -> NoReturn:
        raise ZeroDivisionError("unforeseen")

    async with Frontend(fake_settings(raise_at=1, raise_times=9), launcher="inline", max_restarts=2) as frontend:
        monkeypatch.setattr("aioengine.supervision.launchers.inline.InlineLauncher.launch", launch)
        for uid in range(2):
            frontend.submit(uid)
            await frontend.finished(uid)
        frontend.submit(2)
        error = await frontend.failure()
        assert isinstance(error, EngineDeadError)
        assert isinstance(error.__cause__, ZeroDivisionError)


@process
@pytest.mark.parametrize("end", ["ZmqSender", "AsyncZmqReceiver"])
async def test_sockets_that_cannot_be_opened_fail_the_start(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise ZmqError(errno.EMFILE)

    monkeypatch.setattr(f"aioengine.supervision.launchers.process.{end}", refuse)
    num_files = len(os.listdir("/proc/self/fd"))
    supervisor = Frontend().supervisor
    with pytest.raises(EngineStartupError, match="sockets could not be opened: Too many open files"):
        await supervisor.start()
    assert not any(state.alive for state in supervisor.process_states())
    assert len(os.listdir("/proc/self/fd")) == num_files
