"""Start, shutdown, wrong loops, forks, statistics, and tokenization that does not block the loop."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from decimal import Decimal

import msgspec
import pytest

from aioengine.api.args import engine_config
from aioengine.api.engine import AsyncEngine
from aioengine.api.stream import Stream
from aioengine.errors import (
    EngineClosedError,
    EngineDeadError,
    EngineDrainingError,
    EngineStartupError,
    RequestTooLargeError,
    WrongLoopError,
)
from aioengine.frontend.calls.slow_readers import SlowReaders
from aioengine.frontend.engine_parts import Blueprint
from aioengine.settings.config import DeliveryConfig
from aioengine.testing.fake_engine import fake_async_engine
from tests.engine.engine_double import CONTEXT_LENGTH, CodePoints, Double, World, expected_text
from tests.kit.waiting import until

GREEDY = {"temperature": 0, "max_new_tokens": 6}


class TestStart:
    def test_failed_constructor_prints_no_warning(self) -> None:
        with pytest.raises(TypeError, match="model_pth"):
            AsyncEngine(model_pth="x")
        gc.collect()

    async def test_calls_before_the_start_are_refused(self) -> None:
        engine = World().engine
        with pytest.raises(EngineClosedError, match="was not started"):
            engine.async_generate("a")
        with pytest.raises(EngineClosedError, match="was not started"):
            await engine.flush_cache()
        assert not engine.is_alive
        await engine.shutdown()

    async def test_several_starts_make_one_engine(self) -> None:
        here = World()
        await asyncio.gather(here.engine.start(), here.engine.start())
        await here.engine.start()
        assert len(here.doubles) == 1
        assert here.engine.health()["state"] == "running"
        await here.engine.shutdown()

    async def test_an_engine_that_is_not_started_yet_is_not_closed(self) -> None:
        here = World()
        assert here.engine.health() == {"state": "starting", "processes": []}
        assert not here.engine.is_alive
        assert repr(here.engine) == "<AsyncEngine starting>"
        async with here.engine:
            assert here.engine.health()["state"] == "running"
        assert here.engine.health()["state"] == "closed"
        unused = World().engine
        await unused.shutdown()
        assert unused.health() == {"state": "closed", "processes": []}

    async def test_the_repr_names_the_model_and_the_state(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def download(name: str, **_: object) -> str:
            raise ValueError(f"there is no model {name!r}")

        monkeypatch.setattr("aioengine.model_files.model_folder.download", download)
        assert repr(AsyncEngine()) == "<AsyncEngine demo model starting>"
        assert repr(AsyncEngine("Qwen/Qwen3-0.6B")) == "<AsyncEngine 'Qwen/Qwen3-0.6B' starting>"
        engine = AsyncEngine.from_config(engine_config("owner/missing", {}))
        with pytest.raises(ValueError, match="no model 'owner/missing'"):
            await engine.start()
        assert repr(engine) == "<AsyncEngine 'owner/missing' closed>"

    async def test_unreadable_files_are_refused(self) -> None:
        def prepare() -> Blueprint:
            raise ValueError("no such model")

        engine = AsyncEngine.from_blueprint(prepare)
        with pytest.raises(ValueError, match="no such model"):
            await engine.start()
        assert engine.health() == {"state": "closed", "processes": []}

    @pytest.mark.parametrize("fails", ["processes", "tokenizer", "cancel"])
    async def test_failed_start_leaves_nothing(self, fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
        here = World()

        async def start(self: Double) -> dict[str, object]:
            if fails == "processes":
                raise EngineStartupError("the scheduler said no")
            self.events.on_launch()
            if fails == "cancel":
                await asyncio.sleep(60)
            return {"max_total_tokens": 1}

        def load() -> CodePoints:
            if fails == "tokenizer":
                raise ValueError("tokenizer.json is broken")
            return here.tokenizer

        monkeypatch.setattr(Double, "start", start)
        monkeypatch.setattr(here, "load_tokenizer", load)
        num_tasks = len(asyncio.all_tasks())
        task = asyncio.create_task(here.engine.start())
        if fails == "cancel":
            await until(lambda: bool(here.doubles))
            task.cancel()
        with pytest.raises((EngineStartupError, ValueError, asyncio.CancelledError)):
            await task
        assert here.double.is_stopped
        assert len(asyncio.all_tasks()) == num_tasks
        assert not here.engine.is_alive

    async def test_progress_is_drawn_on_request(self, capsys: pytest.CaptureFixture[str]) -> None:
        from aioengine.frontend.progress import ProgressBars
        from aioengine.protocol.messages import Progress

        for progress, is_expected in ((True, True), (False, False), (None, False)):
            bars = ProgressBars(progress)
            for done in range(4):
                bars.show(Progress("loading weights", done, 3, "shards"))
            bars.close()
            out, err = capsys.readouterr()
            assert out == ""
            assert ("loading weights" in err) is is_expected


class TestStartingAgain:
    async def test_after_a_shutdown(self) -> None:
        here = World()
        for number in range(3):
            assert here.engine.health()["state"] == ("closed" if number else "starting")
            async with here.engine as engine:
                assert engine.health()["state"] == "running"
                assert (await engine.async_generate("a", GREEDY))["text"] == expected_text("a", 6)
            with pytest.raises(EngineClosedError, match="start an AsyncEngine again"):
                engine.async_generate("a")
        assert [double.is_stopped for double in here.doubles] == [True] * 3

    async def test_after_a_shutdown_without_a_start(self) -> None:
        engine = World().engine
        await engine.shutdown()
        with pytest.raises(EngineClosedError, match="shut down"):
            engine.async_generate("a")
        async with engine:
            assert engine.is_alive

    def test_on_another_loop(self) -> None:
        here = World()

        async def one_test() -> str:
            async with here.engine as engine:
                await asyncio.gather(*(engine.start() for _ in range(3)))  # its lock is bound to this loop
                return (await engine.async_generate("a", GREEDY))["text"]

        assert [asyncio.run(one_test()) for _ in range(2)] == [expected_text("a", 6)] * 2
        assert len(here.doubles) == 2

    def test_on_another_loop_after_a_start_that_failed(self) -> None:
        here = World()
        errors = [ValueError("no such model")]

        def prepare() -> Blueprint:
            if errors:
                raise errors.pop()
            return here.blueprint()

        engine = AsyncEngine.from_blueprint(prepare)
        with pytest.raises(ValueError, match="no such model"):
            asyncio.run(engine.start())
        assert engine.health()["state"] == "closed"
        asyncio.run(_start_and_stop(engine))

    def test_after_its_loop_was_closed_without_a_shutdown(self) -> None:
        here = World()

        async def start() -> None:
            await here.engine.start()
            await here.engine.async_generate("a", GREEDY)

        asyncio.run(start())
        threads = set(threading.enumerate())
        asyncio.run(_start_and_stop(here.engine))
        for thread in threads - {threading.main_thread()}:
            if "encode" in thread.name:
                thread.join(10)
                assert not thread.is_alive()
        assert [double.num_kills for double in here.doubles] == [1, 0]
        assert here.engine.health()["state"] == "closed"
        assert here.doubles[1].is_stopped

    async def test_while_it_shuts_down(self) -> None:
        """New processes start after the old ones have ended, because both may need the memory of the device."""
        here = World()
        await here.engine.start()
        stopping = asyncio.create_task(here.engine.shutdown())
        await asyncio.sleep(0)
        await here.engine.start()
        assert here.doubles[0].is_stopped
        assert stopping.done()
        assert here.engine.is_alive
        await here.engine.shutdown()

    async def test_start_raises_the_error_of_a_dead_engine(self) -> None:
        here = World()
        await here.engine.start()
        here.double.events.on_failure(EngineDeadError("scheduler", pid=11, exit_code=1))
        with pytest.raises(EngineDeadError):
            await here.engine.start()
        await here.engine.shutdown()
        assert here.engine.health()["state"] == "dead"  # programs use it as their exit status
        async with here.engine as engine:
            assert engine.health()["state"] == "running"
            assert (await engine.async_generate("a", GREEDY))["text"] == expected_text("a", 6)
        assert here.engine.health()["state"] == "closed"

    async def test_streams_of_the_earlier_run_stay_closed(self) -> None:
        here = World()
        await here.engine.start()
        here.double.is_held = True
        stream = here.engine.async_generate("a", GREEDY, stream=True, rid="x")
        await until(lambda: bool(here.double.live))
        await here.engine.shutdown()
        async with here.engine as engine:
            with pytest.raises(EngineClosedError):
                await anext(stream)
            assert (await engine.async_generate("a", GREEDY, rid="x"))["text"] == expected_text("a", 6)
            assert engine.stats()["num_streams"] == 0

    async def test_from_another_loop_while_it_runs(self) -> None:
        here = World()
        async with here.engine as engine:
            assert isinstance(call_in_thread(lambda: asyncio.run(engine.start())), WrongLoopError)
            assert engine.is_alive
        assert len(here.doubles) == 1

    def test_from_two_threads_at_once(self) -> None:
        here = World()
        gate = threading.Barrier(4)

        def run() -> str:
            gate.wait()
            try:
                asyncio.run(_start_and_stop(here.engine))
            except WrongLoopError:
                return "wrong loop"
            return "started"

        with ThreadPoolExecutor(4) as pool:
            results = [future.result(10) for future in [pool.submit(run) for _ in range(4)]]
        assert results.count("started") == len(here.doubles) >= 1
        assert all(double.is_stopped for double in here.doubles)

    async def test_objects_of_earlier_runs_are_freed(self) -> None:
        here = World()
        for _ in range(3):
            await here.engine.start()
            here.double.events.on_failure(EngineDeadError("scheduler", pid=11, exit_code=1))
            await here.engine.shutdown()
        gone = weakref.ref(here.engine)
        del here

        def is_gone() -> bool:
            gc.collect()
            return gone() is None

        await until(is_gone)  # an ending thread may have the engine a moment longer


async def _start_and_stop(engine: AsyncEngine) -> None:
    async with engine:
        assert (await engine.async_generate("a", GREEDY))["text"] == expected_text("a", 6)


class TestShutdown:
    async def test_is_idempotent_and_later_calls_raise(self, world: World) -> None:
        await asyncio.gather(world.engine.shutdown(), world.engine.shutdown())
        await world.engine.shutdown()
        assert world.double.is_stopped
        with pytest.raises(EngineClosedError, match="shut down"):
            world.engine.async_generate("a")
        assert world.engine.health()["state"] == "closed"
        assert world.engine.get_all_child_pids() == []

    async def test_waiting_calls_get_an_error(self, world: World) -> None:
        world.double.is_held = True
        failed = asyncio.create_task(world.engine.wait_failed())
        waiting = asyncio.ensure_future(world.engine.async_generate("a"))
        await until(lambda: bool(world.double.live))
        await world.engine.shutdown()
        with pytest.raises(EngineClosedError):
            await waiting
        assert await failed is None

    async def test_while_it_tokenizes(self, world: World) -> None:
        world.tokenizer.delay_s = 0.05
        waiting = asyncio.ensure_future(world.engine.async_generate("a"))
        await asyncio.sleep(0.01)
        await world.engine.shutdown()
        with pytest.raises(EngineClosedError):
            await waiting

    @pytest.mark.parametrize("num_turns", [*range(6), 20])
    async def test_while_it_starts(self, num_turns: int) -> None:
        here = World()
        starters = [asyncio.create_task(here.engine.start()) for _ in range(2)]
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await here.engine.shutdown()
        assert here.engine.health()["state"] == "closed" or not num_turns
        for starting in starters:
            with suppress(EngineClosedError):
                await starting
        await here.engine.shutdown()
        assert here.engine.health()["state"] == "closed"
        assert all(double.is_stopped for double in here.doubles)

    async def test_while_it_loads_the_model_ends_the_start_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def load_for_long(self: Double) -> dict[str, object]:
            await asyncio.sleep(60)
            return {}

        monkeypatch.setattr(Double, "start", load_for_long)
        here = World()
        starting = asyncio.create_task(here.engine.start())
        await until(lambda: bool(here.doubles))
        await asyncio.wait_for(here.engine.shutdown(), 30)
        assert here.double.is_stopped
        with pytest.raises(EngineClosedError):
            await starting

    async def test_a_forgotten_engine_warns_and_is_killed(self) -> None:
        here = World()
        await here.engine.start()
        with pytest.warns(ResourceWarning, match="not shut down"):
            del here.engine
        assert here.double.num_kills == 1

    async def test_a_stream_keeps_its_engine(self) -> None:
        here = World()
        await here.engine.start()
        stream = here.engine.async_generate("a", GREEDY, stream=True)
        del here.engine
        assert "".join([chunk["text"] async for chunk in stream]) == expected_text("a", 6)
        with pytest.warns(ResourceWarning, match="not shut down"):
            del stream

    async def test_no_task_or_thread_is_left(self) -> None:
        before = set(asyncio.all_tasks()), set(threading.enumerate())
        async with World().engine as engine:
            await engine.async_generate("a", GREEDY)
        await until(lambda: set(threading.enumerate()) <= before[1])
        assert asyncio.all_tasks() == before[0]


def call_in_thread(function: Callable[[], object]) -> object:
    """Call ``function`` in another thread. Return its result or its exception."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(function())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


