"""The tokens of each prompt count once for ``max_queued_tokens`` while the scheduler has a row of the prompt."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.api.stream import Generation
from aioengine.errors import EngineDeadError, EngineOverloadedError
from aioengine.protocol.columns import TokenColumns
from aioengine.protocol.messages import FinishCode, FirstToken, TextChunks
from aioengine.settings.config import QueueConfig
from tests.engine.engine_double import World
from tests.kit.waiting import until

NUM_PROMPT_TOKENS = 50


def prompts(number: int, size: int = NUM_PROMPT_TOKENS) -> list[list[int]]:
    return [[1 + index % 200] * size for index in range(number)]


def counted(world: World) -> int:
    return world.engine._frontend_here().limits.num_tokens  # pyright: ignore[reportPrivateUsage]


def live(world: World) -> int:
    """Return the prompt tokens of unfinished rows. Samples of a prompt count once."""
    total = 0
    for call in world.engine._frontend_here().calls.opened:  # pyright: ignore[reportPrivateUsage]
        rows = [row for row in call.open_rows.values() if row.uid >= 0]
        by_prompt = {row.prompt_index: len(row.prompt_token_ids) for row in rows}
        total += sum(by_prompt.values())
    return total


async def test_ended_rows_free_capacity() -> None:
    world = World(queue=QueueConfig(max_tokens=100))
    async with world.engine as engine, asyncio.timeout(20):
        world.double.is_held = True
        batch = engine.async_generate(
            input_ids=prompts(30), sampling_params=[{"max_new_tokens": 1 if row else 9} for row in range(30)]
        )
        await until(lambda: len(world.double.live) == 16)
        assert counted(world) == 16 * NUM_PROMPT_TOKENS
        while len(world.double.live) > 1:
            world.double.step()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert counted(world) == NUM_PROMPT_TOKENS  # of the unfinished row
        large = engine.async_generate(input_ids=[9] * 400, sampling_params={"max_new_tokens": 1})
        world.double.resume()
        await asyncio.gather(batch, large)
        assert counted(world) == 0


async def test_prompt_of_samples_counts_once() -> None:
    world = World()
    async with world.engine as engine, asyncio.timeout(20):
        world.double.is_held = True
        generation = engine.async_generate(
            input_ids=prompts(2), sampling_params={"n": 4, "max_new_tokens": 2}, stream=True
        )
        await until(lambda: len(world.double.live) == 8)
        assert counted(world) == 2 * NUM_PROMPT_TOKENS
        for uid in (0, 1, 2, 4):
            world.double.end([uid], FinishCode.ABORT)
        await asyncio.sleep(0.01)
        assert counted(world) == 2 * NUM_PROMPT_TOKENS
        world.double.end([3], FinishCode.ABORT)
        await asyncio.sleep(0.01)
        assert counted(world) == NUM_PROMPT_TOKENS
        await generation.aclose()
        assert counted(world) == 0


async def test_waiting_callers_continue_when_rows_end() -> None:
    world = World(queue=QueueConfig(max_tokens=100), max_running=64)
    async with world.engine as engine, asyncio.timeout(20):
        world.double.is_held = True
        lengths = [{"max_new_tokens": 1 + 9 * (row == 0)} for row in range(40)]
        batch = engine.async_generate(input_ids=prompts(40), sampling_params=lengths)
        await until(lambda: len(world.double.live) == 40)
        with pytest.raises(EngineOverloadedError, match="prompt tokens are waiting"):
            engine.async_generate("a")
        admitted = asyncio.create_task(engine.admit())
        await asyncio.sleep(0.01)
        assert not admitted.done()
        world.double.step()
        await admitted
        world.double.resume()
        await batch


EVENTS = ["single", "batch", "samples", "stream", "step", "abort", "abort row", "fail row", "leave", "cancel", "expire"]


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 7)), max_size=25), st.booleans())
async def test_queue_counts_are_correct_after_any_events(events: list[tuple[str, int]], crashes: bool) -> None:
    world = World()
    numbers = itertools.count()
    async with world.engine as engine, asyncio.timeout(30):
        world.double.is_held = True
        frontend = engine._frontend_here()  # pyright: ignore[reportPrivateUsage]
        open_calls: list[Generation[object]] = []

        def begin(size: int, **options: object) -> None:
            params = {"max_new_tokens": 1 + size % 4, "n": 1 + size % 3 if "n" in options else 1}
            is_stream = bool(options.get("stream"))
            ids = prompts(size + 1, 7) if "batch" in options else [5] * (size + 1)
            open_calls.append(
                engine.async_generate(  # type: ignore[call-overload]
                    input_ids=ids, sampling_params=params, stream=is_stream, rid=f"x{next(numbers)}",
                    return_exceptions=is_stream is False and "batch" in options and size % 2 == 0,
                )
            )  # fmt: skip

        def expire(number: int) -> None:
            for call in list(frontend.calls.opened)[:number]:
                frontend.calls.end_here(call, FinishCode.DEADLINE, "first_token")  # pyright: ignore[reportPrivateUsage]

        todo: dict[str, Callable[[int], object]] = {
            "single": begin,
            "batch": lambda size: begin(size, batch=True),
            "samples": lambda size: begin(size, batch=True, n=True),
            "stream": lambda size: begin(size, batch=True, n=True, stream=True),
            "step": lambda _: world.double.step(),
            "abort": lambda which: engine.abort_request(f"x{which}"),
            "abort row": lambda which: engine.abort_request(f"x{which}_{which % 3}"),
            "fail row": lambda which: world.double.end(list(world.double.live)[which : which + 1], FinishCode.FAILED),
            "leave": lambda which: [call.close() for call in open_calls[which : which + 1]],
            "cancel": lambda which: [call.abort() for call in open_calls[which : which + 1]],
            "expire": expire,
        }
        for event, number in events:
            todo[event](number)
            for _ in range(3):
                await asyncio.sleep(0)
                assert counted(world) == live(world)
        if crashes:
            frontend.fail(EngineDeadError("scheduler"))
        else:
            for call in open_calls:
                call.abort()
        await until(lambda: not frontend.calls.opened)
        limits = frontend.limits
        assert (limits.num_tokens, limits.num_bytes, limits.num_calls) == (0, 0, 0)
        await asyncio.gather(*(call for call in open_calls if not call._reader.call.is_stream), return_exceptions=True)  # pyright: ignore


@pytest.mark.parametrize("code", [FinishCode.SHUTDOWN, FinishCode.DEADLINE])
async def test_row_ended_by_the_frontend_keeps_its_counts(code: FinishCode) -> None:
    world = World()
    async with world.engine as engine, asyncio.timeout(20):
        world.double.is_held = True
        stream = engine.async_generate("abc", {"max_new_tokens": 9}, stream=True)
        await until(lambda: bool(world.double.submits))
        now = world.double.submits[0].arrived_at
        tokens, first_tokens = TokenColumns([0], [120]), [FirstToken(0, 2, now, now)]
        world.double.events.on_messages([TextChunks(tokens, ["x"], first_tokens=first_tokens, preempted=[0])])
        first = (await anext(stream))["meta_info"]
        assert (first["cached_tokens"], first["num_preemptions"]) == (2, 1)
        frontend = engine._frontend_here()  # pyright: ignore[reportPrivateUsage]
        [call] = frontend.calls.opened
        frontend.calls.end_here(call, code, "total")  # pyright: ignore[reportPrivateUsage]
        last = (await anext(stream))["meta_info"]
        assert (last["cached_tokens"], last["num_preemptions"]) == (2, 1)
        assert last.get("cached_tokens_details") == {"device": 2, "host": 0}
        assert (last.get("timings") or {}).get("first_token_s") is not None
