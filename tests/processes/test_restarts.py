"""Lost processes are replaced, and all texts are the same as without a loss."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec
import psutil
import pytest

from aioengine.api.engine import AsyncEngine
from aioengine.errors import EngineClosedError, EngineDeadError, RequestError
from aioengine.supervision.handshake import Handshake
from aioengine.supervision.launchers._process_child import ProcessChild
from aioengine.testing.fake_engine import fake_async_engine
from aioengine.testing.fake_runner import build
from aioengine.testing.faults import Faults
from aioengine.transport.addresses import BOARD_SUFFIX
from tests.kit.waiting import until
from tests.processes.engine_kit import Frontend, fake_settings
from tests.processes.restart_kit import (
    ANSWERS,
    ROLES,
    ask,
    ask_all,
    frontend_of,
    pid_of,
    undisturbed,
    until_idle,
    until_restarted,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aioengine.api.stream import Stream
    from aioengine.settings.config import Settings
    from aioengine.testing.fake_runner import FakeRunner

process = pytest.mark.process
factory_of = f"{__name__}:{{}}".format


# ---------------------------------------------------------------- one loss at every moment


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("role", [0, 1])
async def test_loss_at_any_turn_of_the_loop_changes_nothing(role: int, stream: bool) -> None:
    """Children are tasks. In each round one of them is killed a little later, until the requests end first."""
    expected = await undisturbed(has_answers=True)
    num_turns, num_losses = 0, 0
    async with fake_async_engine(ANSWERS, max_restarts=10_000) as engine:
        processes = frontend_of(engine).parts.processes
        scheduler = processes._incarnation._launcher.children[0]  # type: ignore[attr-defined]
        while True:
            asking = asyncio.create_task(ask_all(engine, stream=stream))
            while not processes.ledger.num_open:  # type: ignore[attr-defined]  # noqa: ASYNC110
                await asyncio.sleep(0)
            for _ in range(num_turns):
                await asyncio.sleep(0)
            if asking.done():
                break
            processes._incarnation._launcher.children[role].kill()  # type: ignore[attr-defined]
            num_losses += 1
            assert await asking == expected, f"after {num_turns} turns"
            await until_restarted(engine, num_losses)
            num_turns += 6
        assert (scheduler in processes._incarnation._launcher.children) is (role == 1)  # type: ignore[attr-defined]
        await until_idle(engine)
    assert num_losses > 10


@process
@pytest.mark.parametrize(
    ("kill_at", "tp_size"),
    [
        (1, 1),
        (18, 1),
        (18, 2),
        *(pytest.param(step, 1, marks=pytest.mark.slow) for step in (2, 3, 8, 17, 40, 59)),
        *(pytest.param(step, 2, marks=pytest.mark.slow) for step in (1, 8, 40)),
    ],
)
async def test_scheduler_that_is_killed_in_a_step(kill_at: int, tp_size: int, tmp_path: Path) -> None:
    stream = kill_at in (1, 8, 17, 40)
    expected = await undisturbed(has_answers=kill_at % 2 == 0)
    faults = Faults(kill_at=kill_at, once=str(tmp_path / "once"))
    answers = ANSWERS if kill_at % 2 == 0 else None
    async with fake_async_engine(answers, faults=faults, tp_size=tp_size) as engine:
        first = engine.get_all_child_pids()
        assert await ask_all(engine, stream=stream) == expected
        assert engine.stats()["num_restarts"] == 1
        assert not set(first) & set(engine.get_all_child_pids())
        assert engine.health()["state"] == "running"
        await until_idle(engine)


@process
@pytest.mark.parametrize(
    ("role", "number", "stream"),
    [
        ("scheduler", signal.SIGKILL, True),
        ("detokenizer", signal.SIGSEGV, False),
        ("runner-1", signal.SIGKILL, True),
        pytest.param("runner-1", signal.SIGSEGV, False, marks=pytest.mark.slow),
        pytest.param("scheduler", signal.SIGSEGV, False, marks=pytest.mark.slow),
        pytest.param("detokenizer", signal.SIGKILL, False, marks=pytest.mark.slow),
        pytest.param("detokenizer", signal.SIGTERM, True, marks=pytest.mark.slow),
    ],
)
async def test_streams_continue_after_a_process_is_killed(role: str, number: signal.Signals, stream: bool) -> None:
    expected = await undisturbed(has_answers=True)
    async with fake_async_engine(ANSWERS, step_time_s=0.003, tp_size=2 if role == "runner-1" else 1) as engine:
        for num_restarts, after_s in enumerate((0.0, 0.03, 0.12), 1):
            asking = asyncio.create_task(ask_all(engine, stream=stream))
            await asyncio.sleep(after_s)
            os.kill(pid_of(engine, role), number)
            assert await asking == expected
            await until_restarted(engine, num_restarts)
        await until_idle(engine)


@process
async def test_streams_continue_after_a_process_exits_without_a_message(tmp_path: Path) -> None:
    expected = await undisturbed(has_answers=True)
    faults = Faults(exit_at=20, exit_code=3, once=str(tmp_path / "once"))
    async with fake_async_engine(ANSWERS, faults=faults) as engine:
        assert await ask_all(engine, stream=True) == expected
        assert engine.stats()["num_restarts"] == 1


@process
@pytest.mark.parametrize("role", ["scheduler", "detokenizer", "both"])
async def test_streams_continue_after_both_processes_are_lost(role: str) -> None:
    expected = await undisturbed(has_answers=True)
    async with fake_async_engine(ANSWERS, step_time_s=0.005, stall_timeout_s=2.0) as engine:
        asking = asyncio.create_task(ask_all(engine, stream=True))
        await asyncio.sleep(0.1)
        for role_of_process in ROLES:
            if role == "both":
                os.kill(pid_of(engine, role_of_process), signal.SIGKILL)
            elif role == role_of_process:
                os.kill(pid_of(engine, role_of_process), signal.SIGSTOP)
        assert await asking == expected
        await until_restarted(engine, 1)


@process
async def test_step_that_does_not_end_is_computed_again(tmp_path: Path) -> None:
    expected = await undisturbed(has_answers=True)
    faults = Faults(stall_at=9, stall_s=100.0, once=str(tmp_path / "once"))
    async with fake_async_engine(ANSWERS, faults=faults, stall_timeout_s=2.0) as engine:
        assert await ask_all(engine, stream=True) == expected
        assert engine.stats()["num_restarts"] == 1


# ---------------------------------------------------------------- too many losses


@process
async def test_too_many_losses_end_all_calls_with_an_error() -> None:
    async with fake_async_engine({"": "x" * 500}, step_time_s=0.01, max_restarts=2) as engine:
        whole = engine.async_generate("one", {"max_new_tokens": 400})
        stream = engine.async_generate("two", {"max_new_tokens": 400}, stream=True)
        for num_restarts in (1, 2):
            os.kill(pid_of(engine, "scheduler"), signal.SIGKILL)
            await until_restarted(engine, num_restarts)
        pid = pid_of(engine, "detokenizer")
        os.kill(pid, signal.SIGKILL)
        killed_at = time.monotonic()
        with pytest.raises(EngineDeadError) as caught:
            async for _ in stream:
                pass
        with pytest.raises(EngineDeadError):
            await whole
        with pytest.raises(EngineDeadError):
            engine.async_generate("later")
        with pytest.raises(EngineDeadError):
            await engine.flush_cache()
        assert time.monotonic() - killed_at < 20  # not after a timeout
        error = caught.value
        assert (error.role, error.pid, error.signal) == ("detokenizer", pid, signal.SIGKILL)
        assert error.__notes__ == [
            "its processes were replaced 2 times within 600 seconds, which is all that max_restarts=2 allows"
        ]
        assert engine.health()["state"] == "dead"
        await until(lambda: not engine.get_all_child_pids())


@process
async def test_losses_before_the_restart_window_do_not_count() -> None:
    async with fake_async_engine({"": "x" * 500}, processes=True, max_restarts=1, restart_window_s=0.2) as engine:
        for num_restarts in (1, 2, 3):
            os.kill(pid_of(engine, "scheduler"), signal.SIGKILL)
            await until_restarted(engine, num_restarts)
            await asyncio.sleep(0.2)
        assert (await engine.async_generate("one", {"max_new_tokens": 3}))["text"] == "xxx"


def build_once(settings: Settings, report: Callable[..., None]) -> FakeRunner:
    """Build a runner once. The second time, if a file exists, exit, fail or hang."""
    options = dict(settings.runner.options)
    marker, how = Path(str(options.pop("marker"))), options.pop("how")
    if marker.exists():
        marker.write_text(marker.read_text() + ".")
        if how == "vanish":
            os._exit(9)
        if how == "fail":
            raise MemoryError("somebody else took it")
        time.sleep(60)
    marker.write_text("")
    runner = msgspec.structs.replace(settings.runner, options=options)
    return build(msgspec.structs.replace(settings, runner=runner), report)


@process
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("vanish", "exited with code 9"),
        ("sleep", "was not ready"),
        pytest.param("fail", "somebody else took it", marks=pytest.mark.slow),
    ],
)
async def test_failed_replacements_count_as_restarts(
    how: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "sleep":
        monkeypatch.setattr("aioengine.supervision.supervisor._STARTUP_TIMEOUT_FACTOR", 0.0)
        monkeypatch.setattr("aioengine.supervision.supervisor._MIN_STARTUP_TIMEOUT_S", 1.5)
    marker = tmp_path / "marker"
    settings = fake_settings(factory=factory_of("build_once"), step_time_s=0.01, marker=str(marker), how=how)
    async with Frontend(settings, max_restarts=2) as frontend:
        frontend.submit(1, num_tokens=1000)
        await asyncio.sleep(0.05)
        os.kill(frontend.supervisor.process_states()[0].pid, signal.SIGKILL)
        error = await frontend.failure()
        assert isinstance(error, EngineDeadError)
        assert error.signal == signal.SIGKILL
        assert words in str(error.__cause__)
        if how != "sleep":  # a slow process may not start in time
            assert marker.read_text() == ".."
        assert frontend.supervisor.num_restarts == 2
        assert not any(state.alive for state in frontend.supervisor.process_states())


@process
async def test_replacement_that_is_killed_while_it_starts_is_replaced(tmp_path: Path) -> None:
    async with fake_async_engine(ANSWERS, faults=Faults(start_s=0.4), max_restarts=2) as engine:
        asking = asyncio.create_task(ask(engine, "plain", stream=True))
        os.kill(pid_of(engine, "scheduler"), signal.SIGKILL)
        await until(lambda: engine.stats()["num_restarts"] == 1)
        await until(lambda: len(engine.get_all_child_pids()) == 2)
        os.kill(pid_of(engine, "detokenizer"), signal.SIGKILL)
        assert await asking == (await undisturbed(has_answers=True))["plain"]
        await until_restarted(engine, 2)


@process
async def test_replacement_that_hangs_at_its_start_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout is shorter than for a first start. Timeouts of requests pass meanwhile."""
    monkeypatch.setattr("aioengine.supervision.supervisor._STARTUP_TIMEOUT_FACTOR", 5.0)
    monkeypatch.setattr("aioengine.supervision.supervisor._MIN_STARTUP_TIMEOUT_S", 0.0)
    async with fake_async_engine(ANSWERS, faults=Faults(start_s=0.4), max_restarts=2) as engine:
        asking = asyncio.create_task(ask(engine, "plain", stream=True))
        os.kill(pid_of(engine, "scheduler"), signal.SIGKILL)
        await until(lambda: engine.stats()["num_restarts"] == 1 and len(engine.get_all_child_pids()) == 2)
        os.kill(pid_of(engine, "scheduler"), signal.SIGSTOP)
        late = await engine.async_generate("late", queue_timeout=0.1)
        assert late["meta_info"]["finish_reason"] == {"type": "deadline", "which": "queue"}
        assert engine.health()["state"] == "recovering"
        async with asyncio.timeout(40):
            assert await asking == (await undisturbed(has_answers=True))["plain"]
        assert engine.stats()["num_restarts"] == 2


