"""Replicas behind one frontend: they share the requests, and continue the requests of a lost replica."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest

from aioengine.api.engine import AsyncEngine
from aioengine.errors import EngineDeadError, EngineStartupError, RequestError
from aioengine.settings.config import SupervisionConfig
from aioengine.supervision.fleet import Fleet
from aioengine.supervision.launchers.inline import InlineLauncher
from aioengine.supervision.supervisor import Supervisor
from aioengine.testing.byte_tokenizer import BYTE_MODEL
from aioengine.testing.fake_engine import FakeSetup
from aioengine.testing.faults import Faults
from aioengine.tokenization.tokenizer import Tokenizer
from tests.kit.fake_adapters import write_adapter
from tests.kit.waiting import until
from tests.processes.restart_kit import ANSWERS, ROLES, ask_all, frontend_of, undisturbed, until_idle, until_restarted

if TYPE_CHECKING:
    from pathlib import Path

    from aioengine.api.signatures import EngineArguments
    from aioengine.frontend.engine_parts import Blueprint
    from aioengine.supervision.supervisor import Events

process = pytest.mark.process


def fleet_engine(*setups: FakeSetup, launcher: str = "process", max_restarts: int = 0) -> AsyncEngine:
    """Return an engine with one replica per setup."""
    limits = SupervisionConfig(max_restarts=max_restarts, stall_timeout_s=60.0, startup_timeout_s=30.0)

    def make_replica(setup: FakeSetup, events: Events) -> Supervisor:
        return Supervisor(setup.settings(), limits, launcher=launcher, events=events)

    def blueprint() -> Blueprint:
        makers = [partial(make_replica, setup) for setup in setups]
        return msgspec.structs.replace(setups[0].blueprint(), make_processes=lambda events: Fleet(makers, events))

    return AsyncEngine.from_blueprint(blueprint)


def fleet_of(engine: AsyncEngine) -> Fleet:
    return cast("Fleet", frontend_of(engine).parts.processes)


async def pause(engine: AsyncEngine) -> None:
    assert (await engine.pause_generation("in_place")).success


async def test_tokenizer_is_read_after_the_children_of_all_replicas_are_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    delays = iter((0.0, 0.1))
    setup, launch = FakeSetup(dp_size=2, processes=False), InlineLauncher.launch

    async def slow_launch(self: InlineLauncher) -> None:
        await asyncio.sleep(next(delays))
        await launch(self)
        order.append("launch")

    def load_tokenizer() -> Tokenizer:
        order.append("tokenizer")
        return Tokenizer(BYTE_MODEL)

    monkeypatch.setattr(InlineLauncher, "launch", slow_launch)
    blueprint = msgspec.structs.replace(setup.blueprint(), load_tokenizer=load_tokenizer)
    async with AsyncEngine.from_blueprint(lambda: blueprint):
        assert order == ["launch", "launch", "tokenizer"]


@pytest.mark.parametrize("role", [0, 1])
async def test_replica_lost_at_any_time_changes_no_text(role: int) -> None:
    """Children as tasks: in every round one of them ends a little later, until all is over before."""
    expected = await undisturbed(has_answers=True)
    num_turns, num_losses = 0, 0
    while True:
        async with fleet_engine(FakeSetup(answers=ANSWERS), FakeSetup(answers=ANSWERS), launcher="inline") as engine:
            fleet = fleet_of(engine)
            asking = asyncio.create_task(ask_all(engine, stream=num_turns % 2 == 0))
            while not all(replica.ledger.num_open for replica in fleet._replicas):  # noqa: ASYNC110
                await asyncio.sleep(0)
            for _ in range(num_turns):
                await asyncio.sleep(0)
            if asking.done():
                break
            fleet._replicas[num_losses % 2]._incarnation._launcher.children[role].kill()
            num_losses += 1
            assert await asking == expected, f"after {num_turns} turns"
            await until(lambda: len(engine.health()["processes"]) == 2)
            assert engine.health()["state"] == "running"
            await until_idle(engine)
            assert await ask_all(engine, stream=True) == expected
        num_turns += 7
    assert num_losses > 5


@process
@pytest.mark.parametrize("kill_at", [1, 8, 40])
async def test_requests_of_a_killed_replica_are_answered_exactly(kill_at: int) -> None:
    expected = await undisturbed(has_answers=False)
    setup = FakeSetup()
    async with fleet_engine(FakeSetup(faults=Faults(kill_at=kill_at)), setup) as engine:
        assert [process["role"] for process in engine.health()["processes"]] == ROLES * 2
        assert await ask_all(engine, stream=kill_at == 8) == expected
        await until(lambda: len(engine.health()["processes"]) == 2)
        assert await ask_all(engine, stream=True) == expected
        assert engine.stats()["num_pages"] == setup.num_pages
        await until_idle(engine)


@process
async def test_request_that_kills_its_process_leaves_other_replicas() -> None:
    setup = FakeSetup(answers={"": "x" * 50}, faults=Faults(poison_token_id=ord("~")), step_time_s=0.002)
    async with fleet_engine(*[setup] * 4) as engine:
        others = [engine.async_generate(f"number {number}", {"max_new_tokens": 40}) for number in range(12)]
        await until(lambda: engine.stats()["output_tokens"] > 0)
        with pytest.raises(RequestError, match="was killed by signal 9 each time it computed this request"):
            await engine.async_generate("~")
        assert [(await answer)["text"] for answer in others] == ["x" * 40] * 12
        assert len(engine.health()["processes"]) == 4
        await until_idle(engine)


@process
async def test_replica_with_restarts_left_is_restarted() -> None:
    expected = await undisturbed(has_answers=False)
    setup = FakeSetup(step_time_s=0.002)
    async with fleet_engine(setup, setup, max_restarts=1) as engine:
        asking = asyncio.create_task(ask_all(engine, stream=True))
        await until(lambda: engine.stats()["output_tokens"] > 0)
        os.kill(engine.health()["processes"][0]["pid"], signal.SIGKILL)
        assert await asking == expected
        await until_restarted(engine, 1)
        assert [process["role"] for process in engine.health()["processes"]] == ROLES * 2
        await until_idle(engine)
        assert engine.stats()["num_pages"] == 2 * setup.num_pages


@process
async def test_engine_is_dead_after_all_replicas_are_lost() -> None:
    setup = FakeSetup(step_time_s=0.01)
    async with fleet_engine(setup, setup) as engine:
        tasks = [
            asyncio.create_task(
                cast("asyncio.Future[object]", engine.async_generate(str(number), {"max_new_tokens": 1000}))
            )
            for number in range(4)
        ]
        await until(lambda: engine.stats()["num_running"] == 4)
        for state in engine.health()["processes"]:
            if state["role"] == "scheduler":
                os.kill(state["pid"], signal.SIGKILL)
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, EngineDeadError)
        assert engine.health()["state"] == "dead"


@process
async def test_replica_that_cannot_start_fails_the_start() -> None:
    engine = fleet_engine(FakeSetup(), FakeSetup(faults=Faults(start_error="no luck")))
    with pytest.raises(EngineStartupError, match="no luck"):
        await engine.start()
    assert engine.health()["processes"] == []


async def test_controls_go_to_all_replicas_and_statistics_are_sums() -> None:
    setup = FakeSetup()
    async with fleet_engine(setup, setup, launcher="inline") as engine:
        await pause(engine)
        asking = asyncio.create_task(ask_all(engine, stream=False))
        await until(lambda: engine.stats()["num_waiting"] == 10)
        assert [replica.ledger.num_open for replica in fleet_of(engine)._replicas] == [5, 5]
        info = await engine.get_server_info()
        states = cast("list[dict[str, int]]", info["internal_states"])
        assert [state["num_waiting"] for state in states] == [5, 5]
        assert info["max_total_num_tokens"] == 16 * setup.num_pages
        assert (await engine.continue_generation()).success
        await asking
        await until_idle(engine)
        stats = engine.stats()
        assert (stats["num_finished"], stats["num_pages"]) == (10, 2 * setup.num_pages)
        states = cast("list[dict[str, int]]", (await engine.get_server_info())["internal_states"])
        assert sum(state["output_tokens"] for state in states) == stats["output_tokens"]


async def test_aborts_and_control_calls_work_after_a_replica_is_lost() -> None:
    setup = FakeSetup()
    async with fleet_engine(setup, setup, launcher="inline") as engine:
        fleet = fleet_of(engine)
        await pause(engine)
        tasks = [asyncio.create_task(_one(engine, f"r{number}")) for number in range(6)]
        await until(lambda: engine.stats()["num_waiting"] == 6)
        asking = asyncio.create_task(engine.get_server_info())
        await asyncio.sleep(0)
        fleet._replicas[0]._incarnation._launcher.children[0].kill()
        with pytest.raises(RequestError, match="before it answered 'server_info'"):
            await asking
        for number in range(6):
            engine.abort_request(f"r{number}")
        assert [await task for task in tasks] == ["abort"] * 6
        assert (await engine.continue_generation()).success
        await until_idle(engine)
        assert (await engine.async_generate("on", {"max_new_tokens": 3}))["meta_info"]["completion_tokens"] == 3


async def _one(engine: AsyncEngine, rid: str) -> object:
    answer = await engine.async_generate("a", {"max_new_tokens": 9}, rid=rid)
    reason = answer["meta_info"]["finish_reason"]
    assert reason is not None
    return reason["type"]


@process
async def test_engine_started_with_two_replicas_answers_like_one() -> None:
    prompts = [f"Here are {number} animals:" for number in range(12)]
    params = [{"max_new_tokens": 16, "seed": number} for number in range(12)]
    arguments: EngineArguments = {"device": "cpu", "max_running_requests": 3, "max_total_tokens": 4096}
    async with AsyncEngine(**arguments, dp_size=2, load_balance_method="round_robin") as engine:
        alone = await engine.async_generate(prompts, params, routed_dp_rank=0)
        expected = [answer["text"] for answer in alone]
        assert await engine.flush_cache()
        assert [process["role"] for process in engine.health()["processes"]] == ROLES * 2
        assert frontend_of(engine).parts.settings.scheduler.max_running == 6
        answers = await engine.async_generate(prompts, params)
        assert [answer["text"] for answer in answers] == expected
        assert [answer["meta_info"]["dp_rank"] for answer in answers] == [0, 1] * 6
        states = cast("list[dict[str, int]]", (await engine.get_server_info())["internal_states"])
        assert all(state["num_finished"] for state in states)


async def test_call_may_choose_its_replica() -> None:
    setup = FakeSetup()
    old_name: dict[str, Any] = {"data_parallel_rank": 1}
    async with fleet_engine(setup, setup, launcher="inline") as engine:
        for replica in (1, 0, 1):
            answers = await engine.async_generate(["a", "b"], {"max_new_tokens": 2}, routed_dp_rank=replica)
            assert [answer["meta_info"]["dp_rank"] for answer in answers] == [replica, replica]
            vector = await engine.async_encode("a", routed_dp_rank=replica)
            assert vector["meta_info"]["dp_rank"] == replica
        with pytest.raises(ValueError, match="routed_dp_rank must be less than dp_size=2, got 2"):
            await engine.async_generate("a", routed_dp_rank=2)
        with pytest.raises(ValueError, match="routed_dp_rank"):
            await engine.async_generate("a", routed_dp_rank=-1)
        with pytest.raises(ValueError, match="data_parallel_rank=1: .*use routed_dp_rank"):
            await engine.async_generate("a", **old_name)
    async with fleet_engine(setup, launcher="inline") as engine:
        answer = await engine.async_generate("a", {"max_new_tokens": 2}, routed_dp_rank=0)
        assert answer["meta_info"]["completion_tokens"] == 2


@process
async def test_streams_of_the_other_replica_continue_when_one_scheduler_is_killed() -> None:
    expected = await undisturbed(has_answers=False)
    setup = FakeSetup(step_time_s=0.002)
    async with fleet_engine(setup, setup, max_restarts=3) as engine:
        asking = asyncio.create_task(ask_all(engine, stream=True))
        await until(lambda: engine.stats()["output_tokens"] > 0)
        first, other = fleet_of(engine)._replicas
        pids = [state.pid for state in other.process_states()]
        os.kill(first.process_states()[0].pid, signal.SIGKILL)
        assert await asking == expected
        await until_restarted(engine, 1)
        assert (first.num_restarts, other.num_restarts) == (1, 0)
        assert [state.pid for state in other.process_states()] == pids
        await until_idle(engine)


async def test_limits_are_sums_over_the_replicas() -> None:
    setup = FakeSetup(max_running=2, num_pages=8)
    async with fleet_engine(setup, setup, launcher="inline") as engine:
        limits = frontend_of(engine).limits
        assert (limits._max_running, limits._max_total_tokens) == (4, 2 * 8 * 16)
        assert (await engine.get_server_info())["max_total_num_tokens"] == 8 * 16


async def test_sessions_and_adapters_work_with_two_replicas(tmp_path: Path) -> None:
    setup, adapters = FakeSetup(), FakeSetup(max_loras_per_batch=2)
    params = {"max_new_tokens": 8, "temperature": 0}
    texts: list[list[str]] = []
    folder = write_adapter(tmp_path / "a")
    for num_replicas in (1, 2):
        async with fleet_engine(*[adapters] * num_replicas, launcher="inline") as engine:
            assert (await engine.load_lora_adapter("a", folder)).success
            rows = await engine.async_generate(["x"] * 4, params, lora_path=["a", None, None, "a"])
            texts.append([row["text"] for row in rows])
            assert (await engine.unload_lora_adapter("a")).success
        async with fleet_engine(*[setup] * num_replicas, launcher="inline") as engine:
            sid = await engine.open_session()
            turns = [await engine.async_generate("hello", params, session_params={"id": sid}) for _ in range(4)]
            texts[-1] += [turn["text"] for turn in turns]
            await engine.close_session(sid)
            await until(lambda: engine.stats()["num_pinned_pages"] == 0)
            assert await engine.drain()
    assert texts[0] == texts[1]


async def test_profile_of_two_replicas_is_refused() -> None:
    async with fleet_engine(FakeSetup(), FakeSetup(), launcher="inline") as engine:
        with pytest.raises(RuntimeError, match="start_profile needs an engine with one replica; this engine has 2"):
            await engine.start_profile()
