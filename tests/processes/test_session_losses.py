"""Sessions continue after losses with the same turns, and no page stays pinned at the end."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from aioengine.api.engine import AsyncEngine
from aioengine.testing.fake_engine import fake_async_engine
from tests.kit.waiting import until
from tests.processes.restart_kit import frontend_of, pid_of, until_idle, until_restarted

PARAMS: dict[str, object] = {"temperature": 0, "max_new_tokens": 12}
TEXTS = ["The beginning of a conversation that is longer than a page. ", "And then? ", "Go on. "]


async def talk(engine: AsyncEngine, *, is_streaming: bool) -> list[list[int]]:
    """Return the outputs of the turns of a session that is closed during its last turn."""
    sid = await engine.open_session(streaming=is_streaming)
    outputs: list[list[int]] = []
    rid = None
    for number, text in enumerate(TEXTS):
        turn = {"id": sid} if is_streaming else {"id": sid, "rid": rid}
        stream = await engine.async_generate(text, PARAMS, stream=True, session_params=turn)
        if number == len(TEXTS) - 1:
            await engine.close_session(sid)
        rid = stream.rid
        outputs.append([token_id async for chunk in stream for token_id in chunk["output_ids"]])
    return outputs


async def undisturbed() -> list[list[int]]:
    async with fake_async_engine() as engine:
        result = await talk(engine, is_streaming=False)
        assert await talk(engine, is_streaming=True) == result
    return result


@pytest.mark.parametrize("role", [0, 1])
async def test_loss_at_any_turn_of_the_loop_changes_no_session(role: int) -> None:
    """Children are tasks. In each round one of them is killed a little later, until the turns end first."""
    expected = await undisturbed()
    num_turns = 0
    async with fake_async_engine(max_restarts=10_000) as engine:
        processes = frontend_of(engine).parts.processes
        while True:
            talking = [asyncio.create_task(talk(engine, is_streaming=way)) for way in (False, True)]
            for _ in range(num_turns):
                await asyncio.sleep(0)
            is_over = all(task.done() for task in talking)
            processes._incarnation._launcher.children[role].kill()  # type: ignore[attr-defined]
            assert await asyncio.gather(*talking) == [expected, expected]
            await until(lambda: engine.health()["state"] == "running")
            if is_over:
                break
            num_turns += 5
        await engine.async_generate("x", PARAMS)
        await until_idle(engine)
        await until(lambda: engine.stats()["num_pinned_pages"] == 0)
        assert engine.stats()["num_sessions"] == 0


@pytest.mark.process
async def test_session_continues_without_its_pages_after_a_crash() -> None:
    async with fake_async_engine(processes=True) as engine:
        sid = await engine.open_session()
        first = await engine.async_generate("a" * 100, PARAMS, session_params={"id": sid})
        of_first = {"id": sid, "rid": first["meta_info"]["id"]}
        expected = await engine.async_generate("b", PARAMS, session_params=of_first)
        assert expected["meta_info"]["cached_tokens"] >= 96
        os.kill(pid_of(engine, "scheduler"), signal.SIGKILL)
        again = await engine.async_generate("b", PARAMS, session_params=of_first)
        assert again["output_ids"] == expected["output_ids"]
        assert again["meta_info"]["cached_tokens"] == 0
        await until_restarted(engine, 1)
        assert (await engine.async_generate("c", PARAMS, session_params=of_first))["meta_info"]["cached_tokens"] >= 96
        await until(lambda: engine.stats()["num_pinned_pages"] > 0)
        os.kill(pid_of(engine, "detokenizer"), signal.SIGKILL)
        await engine.close_session(sid)
        await until(lambda: engine.stats()["num_pinned_pages"] == 0)