async def _text_of(stream: Stream, num_chunks: int) -> str:
    return "".join([(await anext(stream))["text"] for _ in range(num_chunks)])


async def _stream_after_two_chunks(world: World) -> Stream:
    """Return a stream of three tokens after two were read. The engine is held."""
    stream = world.engine.async_generate("a", {**GREEDY, "max_new_tokens": 3}, stream=True)
    reading = asyncio.create_task(_text_of(stream, num_chunks=2))
    await until(lambda: bool(world.double.live))
    for _ in range(2):
        world.double.step()
        await asyncio.sleep(0)
    assert await reading == expected_text("a", 2)
    return stream


class TestOneLoop:
    def test_stream_refuses_another_loop_on_the_same_thread(self) -> None:
        world = World()
        with asyncio.Runner() as home:
            home.run(world.engine.start())
            world.double.is_held = True

            stream = home.run(_stream_after_two_chunks(world))
            with pytest.raises(WrongLoopError):
                asyncio.run(_text_of(stream, num_chunks=1))

            async def go_on() -> str:
                world.double.resume()
                return await _text_of(stream, num_chunks=1)

            assert home.run(go_on()) == expected_text("a", 3)[2:]
            home.run(world.engine.shutdown())

    def test_stream_refuses_a_new_loop_after_its_own_moved_to_another_thread(self) -> None:
        world = World()
        home = asyncio.new_event_loop()
        home.run_until_complete(world.engine.start())
        world.double.is_held = True

        stream = home.run_until_complete(_stream_after_two_chunks(world))
        elsewhere = threading.Thread(target=home.run_forever)
        elsewhere.start()
        with pytest.raises(WrongLoopError):
            asyncio.run(asyncio.wait_for(_text_of(stream, num_chunks=1), 30))
        home.call_soon_threadsafe(home.stop)
        elsewhere.join()
        home.run_until_complete(world.engine.shutdown())
        home.close()

    async def test_calls_from_other_loops_and_threads_are_refused(self) -> None:
        here = World()
        async with here.engine as engine:
            generation = engine.async_generate("a", GREEDY)
            calls: list[Callable[[], object]] = [
                lambda: engine.async_generate("a"),
                lambda: asyncio.run(_call(engine)),
                lambda: asyncio.run(engine.flush_cache()),
                lambda: asyncio.run(engine.shutdown()),
                lambda: asyncio.run(_result(generation)),
            ]
            for call in calls:
                assert isinstance(call_in_thread(call), WrongLoopError)
            await generation
            stats = call_in_thread(engine.stats)
            assert isinstance(stats, dict)
            assert call_in_thread(lambda: engine.abort_request("x")) is None

    def test_engine_can_be_shut_down_after_its_loop_was_closed(self) -> None:
        here = World()
        asyncio.run(here.engine.start())
        with pytest.raises(WrongLoopError):
            asyncio.run(_call(here.engine))
        here.engine.abort_request(abort_all=True)
        asyncio.run(here.engine.shutdown())
        assert here.double.num_kills == 1
        assert here.engine.health()["state"] == "closed"

    async def test_abort_from_another_thread(self, world: World) -> None:
        world.double.step_s = 0.001
        generation = world.engine.async_generate("a", {"max_new_tokens": 400}, rid="x")
        await until(lambda: bool(world.double.live))
        thread = threading.Thread(target=world.engine.abort_request, args=("x",))
        thread.start()
        assert (await generation)["meta_info"]["finish_reason"] == "abort"
        await until(lambda: not thread.is_alive())