@process
@pytest.mark.parametrize("max_restarts", [0, 1])
async def test_exit_right_after_the_start_is_noticed(max_restarts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Handshake.wait
    frontend = Frontend(max_restarts=max_restarts)

    async def wait(own: Handshake, timeout_s: float) -> dict[str, object]:
        facts = await plain(own, timeout_s)
        monkeypatch.undo()
        os.kill(frontend.supervisor.process_states()[0].pid, signal.SIGKILL)
        await asyncio.sleep(0.2)
        return facts

    monkeypatch.setattr(Handshake, "wait", wait)
    async with frontend:
        if max_restarts:
            frontend.submit(1)
            await frontend.finished(1)
            assert frontend.supervisor.num_restarts == 1
        else:
            assert isinstance(await frontend.failure(), EngineDeadError)


# ---------------------------------------------------------------- calls during recovery


@process
async def test_while_processes_are_replaced_new_requests_wait_and_other_calls_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, may_end = Handshake.wait, asyncio.Event()

    async def wait(own: Handshake, timeout_s: float) -> dict[str, object]:
        facts = await plain(own, timeout_s)
        await may_end.wait()
        return facts

    async with fake_async_engine({"": "x" * 200}, step_time_s=0.005) as engine:
        stream = engine.async_generate("one", {"max_new_tokens": 200}, stream=True)
        begun = await anext(stream)
        monkeypatch.setattr(Handshake, "wait", wait)
        os.kill(pid_of(engine, "scheduler"), signal.SIGKILL)
        await until(lambda: engine.health()["state"] == "recovering")
        assert engine.is_alive
        waiting = engine.async_generate("two", {"max_new_tokens": 5})
        aborted = engine.async_generate("three", {"max_new_tokens": 5}, rid="three")
        late = engine.async_generate("four", {"max_new_tokens": 5}, queue_timeout=0.1)
        info = asyncio.create_task(engine.get_server_info())
        await asyncio.sleep(0.05)
        engine.abort_request("three")
        assert (await aborted)["meta_info"]["finish_reason"] == "abort"
        reason = (await late)["meta_info"]["finish_reason"]
        assert (reason["type"], reason["which"]) == ("deadline", "queue")
        assert engine.health()["state"] == "recovering"
        left = engine.async_generate("five", stream=True)
        await left.aclose()
        may_end.set()
        assert (await waiting)["text"] == "xxxxx"
        assert (await info)["status"] == "ready"
        chunks = [begun, *[chunk async for chunk in stream]]
        assert "".join(chunk["text"] for chunk in chunks) == "x" * 200
        timings = chunks[-1]["meta_info"]["timings"]
        assert timings is not None
        assert timings["first_token_s"] is not None
        assert timings["total_s"] - timings["first_token_s"] > 0.1  # the queue_timeout that passed meanwhile
        assert engine.health()["state"] == "running"
        await until_idle(engine)


@process
async def test_abort_during_recovery_releases_held_text() -> None:
    async with fake_async_engine({"": "abcSTOMP"}, faults=Faults(stall_at=6, stall_s=60.0)) as engine:
        stream = engine.async_generate("one", {"stop": ["STOP"]}, stream=True)
        text, ids = "", []
        while len(ids) < 5:
            chunk = await anext(stream)
            text, ids = text + chunk["text"], ids + chunk["output_ids"]
        assert (text, bytes(ids)) == ("abc", b"abcST")
        os.kill(pid_of(engine, "scheduler"), signal.SIGKILL)
        await until(lambda: engine.health()["state"] == "recovering")
        stream.abort()
        last = [chunk async for chunk in stream]
        assert text + "".join(chunk["text"] for chunk in last) == "abcST"
        assert last[-1]["meta_info"]["finish_reason"] == "abort"


@process
async def test_paused_engine_is_paused_after_a_replacement() -> None:
    async with fake_async_engine(ANSWERS, step_time_s=0.005) as engine:
        asking = asyncio.create_task(ask(engine, "plain", stream=True))
        await until(lambda: engine.stats()["output_tokens"])
        assert await engine.pause_generation("in_place")
        later = asyncio.create_task(ask(engine, "plain", stream=True))
        os.kill(pid_of(engine, "scheduler"), signal.SIGKILL)
        await until_restarted(engine, 1)
        await asyncio.sleep(0.3)
        assert not later.done()
        assert await engine.continue_generation()
        assert await asking == await later == (await undisturbed(has_answers=True))["plain"]


@process
async def test_shutdown_during_a_replacement_ends_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioengine.frontend.frontend.STOP_TIMEOUT_S", 50.0)
    for after_s in (0.0, 0.2):
        async with fake_async_engine({"": "x" * 500}, step_time_s=0.01) as engine:
            asking = asyncio.ensure_future(engine.async_generate("one", {"max_new_tokens": 400}))
            os.kill(pid_of(engine, "scheduler"), signal.SIGKILL)
            await until(lambda: engine.health()["state"] == "recovering")
            await asyncio.sleep(after_s)
            begun_at = time.monotonic()
            await engine.shutdown()
            assert time.monotonic() - begun_at < 40  # less than the time after which processes are killed
            with pytest.raises(EngineClosedError):
                await asking
            assert engine.get_all_child_pids() == []


@process
async def test_totals_never_decrease_and_nothing_leaks() -> None:
    own = psutil.Process()

    async def until_counted(num_finished: int) -> None:
        """Wait until the scheduler has reported all ends. Unreported ends are lost when it is killed."""
        await until(lambda: engine.stats()["num_finished"] >= num_finished)
        await until_idle(engine)

    def holdings() -> tuple[int, int, int]:
        return own.num_fds(), own.num_threads(), len(own.children(recursive=True))

    async with fake_async_engine(ANSWERS, processes=True, max_restarts=100) as engine:
        last: dict[str, int] = {}
        before = (0, 0, 0)
        for num_restarts in range(1, 5):
            await ask_all(engine, stream=True)
            await until_counted(11 * num_restarts - 1)
            os.kill(pid_of(engine, ROLES[num_restarts % 2]), signal.SIGKILL)
            await until_restarted(engine, num_restarts)
            await ask(engine, "plain", stream=False)
            await until_counted(11 * num_restarts)
            stats = engine.stats()
            for name in ("num_steps", "prompt_tokens", "output_tokens", "num_finished", "num_restarts"):
                assert stats[name] > last.get(name, 0)
            last = stats
            if num_restarts == 2:  # once for each role
                before = holdings()
        assert last["num_finished"] == 4 * 11
        await until(lambda: all(now <= then for now, then in zip(holdings(), before, strict=True)))


# ---------------------------------------------------------------- requests that kill


@process
@pytest.mark.parametrize("max_restarts", [1, pytest.param(3, marks=pytest.mark.slow)])
async def test_request_that_kills_its_process_ends_alone(max_restarts: int) -> None:
    """The texts of all other running and waiting requests do not change."""
    answers = {**ANSWERS, "": "x" * 50}
    faults = Faults(poison_token_id=ord("~"))
    async with fake_async_engine(
        answers, faults=faults, step_time_s=0.004, max_restarts=max_restarts, max_running=12
    ) as engine:
        asking = asyncio.create_task(ask_all(engine, stream=True))
        others = [engine.async_generate(f"number {number}", {"max_new_tokens": 20}) for number in range(20)]
        await asyncio.sleep(0.05)
        killer = engine.async_generate("~", {"max_new_tokens": 40}, stream=True)
        later = [engine.async_generate(f"number {number}", {"max_new_tokens": 20}) for number in range(20)]
        with pytest.raises(RequestError, match="was killed by signal 9 each time it computed this request") as caught:
            await anext(killer)
        assert caught.value.stage == "crash"
        assert await asking == await undisturbed(has_answers=True)
        assert [(await answer)["text"] for answer in (*others, *later)] == ["x" * 20] * 40
        assert engine.stats()["num_restarts"] >= 3
        assert engine.health()["state"] == "running"
        await until_idle(engine)


@process
async def test_requests_that_kill_processes_do_not_count_as_restarts() -> None:
    faults = Faults(poison_token_id=ord("~"))
    async with fake_async_engine({"": "x" * 50}, faults=faults, max_restarts=1) as engine:
        for _ in range(2):
            killer, other = engine.async_generate("~"), engine.async_generate("fine", {"max_new_tokens": 9})
            with pytest.raises(RequestError):
                await killer
            assert (await other)["text"] == "x" * 9


@process
async def test_engine_dies_if_every_request_kills_its_process() -> None:
    async with fake_async_engine({"": "x" * 50}, faults=Faults(kill_at=1)) as engine:
        calls = [engine.async_generate("fine", {"max_new_tokens": 9}) for _ in range(5)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(result) for result in results[-2:]] == [EngineDeadError] * 2
        assert engine.health()["state"] == "dead"


# ---------------------------------------------------------------- a real model

DEMO_PARAMS: list[Mapping[str, object]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_p": 0.9, "top_k": 40},
    {"temperature": 0, "frequency_penalty": 0.7, "presence_penalty": 0.4},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "seed": 7, "frequency_penalty": 1.0, "min_p": 0.02},
    {"temperature": 0, "min_new_tokens": 34},
    {"temperature": 0, "logit_bias": {"10": 3.0, "11": -100.0}, "bad_words": ["the", "once upon a time"]},
    {"temperature": 1.0, "seed": 9, "allowed_token_ids": list(range(3, 600))},
    {"temperature": 0, "stop": ["the end of all", "once more"], "ignore_eos": True},
    {"temperature": 1.0, "seed": 8, "stop_regex": r"[xz]\w+[xz]"},
]


