"""Engines, generations and streams can be neither copied nor pickled."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from aioengine.testing.fake_engine import fake_async_engine, fake_engine

pytestmark = pytest.mark.one_loop

LONG = {"max_new_tokens": 400, "temperature": 0}

copies = pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])


@copies
async def test_async_engine_and_its_calls_cannot_be_copied(duplicate: Callable[[object], object]) -> None:
    async with fake_async_engine(processes=False) as engine:
        stream = engine.async_generate("a", LONG, stream=True)
        whole = engine.async_generate("a", LONG)
        await anext(stream)
        for value in (engine, stream, whole):
            with pytest.raises(TypeError, match="copied"):
                duplicate(value)
        assert sum([chunk["meta_info"]["completion_tokens"] == 400 async for chunk in stream]) == 1
        assert len((await whole)["output_ids"]) == 400


@copies
def test_engine_and_its_calls_cannot_be_copied(duplicate: Callable[[object], object]) -> None:
    with fake_engine(processes=False) as engine:
        stream = engine.generate("a", LONG, stream=True)
        first = next(stream)
        values: list[Any] = [engine, stream]
        for value in values:
            with pytest.raises(TypeError, match="copied"):
                duplicate(value)
        rest = [chunk["text"] for chunk in stream]
        assert first["text"] + "".join(rest) == engine.generate("a", LONG)["text"]