async def _call(engine: AsyncEngine) -> object:
    return await engine.async_generate("a")


async def _result(generation: object) -> object:
    return await generation  # type: ignore[misc]


class TestProcesses:
    def test_calls_in_a_fork_are_refused(self) -> None:
        here = World()

        async def main() -> int:
            async with here.engine as engine:
                pid = os.fork()
                if pid == 0:
                    try:
                        engine.async_generate("a")
                    except EngineClosedError as error:
                        os._exit(0 if "fork" in str(error) else 1)
                    os._exit(2)
                return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])  # noqa: ASYNC222

        assert asyncio.run(main()) == 0

    def test_forks_can_start_an_engine_that_was_not_started(self) -> None:
        """Servers import a program once and fork its workers."""
        here = World()
        assert [exit_code_in_fork(lambda: asyncio.run(_start_and_stop(here.engine))) for _ in range(2)] == [0, 0]
        asyncio.run(_start_and_stop(here.engine))
        assert exit_code_in_fork(lambda: asyncio.run(_start_and_stop(here.engine))) == 0

    def test_fork_cannot_start_a_running_engine(self) -> None:
        here = World()

        def start_and_stop() -> None:
            with pytest.raises(EngineClosedError, match="fork"):
                asyncio.run(here.engine.start())
            asyncio.run(here.engine.shutdown())
            with pytest.raises(EngineClosedError, match="fork"):
                here.engine.stats()

        async def main() -> None:
            async with here.engine as engine:
                assert exit_code_in_fork(lambda: call_in_thread(start_and_stop)) == 0
                assert engine.is_alive

        asyncio.run(main())
        assert here.double.num_kills == 0