@process
@pytest.mark.slow
async def test_demo_model_continues_bit_for_bit() -> None:
    """Seeds and penalties do not depend on the batch or on a restart."""
    prompts = ["Tell me a long story.", "讲一个故事"]

    async def read(stream: Stream) -> list[tuple[str, list[int]]]:
        rows = [("", list[int]()) for _ in prompts]
        async for chunk in stream:
            text, ids = rows[chunk["index"]]
            assert (chunk["text_offset"], chunk["token_offset"]) == (len(text), len(ids))
            rows[chunk["index"]] = (text + chunk["text"], ids + chunk["output_ids"])
        return rows

    async with AsyncEngine(max_running_requests=16, max_total_tokens=32768) as engine:

        def streams() -> list[Stream]:
            return [
                engine.async_generate(prompts, {"max_new_tokens": 40, **params}, stream=True) for params in DEMO_PARAMS
            ]

        expected = await asyncio.gather(*map(read, streams()))
        whole = await engine.async_generate(prompts, {"max_new_tokens": 40, **DEMO_PARAMS[3]})
        assert list(zip(whole["text"], whole["output_ids"], strict=True)) == expected[3]
        asking = asyncio.gather(*map(read, streams()))
        whole_again = engine.async_generate(prompts, {"max_new_tokens": 40, **DEMO_PARAMS[3]})
        num_tokens = engine.stats()["output_tokens"]
        for num_restarts, role in enumerate(ROLES, 1):
            num_tokens += 200
            await until(lambda at=num_tokens: engine.stats()["output_tokens"] >= at)  # type: ignore[misc]
            os.kill(pid_of(engine, role), signal.SIGKILL)
            await until_restarted(engine, num_restarts)
        assert await asking == expected
        again = await whole_again
        assert list(zip(again["text"], again["output_ids"], strict=True)) == expected[3]
        await until_idle(engine)


