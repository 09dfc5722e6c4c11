"""A complete engine with an int8 KV cache."""

from __future__ import annotations

import pytest

import aioengine
from aioengine import Engine

pytestmark = pytest.mark.process

PROMPTS = ["The capital of France is", "Once upon a time, " * 20]
GREEDY = {"temperature": 0, "max_new_tokens": 24}


def test_int8_pool_in_an_engine_with_sessions() -> None:
    options = {"device": "cpu", "kv_cache_dtype": "int8", "max_total_tokens": 4096}
    with Engine(dtype="bfloat16", **options) as engine:
        expected = [answer["output_ids"] for answer in engine.generate(PROMPTS, GREEDY)]
        info = engine.get_server_info()
        assert (info["kv_cache_dtype"], info["settings"]["memory"]["kv_dtype"]) == ("int8", "int8")
        plan = aioengine.plan(dtype="bfloat16", **options)
        assert info["memory"]["kv_pool_bytes"] == plan.kv_pool_bytes == (4096 + 16) * 4 * 2 * 4 * (32 + 2)
        session = engine.open_session()
        [answer] = engine.generate(PROMPTS[1:], GREEDY, session_params={"id": session})
        assert answer["output_ids"] == expected[1]
