"""Overload: requests are refused immediately, wait in a queue, and are shared fairly among tenants."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import msgspec
import pytest

from aioengine.api.engine import AsyncEngine
from aioengine.errors import EngineClosedError, EngineDrainingError, EngineOverloadedError
from aioengine.settings.config import QueueConfig
from aioengine.testing.fake_engine import FakeSetup, fake_async_engine, fake_engine
from tests.kit.waiting import until

TWENTY = {"max_new_tokens": 20, "temperature": 0}


def busy_engine() -> AsyncEngine:
    """Return an engine that runs one request at a time, each for about 60 ms."""
    return fake_async_engine(max_running=1, step_time_s=0.003, processes=False)


class TestRefusingLate:
    async def test_requests_that_would_miss_their_deadline_are_refused_immediately(self) -> None:
        async with busy_engine() as engine:
            await asyncio.gather(*(engine.async_generate("a", TWENTY) for _ in range(5)))
            in_line = [engine.async_generate("a", TWENTY, priority=1) for _ in range(40)]
            await until(lambda: engine.stats()["num_waiting"] > 30)
            # A second is enough until the scheduler has the request, even on a busy machine.
            for options in ({"queue_timeout": 1.0}, {"first_token_timeout": 1.0}, {"timeout": 1.0}):
                with pytest.raises(EngineOverloadedError, match="would miss its deadline") as caught:
                    await engine.async_generate("b", TWENTY, refuse_late=True, **options)  # type: ignore[call-overload]
                assert 0 < caught.value.retry_after < 10
                with pytest.raises(EngineOverloadedError):
                    await engine.async_generate("b", TWENTY, refuse_late=True, stream=True, **options)
            patient = await engine.async_generate("b", TWENTY, timeout=0.01)
            assert patient["meta_info"]["finish_reason"] == "deadline"
            in_time = await engine.async_generate("b", TWENTY, timeout=60, refuse_late=True)
            assert in_time["meta_info"]["finish_reason"] == "length"
            assert all(out["meta_info"]["finish_reason"] == "length" for out in await asyncio.gather(*in_line))

    async def test_stream_that_is_not_refused_starts(self) -> None:
        async with busy_engine() as engine:
            stream = await engine.async_generate("a", TWENTY, stream=True, timeout=60, refuse_late=True)
            assert len("".join([chunk["text"] async for chunk in stream])) == 20
            await engine.async_generate(input_ids=[1], sampling_params={"max_new_tokens": 0}, refuse_late=True)


def full_engine() -> AsyncEngine:
    """Return an engine on which one request runs, two wait, and more are refused."""
    return fake_async_engine(max_running=1, max_queued=2, step_time_s=0.001, processes=False)


LONG = {"max_new_tokens": 1500, "temperature": 0}


class TestWaitingInLine:
    async def test_admit_does_not_wait_if_there_is_capacity(self) -> None:
        async with full_engine() as engine:
            async with asyncio.timeout(30):
                await engine.admit()
            assert (await engine.async_generate("a", TWENTY))["text"]

    async def test_admit_is_first_come_first_served(self) -> None:
        async with full_engine() as engine:
            order: list[int] = []

            async def ask(number: int) -> None:
                await engine.admit()
                order.append(number)
                assert (await engine.async_generate(f"{number}", TWENTY))["meta_info"]["finish_reason"] == "length"

            async with asyncio.TaskGroup() as group:
                for number in range(20):
                    group.create_task(ask(number))
            assert order == list(range(20))

    async def test_reserved_place_is_not_given_to_other_calls(self) -> None:
        async with full_engine() as engine:
            running = [engine.async_generate("a", LONG) for _ in range(3)]
            waiting = asyncio.create_task(engine.admit())
            await asyncio.sleep(0)
            assert not waiting.done()
            running[0].abort()
            await waiting
            with pytest.raises(EngineOverloadedError):
                engine.async_generate("b", TWENTY)

    async def test_leaving_the_queue_frees_a_place(self) -> None:
        async with full_engine() as engine:
            running = [engine.async_generate("a", LONG) for _ in range(3)]
            line = [asyncio.create_task(engine.admit()) for _ in range(4)]
            await asyncio.sleep(0)
            line[0].cancel()
            running[0].abort()
            await asyncio.wait([line[1]], timeout=5)
            assert [task.done() for task in line] == [True, True, False, False]
            line[2].cancel()
            line[3].cancel()
            await asyncio.wait(line)
            running[1].abort()
            await running[1]
            engine.async_generate("b", TWENTY).abort()

    @pytest.mark.parametrize("how", ["drain", "shutdown"])
    async def test_waiters_get_the_error_of_a_drain_or_shutdown(self, how: str) -> None:
        async with full_engine() as engine:
            running = [engine.async_generate("a", LONG) for _ in range(3)]
            waiting = asyncio.create_task(engine.admit())
            await asyncio.sleep(0)
            await (engine.drain(0.01) if how == "drain" else engine.shutdown())
            with pytest.raises(EngineDrainingError if how == "drain" else EngineClosedError):
                await waiting
            with pytest.raises(EngineDrainingError if how == "drain" else EngineClosedError):
                await engine.admit()
            del running

    def test_threads_wait_in_the_queue(self) -> None:
        with fake_engine(max_running=1, max_queued=1, step_time_s=0.001, processes=False) as llm:

            def ask() -> str:
                llm.admit()
                return llm.generate("a", TWENTY)["text"]

            with ThreadPoolExecutor(8) as pool:
                texts = [pool.submit(ask) for _ in range(16)]
                assert {len(text.result()) for text in texts} == {20}


class TestBounds:
    async def test_queued_bytes_are_limited(self) -> None:
        setup = FakeSetup(max_running=1, step_time_s=0.001, processes=False)
        blueprint = setup.blueprint()
        blueprint = msgspec.structs.replace(blueprint, queue=QueueConfig(max_bytes=1000))
        async with AsyncEngine.from_blueprint(lambda: blueprint) as engine:
            long = [{"role": "user", "content": [{"type": "text", "text": "x" * 400}]}]
            calls = [
                engine.async_generate("é" * 200, TWENTY),
                engine.async_generate(["y" * 900] * 3, TWENTY),  # a batch is not refused or counted
                engine.async_generate(input_ids=[1] * 70, sampling_params=TWENTY),
                engine.async_chat(long, TWENTY),
            ]
            with pytest.raises(EngineOverloadedError, match="max_queued_bytes=1000"):
                engine.async_generate("b", TWENTY)
            await asyncio.gather(*calls)
            await engine.async_generate("b", TWENTY)

    async def test_refusal_does_not_read_the_prompt(self) -> None:
        class Untouched(list[int]):
            def __iter__(self) -> NoReturn:
                raise AssertionError("somebody read the ids")

        async with full_engine() as engine:
            running = [engine.async_generate("a", LONG) for _ in range(3)]
            with pytest.raises(EngineOverloadedError):
                engine.async_generate(input_ids=Untouched([1] * 1000))
            del running


class TestTenants:
    async def test_many_requests_of_one_tenant_do_not_delay_another(self) -> None:
        async with fake_async_engine(max_running=1, step_time_s=0.0005, processes=False) as engine:
            flood = [engine.async_generate(f"{number}", TWENTY, tenant="loud") for number in range(30)]
            await flood[0]
            quiet = await engine.async_generate("q", TWENTY, tenant="quiet")
            assert quiet["meta_info"]["finish_reason"] == "length"
            stats = await engine.get_server_info()
            assert stats["internal_states"][0]["num_waiting"] > 20  # type: ignore[index]
            await asyncio.gather(*flood)

    async def test_weights_are_shares_of_the_capacity(self) -> None:
        order: list[str] = []

        async def ask(engine: AsyncEngine, tenant: str) -> None:
            await engine.async_generate("a", TWENTY, tenant=tenant)
            order.append(tenant)

        async with fake_async_engine(
            max_running=1, step_time_s=0.0005, processes=False, tenant_weights={"gold": 3}
        ) as engine:
            await asyncio.gather(*(ask(engine, tenant) for tenant in ["gold"] * 30 + ["free"] * 30))
        assert 27 <= order[:36].count("gold") <= 30
        assert order[:36].count("free") >= 6
