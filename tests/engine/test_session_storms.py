"""Random turns, branches, cancellations, aborts and closed sessions, while processes are lost. Nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING, cast

import pytest

from aioengine.testing.fake_engine import fake_async_engine
from tests.kit.waiting import until

if TYPE_CHECKING:
    from aioengine import Answer, AsyncEngine

pytestmark = pytest.mark.one_loop


class Talk:
    """Opens sessions and sends random turns."""

    def __init__(self, engine: AsyncEngine, seed: int) -> None:
        self.engine = engine
        self.rng = random.Random(seed)
        self.rids: dict[str, list[str]] = {}  # session -> ids of its answers
        self.num_opened = 0

    async def open_and_close(self) -> None:
        if len(self.rids) < 3 or self.rng.random() < 0.05:
            is_streaming = self.rng.random() < 0.3
            self.rids[await self.engine.open_session(streaming=is_streaming, timeout=1000.0)] = []
            self.num_opened += 1
        if len(self.rids) > 3 and self.rng.random() < 0.2:
            sid = self.rng.choice([*self.rids])
            del self.rids[sid]
            await self.engine.close_session(sid)

    async def turn(self) -> None:
        rng = self.rng
        sid = rng.choice([*self.rids])
        rids = self.rids[sid]
        params: dict[str, object] = {"id": sid, "rid": rng.choice([None, *rids])}
        params |= {"offset": rng.choice([0, 0, 40]), "replace": rng.random() < 0.1}
        prompt = [rng.randrange(10, 200) for _ in range(rng.randrange(1, 60))]
        sampling = {"temperature": 0, "max_new_tokens": rng.choice([1, 5, 40])}
        with contextlib.suppress(ValueError):  # the request is forgotten or running, or the prompt is too long
            if rng.random() < 0.5:
                answer = cast(
                    "Answer",
                    await self.engine.async_generate(input_ids=prompt, sampling_params=sampling, session_params=params),
                )
                rids.append(answer["meta_info"]["id"])
                return
            async with self.engine.async_generate(
                input_ids=prompt, sampling_params=sampling, session_params=params, stream=True
            ) as stream:
                async for _ in stream:
                    if rng.random() < 0.1:
                        break
                    if rng.random() < 0.1:
                        stream.abort()
                rids.append(stream.rid)


@pytest.mark.parametrize("num_pages", [20, 1024])
async def test_random_sessions_leave_nothing_in_the_engine(num_pages: int) -> None:
    async with fake_async_engine(num_pages=num_pages, context_length=300, max_restarts=10_000) as engine:
        talk = Talk(engine, num_pages)
        turns: list[asyncio.Task[None]] = []
        run = engine._run
        assert run is not None
        assert run.frontend is not None
        processes = run.frontend.parts.processes
        for number in range(300):
            await talk.open_and_close()
            turns.append(asyncio.create_task(talk.turn()))
            if talk.rng.random() < 0.1:
                talk.rng.choice(turns).cancel()
            if number % 100 == 99:
                processes._incarnation._launcher.children[number // 100 % 2].kill()  # type: ignore[attr-defined]
            for _ in range(talk.rng.randrange(6)):
                await asyncio.sleep(0)
        ends = await asyncio.gather(*turns, return_exceptions=True)
        assert [end for end in ends if not isinstance(end, asyncio.CancelledError | None)] == []
        for sid in talk.rids:
            await engine.close_session(sid)
        assert talk.num_opened > 5
        await until(lambda: engine.health()["state"] == "running" and engine.stats()["num_streams"] == 0)
        await engine.async_generate("x", {"max_new_tokens": 1})
        await until(lambda: engine.stats()["num_pinned_pages"] == engine.stats()["num_running"] == 0)
        assert engine.stats()["num_free_pages"] == num_pages
        table = run.frontend.sessions
        assert (len(table), table._num_tokens, table._running) == (0, 0, {})
