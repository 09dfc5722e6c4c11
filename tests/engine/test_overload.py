"""More work than there is time or room for: refused at once, waited for in line, shared out fairly."""

from __future__ import annotations

import asyncio

import pytest

from aioengine.engine import AsyncEngine
from aioengine.errors import EngineOverloadedError
from aioengine.testing.fake_engine import fake_async_engine
from tests.engine.engine_double import until

TWENTY = {"max_new_tokens": 20, "temperature": 0}


def busy_engine() -> AsyncEngine:
    """One request at a time, each of about 60 ms."""
    return fake_async_engine(max_running=1, step_time_s=0.003, processes=False)


class TestRefusingLate:
    async def test_what_would_miss_its_deadline_is_refused_at_once(self) -> None:
        async with busy_engine() as engine:
            await asyncio.gather(*(engine.async_generate("a", TWENTY) for _ in range(5)))
            in_line = [engine.async_generate("a", TWENTY, priority=1) for _ in range(8)]
            await until(lambda: engine.stats()["num_waiting"] > 5)
            for options in ({"queue_timeout": 0.05}, {"first_token_timeout": 0.05}, {"timeout": 0.05}):
                with pytest.raises(EngineOverloadedError, match="would come too late") as caught:
                    await engine.async_generate("b", TWENTY, refuse_late=True, **options)  # type: ignore[call-overload]
                assert 0 < caught.value.retry_after < 10
                with pytest.raises(EngineOverloadedError):
                    await engine.async_generate("b", TWENTY, refuse_late=True, stream=True, **options)
            patient = await engine.async_generate("b", TWENTY, timeout=0.01)
            assert patient["meta_info"]["finish_reason"] == "deadline"
            in_time = await engine.async_generate("b", TWENTY, timeout=60, refuse_late=True)
            assert in_time["meta_info"]["finish_reason"] == "length"
            assert all(out["meta_info"]["finish_reason"] == "length" for out in await asyncio.gather(*in_line))

    async def test_a_stream_that_is_not_refused_begins_with_its_first_chunk(self) -> None:
        async with busy_engine() as engine:
            stream = await engine.async_generate("a", TWENTY, stream=True, timeout=60, refuse_late=True)
            assert len("".join([chunk["text"] async for chunk in stream])) == 20
            await engine.async_generate(input_ids=[1], sampling_params={"max_new_tokens": 0}, refuse_late=True)
