"""The synchronous engine: scripts, threads, loops, notebooks, Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import uvloop

from aioengine.api.sync import Engine
from aioengine.errors import EngineClosedError, EngineStartupError, RequestTooLargeError
from aioengine.frontend.engine_parts import Blueprint
from aioengine.frontend.portal import Portal
from aioengine.utils import async_stream_and_merge, stream_and_merge
from tests.engine.engine_double import CONTEXT_LENGTH, Double, World, expected_text
from tests.kit.waiting import wait_until

GREEDY = {"temperature": 0, "max_new_tokens": 6}
LONG = {"temperature": 0, "max_new_tokens": 400}


class SyncWorld:
    """A synchronous engine and the double of its processes."""

    def __init__(self) -> None:
        self.world = World()
        self.engine = Engine.from_blueprint(self.world.blueprint)
        self.double.step_s = 0.001

    @property
    def double(self) -> Double:
        return self.world.double

    def wait(self, condition: str) -> None:
        """Wait until an expression about ``double`` holds."""
        assert wait_until(lambda: eval(condition, {"double": self.double})), condition


def until_no_thread_is_left() -> None:
    """Encoder threads end a moment after the shutdown."""

    def left() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("aioengine")]

    assert wait_until(lambda: not left()), left()


@pytest.fixture
def sync_world() -> Iterator[SyncWorld]:
    here = SyncWorld()
    yield here
    here.engine.shutdown()


class TestModes:
    def test_generate_returns_answers_and_streams_chunks(self, sync_world: SyncWorld) -> None:
        engine = sync_world.engine
        assert engine.generate("hello", GREEDY)["text"] == expected_text("hello", 6)
        chunks = list(engine.generate("hello", GREEDY, stream=True))
        assert "".join(chunk["text"] for chunk in chunks) == expected_text("hello", 6)
        assert chunks[-1]["meta_info"]["finish_reason"] == "length"
        assert engine.generate(["a", "b"], GREEDY)["text"] == [expected_text(prompt, 6) for prompt in "ab"]
        assert engine.generate(input_ids=[97], sampling_params=GREEDY)["text"] == expected_text("a", 6)

    def test_a_second_loop_continues_where_the_first_one_stopped(self, sync_world: SyncWorld) -> None:
        stream = iter(sync_world.engine.generate("hello", GREEDY, stream=True))
        text = next(stream)["text"]
        for chunk in stream:
            text += chunk["text"]
            break
        text += "".join(chunk["text"] for chunk in stream)
        assert text == expected_text("hello", 6)
        assert list(stream) == []

    def test_a_stream_of_any_loop_can_be_continued_by_a_second_loop(self, sync_world: SyncWorld) -> None:
        stream = sync_world.engine.async_generate("hello", GREEDY, stream=True)

        async def part(num_chunks: int) -> str:
            text = ""
            async for chunk in stream:
                text += chunk["text"]
                num_chunks -= 1
                if not num_chunks:
                    break
            return text

        assert asyncio.run(part(1)) + asyncio.run(part(100)) == expected_text("hello", 6)

    def test_chat_uses_the_template(self, sync_world: SyncWorld) -> None:
        messages = [{"role": "user", "content": "hi"}]
        expected = expected_text("<user>hi<assistant>", 6)
        assert sync_world.engine.chat(messages, GREEDY)["text"] == expected
        assert "".join(chunk["text"] for chunk in sync_world.engine.chat(messages, GREEDY, stream=True)) == expected
        assert asyncio.run(_await(sync_world.engine.async_chat(messages, GREEDY))) == expected

    def test_stream_and_merge_joins_the_chunks(self, sync_world: SyncWorld) -> None:
        assert stream_and_merge(sync_world.engine, "a", GREEDY) == expected_text("a", 6)

        async def deltas() -> list[str]:
            return [text async for text in async_stream_and_merge(sync_world.engine, "a", GREEDY)]

        pieces = asyncio.run(deltas())
        assert "" not in pieces
        assert "".join(pieces) == expected_text("a", 6)
        with pytest.raises(ValueError, match="more than one answer"):
            stream_and_merge(sync_world.engine, "a", {**LONG, "n": 2})
        sync_world.wait("double.aborts")

    def test_control_calls_return_their_results(self, sync_world: SyncWorld) -> None:
        engine = sync_world.engine
        assert engine.flush_cache().success
        assert engine.pause_generation("in_place")
        assert engine.continue_generation()
        assert engine.get_server_info()["status"] == "ready"
        assert engine.get_model_info()["is_generation"] is True
        assert engine.stats()["num_streams"] == 0
        assert engine.health()["state"] == "running"
        assert engine.is_alive
        assert engine.get_all_child_pids() == [11, 12]
        assert engine.tokenizer.encode("a") == engine.tokenizer_manager.tokenizer.encode("a") == [97]
        assert engine.drain(1) is True

    def test_errors_of_requests_are_raised(self, sync_world: SyncWorld) -> None:
        with pytest.raises(ValueError, match="temperature"):
            sync_world.engine.generate("a", {"temperature": 3})
        with pytest.raises(RequestTooLargeError):
            sync_world.engine.generate("x" * CONTEXT_LENGTH)
        stream = sync_world.engine.generate("x" * CONTEXT_LENGTH, stream=True)
        with pytest.raises(RequestTooLargeError):
            next(stream)


class TestLeaving:
    def test_leaving_the_loop_aborts_the_request(self, sync_world: SyncWorld) -> None:
        for _ in sync_world.engine.generate("a", LONG, stream=True):
            break
        sync_world.wait("double.aborts")

    def test_close_and_the_end_of_a_with_block_abort_the_request(self, sync_world: SyncWorld) -> None:
        with sync_world.engine.generate("a", LONG, stream=True, rid="x") as stream:
            assert stream.rid == "x"
            assert repr(stream) == "<ChunkIterator 'x' running>"
            next(stream)
        sync_world.wait("double.aborts")
        assert list(stream) == []

    def test_an_id_is_free_at_once_after_closing_and_dropping(self, sync_world: SyncWorld) -> None:
        for _ in range(20):
            stream = sync_world.engine.generate("a", LONG, stream=True, rid="x")
            next(stream)
            stream.close()
            assert list(stream) == []
            for _ in sync_world.engine.generate("a", LONG, stream=True, rid="x"):
                break

    def test_an_aborted_stream_ends_with_reason_abort(self, sync_world: SyncWorld) -> None:
        stream = sync_world.engine.generate("a", LONG, stream=True, rid="x")
        next(stream)
        sync_world.engine.abort_request("x")
        assert list(stream)[-1]["meta_info"]["finish_reason"] == "abort"

    @pytest.mark.parametrize("arguments", [{"rid": "x"}, {"abort_all": True}])
    def test_an_abort_does_not_hit_the_next_call(self, sync_world: SyncWorld, arguments: dict[str, object]) -> None:
        for _ in range(20):
            sync_world.engine.abort_request(**arguments)  # type: ignore[arg-type]
            answer = sync_world.engine.generate("a", GREEDY, rid="x")
            assert answer["meta_info"]["finish_reason"] == "length"

    def test_ctrl_c_aborts_only_the_current_call(self, sync_world: SyncWorld) -> None:
        sync_world.double.step_s = 0.005
        other = sync_world.engine.generate("b", {**LONG, "max_new_tokens": 100}, stream=True)
        next(other)
        for stream in (False, True):
            num_submits, num_aborts = len(sync_world.double.submits), len(sync_world.double.aborts)

            def interrupt(num_before: int = num_submits) -> None:
                assert wait_until(lambda: len(sync_world.double.submits) > num_before)
                os.kill(os.getpid(), signal.SIGINT)

            thread = threading.Thread(target=interrupt)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                _exhaust(sync_world.engine.generate("a", LONG, stream=stream))  # type: ignore[call-overload]
            thread.join()
            sync_world.wait(f"len(double.aborts) == {num_aborts + 1}")
        assert list(other)[-1]["meta_info"]["finish_reason"] == "length"
        assert sync_world.engine.generate("a", GREEDY)["text"] == expected_text("a", 6)


def _exhaust(answer: object) -> None:
    if not isinstance(answer, dict):
        for _ in answer:  # type: ignore[attr-defined]
            pass


async def _await(generation: object) -> str:
    answer = await generation  # type: ignore[misc]
    return str(answer["text"])


class TestLoopsAndThreads:
    def test_asyncio_run_accepts_a_generation(self, sync_world: SyncWorld) -> None:
        for _ in range(2):
            out = asyncio.run(sync_world.engine.async_generate("a", GREEDY))
            assert out["text"] == expected_text("a", 6)

    @pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
    def test_streams_work_on_several_loops(self, sync_world: SyncWorld, factory: object) -> None:
        async def read(prompt: str) -> str:
            return "".join(
                [chunk["text"] async for chunk in sync_world.engine.async_generate(prompt, GREEDY, stream=True)]
            )

        async def main() -> list[str]:
            return list(await asyncio.gather(*(read(prompt) for prompt in "abc")))

        for _ in range(2):
            with asyncio.Runner(loop_factory=factory) as runner:  # type: ignore[arg-type]
                assert runner.run(main()) == [expected_text(prompt, 6) for prompt in "abc"]

    def test_call_cancelled_on_another_loop_leaves_nothing(self, sync_world: SyncWorld) -> None:
        sync_world.double.is_held = True

        async def main() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(sync_world.engine.async_generate("a", LONG), 0.5)

        asyncio.run(main())
        sync_world.wait("double.aborts and not double.live")

    def test_synchronous_calls_work_inside_a_running_loop(self, sync_world: SyncWorld) -> None:
        """Notebooks make synchronous calls while a loop runs on this thread."""

        async def cell() -> str:
            return sync_world.engine.generate("a", GREEDY)["text"]

        assert asyncio.run(cell()) == expected_text("a", 6)

    def test_many_threads_may_call_at_the_same_time(self, sync_world: SyncWorld) -> None:
        results: dict[int, list[str]] = {}

        def work(number: int) -> None:
            prompt = f"prompt {number}"
            whole = [sync_world.engine.generate(prompt, GREEDY)["text"] for _ in range(10)]
            streamed = [
                "".join(chunk["text"] for chunk in sync_world.engine.generate(prompt, GREEDY, stream=True))
                for _ in range(10)
            ]
            results[number] = whole + streamed

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {number: [expected_text(f"prompt {number}", 6)] * 20 for number in range(8)}

    def test_closed_loop_of_a_caller_affects_no_other_call(self, sync_world: SyncWorld) -> None:
        sync_world.double.step_s = 0.002

        async def begin() -> object:
            stream = sync_world.engine.async_generate("a", {**LONG, "max_new_tokens": 50}, stream=True)
            task = asyncio.get_running_loop().create_task(anext(stream))  # type: ignore[arg-type]
            await asyncio.sleep(0)
            del task
            return stream

        loop = asyncio.new_event_loop()
        stream = loop.run_until_complete(begin())
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # it is destroyed on purpose
        loop.close()
        assert sync_world.engine.generate("b", GREEDY)["text"] == expected_text("b", 6)
        del stream


class TestLife:
    def test_engine_stays_closed_after_its_shutdown(self) -> None:
        here = SyncWorld()
        here.engine.shutdown()
        with pytest.raises(EngineClosedError, match="create another Engine"):
            here.engine.generate("a")
        with pytest.raises(EngineClosedError, match="create another Engine"), here.engine:
            pass
        assert here.engine.health()["state"] == "closed"

    def test_shutdown_is_idempotent(self) -> None:
        here = SyncWorld()
        with here.engine as engine:
            pass
        engine.shutdown()
        assert here.double.is_stopped
        with pytest.raises(EngineClosedError):
            engine.generate("a")
        with pytest.raises(EngineClosedError):
            engine.flush_cache()
        assert not engine.is_alive
        assert engine.health()["state"] == "closed"
        until_no_thread_is_left()

    def test_a_waiting_thread_gets_an_error(self) -> None:
        here = SyncWorld()
        here.double.is_held = True
        errors: list[BaseException] = []

        def work() -> None:
            try:
                here.engine.generate("a", GREEDY)
            except EngineClosedError as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        here.wait("double.live")
        here.engine.shutdown()
        thread.join(5)
        assert len(errors) == 1

    def test_a_start_that_fails_raises_and_leaves_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def start(self: Double) -> dict[str, object]:
            raise EngineStartupError("the scheduler said no")

        monkeypatch.setattr(Double, "start", start)
        with pytest.raises(EngineStartupError, match="said no"):
            SyncWorld()

        def prepare() -> Blueprint:
            raise ValueError("no such model")

        with pytest.raises(ValueError, match="no such model"):
            Engine.from_blueprint(prepare)
        until_no_thread_is_left()

    def test_ctrl_c_while_it_starts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def start(self: Double) -> dict[str, object]:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(1000)
            return {}

        monkeypatch.setattr(Double, "start", start)
        world = World()
        with pytest.raises(KeyboardInterrupt):
            Engine.from_blueprint(world.blueprint)
        assert world.double.is_stopped
        assert not [thread for thread in threading.enumerate() if thread.name == "aioengine"]

    def test_ctrl_c_while_it_shuts_down(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def stop(self: Double, timeout_s: float) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(1000)

        monkeypatch.setattr(Double, "stop", stop)
        here = SyncWorld()
        with pytest.raises(KeyboardInterrupt):
            here.engine.shutdown()
        assert here.double.num_kills >= 1
        assert here.engine.health()["state"] == "closed"
        assert not [thread for thread in threading.enumerate() if thread.name == "aioengine"]

    def test_forgotten_engine_is_killed_with_a_warning(self) -> None:
        here = SyncWorld()
        double = here.double
        with pytest.warns(ResourceWarning, match="not shut down"):
            del here
        assert double.is_stopped

    def test_a_program_that_forgets_it_ends_quietly(self) -> None:
        program = (
            "from aioengine.api.sync import Engine\n"
            "from tests.engine.engine_double import World\n"
            "engine = Engine.from_blueprint(World().blueprint)\n"
            "stream = engine.generate('a', {'max_new_tokens': 400}, stream=True)\n"
            "next(stream)\n"
            "print(engine.generate('a', {'temperature': 0, 'max_new_tokens': 3})['text'])\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, expected_text("a", 3) + "\n", "")

    def test_a_thread_that_outlives_the_main_thread_gets_its_answer(self) -> None:
        program = (
            "import threading\n"
            "from aioengine.api.sync import Engine\n"
            "from tests.engine.engine_double import World\n"
            "engine = Engine.from_blueprint(World().blueprint)\n"
            "main = threading.main_thread()\n"
            "def work():\n"
            "    main.join()\n"
            "    print(engine.generate('a', {'temperature': 0, 'max_new_tokens': 3})['text'])\n"
            "threading.Thread(target=work).start()\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, expected_text("a", 3) + "\n", "")


class TestPortal:
    def test_ctrl_c_that_reaches_another_thread_ends_a_call(self) -> None:
        async def interrupt() -> None:
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            await asyncio.sleep(1000)

        portal = Portal("test")
        portal.start()
        with pytest.raises(KeyboardInterrupt):
            portal.call(interrupt())
        portal.close()

    def test_a_call_from_its_own_thread_is_refused(self) -> None:
        portal = Portal("test")
        portal.start()

        async def inner() -> str:
            try:
                portal.call(asyncio.sleep(0))
            except RuntimeError as error:
                return str(error)
            return ""

        assert "its own" not in portal.call(inner())
        assert "wait for itself" in portal.call(inner())
        portal.close()
        portal.close()
        with pytest.raises(RuntimeError):
            portal.call(asyncio.sleep(0))

    def test_closing_the_portal_cancels_running_tasks(self) -> None:
        portal = Portal("test")
        portal.start()
        ended = threading.Event()

        async def forever() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()

        asyncio.run_coroutine_threadsafe(forever(), portal.loop)
        portal.call(asyncio.sleep(0))
        portal.close()
        assert ended.is_set()
