"""Answers of complete engines with and without the prefix cache, and after killed schedulers."""

from __future__ import annotations

import os
import signal
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioengine import Engine

PARAMS: dict[str, object] = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
SALTS = map(str, count())


def ask(engine: Engine, ids: list[int], **options: Any) -> tuple[list[int], int]:
    """Return the tokens of an answer, and the number of cached prompt tokens."""
    out = engine.generate(input_ids=ids, sampling_params=PARAMS, **options)
    return out["output_ids"], out["meta_info"]["cached_tokens"]


def cold(engine: Engine, ids: list[int], **options: Any) -> list[int]:
    """Return the tokens of an answer without prefix hits."""
    answer, num_cached = ask(engine, ids, cache_salt=next(SALTS), **options)
    assert num_cached == 0
    return answer


def check_killed_schedulers(engine: Engine, prompt: list[int]) -> None:
    """Check the tokens of a stream whose scheduler is killed, and of a stream on the next scheduler."""
    expected, first = cold(engine, prompt), _scheduler_pid(engine)
    for _ in range(2):
        token_ids: list[int] = []
        for chunk in engine.generate(input_ids=prompt, sampling_params=PARAMS, stream=True):
            token_ids += chunk["output_ids"]
            if len(token_ids) > 10 and _scheduler_pid(engine) == first:
                os.kill(first, signal.SIGKILL)
        assert token_ids == expected
    assert _scheduler_pid(engine) != first


def _scheduler_pid(engine: Engine) -> int:
    return next(process["pid"] for process in engine.health()["processes"] if process["role"] == "scheduler")