def exit_code_in_fork(function: Callable[[], object]) -> int:
    """Call ``function`` in a fork. Return the exit code of the fork: 0 if it neither raised nor returned an error."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 1 if isinstance(function(), Exception) else 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class TestWatching:
    async def test_stats_have_all_names(self, world: World) -> None:
        await world.engine.async_generate("a", GREEDY)
        assert set(world.engine.stats()) == {
            "num_running", "num_waiting", "num_streams", "num_detokenizing", "num_pages", "num_free_pages",
            "num_cached_pages", "num_pinned_pages", "num_sessions", "num_adapters", "num_preemptions", "num_restarts",
            "num_steps", "prompt_tokens", "cached_tokens", "output_tokens", "num_finished", "num_aborted",
            "num_proposed_drafts", "num_accepted_drafts",
        }  # fmt: skip

    async def test_streams_count_rows(self, world: World) -> None:
        world.double.is_held = True
        generation = world.engine.async_generate(["a", "b"], {**GREEDY, "n": 3})
        assert world.engine.stats()["num_streams"] == 6
        await generation.aclose()
        assert world.engine.stats()["num_streams"] == 0

    async def test_server_info_names_the_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        facts: dict[str, object] = {
            "max_total_tokens": 16,
            "device_name": "NVIDIA H200",
            "attention_backend": "flashinfer",
            "cuda_graph_sizes": "1 2 4",
            "graphs_bytes": 7,
            "torch_version": "2.11",
            "start_imports_s": 1.5,
            "start_weights_s": 2.5,
        }

        async def start(self: Double) -> dict[str, object]:
            return facts

        monkeypatch.setattr(Double, "start", start)
        async with World().engine as engine:
            server_info = await engine.get_server_info()
        assert (server_info["device_name"], server_info["attention_backend"]) == ("NVIDIA H200", "flashinfer")
        assert server_info["cuda_graph_sizes"] == [1, 2, 4]
        assert (server_info["memory"], server_info["versions"]) == ({"graphs_bytes": 7}, {"torch": "2.11"})
        assert server_info["start"] == {"imports_s": 1.5, "weights_s": 2.5}

    async def test_slow_kernels_cause_a_warning(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def start(self: Double) -> dict[str, object]:
            return {"max_total_tokens": 16, "warning": "attention is slow: no nvcc"}

        monkeypatch.setattr(Double, "start", start)
        engine = World().engine
        with pytest.warns(UserWarning, match="attention is slow: no nvcc"):
            await engine.start()
        await engine.shutdown()

    async def test_server_and_model_info(self, world: World) -> None:
        server_info = await world.engine.get_server_info()
        assert (server_info["status"], server_info["max_total_num_tokens"]) == ("ready", 1024)
        model = await world.engine.get_model_info()
        assert (model["is_generation"], model["context_length"]) == (True, CONTEXT_LENGTH)

    async def test_health_and_pids(self, world: World) -> None:
        health = world.engine.health()
        assert health["state"] == "running"
        assert [process["role"] for process in health["processes"]] == ["scheduler", "detokenizer"]
        assert world.engine.get_all_child_pids() == [11, 12]
        assert world.engine.is_alive

    async def test_flush_cache_is_refused_while_something_runs(self, world: World) -> None:
        assert await world.engine.flush_cache()
        world.double.is_held = True
        generation = world.engine.async_generate("a", GREEDY)
        await until(lambda: bool(world.double.live))
        assert not await world.engine.flush_cache()
        await generation.aclose()

    async def test_freeze_gc_reaches_the_scheduler_process(self, world: World) -> None:
        await world.engine.freeze_gc()
        gc.unfreeze()
        assert [control.name for control in world.double.controls] == ["freeze_gc"]

    async def test_tokenizer_manager_has_the_tokenizer(self, world: World) -> None:
        assert world.engine.tokenizer is world.tokenizer
        assert world.engine.tokenizer_manager.tokenizer.encode("a") == [97]

    async def test_tokenizer_manager_has_no_tokenizer_without_one(self) -> None:
        here = World(with_tokenizer=False)
        async with here.engine as engine:
            assert (await engine.async_generate(input_ids=[97], sampling_params=GREEDY))["output_ids"]
            for wrong in ({"prompt": "a"}, {"input_ids": [1], "sampling_params": {"stop": "x"}}):
                with pytest.raises(ValueError, match="no tokenizer|has none"):
                    engine.async_generate(**wrong)  # type: ignore[call-overload]
            with pytest.raises(ValueError, match="no tokenizer"):
                engine.tokenizer.encode("a")

    async def test_timings_add_up_to_the_total(self, world: World) -> None:
        world.tokenizer.delay_s = 0.02
        timings = (await world.engine.async_generate("a", GREEDY))["meta_info"]["timings"]
        stages = ("tokenize_s", "queue_s", "prefill_s", "decode_s", "deliver_s")
        assert all(timings[stage] >= 0 for stage in stages)
        assert sum(timings[stage] for stage in stages) == pytest.approx(timings["total_s"])
        assert timings["tokenize_s"] >= 0.02


class TestTokenizing:
    async def test_simultaneous_prompts_are_tokenized_together(self, world: World) -> None:
        await asyncio.gather(*(world.engine.async_generate(prompt, GREEDY) for prompt in "abcdef"))
        assert world.tokenizer.batches == [list("abcdef")]

    async def test_prompts_that_arrive_during_tokenization_are_next(self, world: World) -> None:
        world.tokenizer.held_text = "a"
        first = asyncio.ensure_future(world.engine.async_generate("a", GREEDY))
        await until(lambda: world.tokenizer.batches)
        others = [world.engine.async_generate(prompt, GREEDY) for prompt in "bcd"]
        world.tokenizer.is_released.set()
        await asyncio.gather(first, *others)
        assert world.tokenizer.batches == [["a"], ["b", "c", "d"]]

    async def test_long_prompt_does_not_delay_short_ones(self) -> None:
        here = World()
        here.tokenizer.decoder = "WordPiece"
        here.tokenizer.held_text = "x" * 200_000
        async with here.engine as engine:
            long = asyncio.ensure_future(engine.async_generate("x" * 200_000, GREEDY))
            await until(lambda: here.tokenizer.batches)
            await engine.async_generate("a", GREEDY)
            assert not long.done()
            here.tokenizer.is_released.set()
            with pytest.raises(RequestTooLargeError, match="200000 tokens"):
                await long

    async def test_ten_megabytes_are_refused_without_tokenizing_them(self, world: World) -> None:
        for prompt in ("x" * 10_000_000, "é" * 5_000_000):
            with pytest.raises(RequestTooLargeError, match="at least [0-9]+ tokens"):
                await world.engine.async_generate(prompt)
        outs = await world.engine.async_generate(["a", "x" * 10_000_000, "b"], GREEDY, return_exceptions=True)
        assert isinstance(outs[1], RequestTooLargeError)
        assert (outs[0]["text"], outs[2]["text"]) == (expected_text("a", 6), expected_text("b", 6))
        assert max(len(text) for batch in world.tokenizer.batches for text in batch) < 10_000_000


async def test_engine_that_dies_when_it_is_ready_leaves_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying(Double):
        async def start(self) -> dict[str, object]:
            self.events.on_failure(EngineDeadError("scheduler", pid=11, exit_code=1))
            return await super().start()

    looks: list[SlowReaders] = []
    monkeypatch.setattr(SlowReaders, "_check", lambda slow_readers: looks.append(slow_readers))
    delivery = DeliveryConfig(slow_reader="pause", slow_reader_timeout_s=0.02)
    blueprint = msgspec.structs.replace(World().blueprint(), make_processes=Dying, delivery=delivery)
    engine = AsyncEngine.from_blueprint(lambda: blueprint)
    with pytest.raises(EngineDeadError):
        await engine.start()
    await asyncio.sleep(0.02)
    assert looks == []


async def test_drain_continues_a_paused_engine() -> None:
    async with fake_async_engine({"": "abcdefgh"}) as engine:
        assert await engine.pause_generation("in_place")
        asked = engine.async_generate("a", {"max_new_tokens": 8})
        async with asyncio.timeout(30):
            assert await engine.drain()
        assert (await asked)["text"] == "abcdefgh"


@pytest.mark.parametrize(("timeout", "error"), [("5", TypeError), (math.nan, ValueError)])
async def test_drain_refuses_a_wrong_timeout(world: World, timeout: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="timeout must be a number"):
        await world.engine.drain(timeout)  # type: ignore[arg-type]
    assert world.engine.health()["state"] == "running"
    assert await world.engine.drain(-1)  # the remaining time of a deadline may be negative
    assert await world.engine.drain(Decimal(1))  # type: ignore[arg-type]


async def test_drain_ends_requests_of_a_silent_scheduler(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end with their text so far, although the processes hang or are being replaced."""
    monkeypatch.setattr("aioengine.frontend.frontend.STOP_TIMEOUT_S", 0.05)
    whole = asyncio.ensure_future(world.engine.async_generate("abc", {"temperature": 0, "max_new_tokens": 400}))
    stream = world.engine.async_generate("abc", {"temperature": 0, "max_new_tokens": 400}, stream=True)
    first = await anext(stream)
    world.double.is_held = world.double.ignores_aborts_and_controls = True
    assert not await world.engine.drain(0.01)
    answer = await whole
    assert answer["meta_info"]["finish_reason"] == "shutdown"
    assert answer["text"]
    rest = [chunk async for chunk in stream]
    assert rest[-1]["meta_info"]["finish_reason"] == "shutdown"
    assert expected_text("abc", 400).startswith(first["text"] + "".join(chunk["text"] for chunk in rest))
    assert world.engine.stats()["num_streams"] == 0
    assert world.engine.health()["state"] == "draining"
    with pytest.raises(EngineDrainingError):
        world.engine.async_generate("abc")