# ---------------------------------------------------------------- errors while a loss is handled


@process
async def test_lost_scheduler_with_a_truncated_crash_board_is_replaced() -> None:
    expected = await undisturbed(has_answers=True)
    async with fake_async_engine(ANSWERS, step_time_s=0.003) as engine:
        asking = asyncio.create_task(ask_all(engine, stream=True))
        await until(lambda: engine.stats()["num_streams"])
        scheduler = frontend_of(engine).parts.processes._incarnation._launcher.children[0]  # type: ignore[attr-defined]
        os.truncate(scheduler._log_path.with_suffix(BOARD_SUFFIX), 20)
        scheduler.kill()  # which the next write to its board would do, too
        assert await asking == expected
        assert engine.stats()["num_restarts"] == 1


@process
@pytest.mark.parametrize("method", ["uids_in_flight", "log_lines"])
async def test_error_while_a_loss_is_handled_ends_the_engine(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: ProcessChild) -> NoReturn:
        raise ZeroDivisionError("unforeseen")

    async with Frontend(fake_settings(), max_restarts=3) as frontend:
        monkeypatch.setattr(ProcessChild, method, fail)
        frontend.supervisor._incarnation._launcher.children[0].kill()
        error = await frontend.failure()
        assert isinstance(error.__cause__, ZeroDivisionError)
        await until(lambda: not any(state.alive for state in frontend.supervisor.process_states()))
