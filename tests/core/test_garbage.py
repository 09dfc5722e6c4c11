"""The scheduler creates no reference cycles, and the garbage collector does not run while steps wait."""

from __future__ import annotations

import gc

import pytest

from aioengine.child_process.child import GC_THRESHOLDS
from aioengine.protocol.columns import TokenColumns
from aioengine.protocol.messages import Limits, Submit
from aioengine.scheduler.plan import TOKENS, StepResult
from aioengine.scheduler.scheduler import Scheduler
from tests.core.core_world import settings_of, submit_of

NUM_PAGES = 60_000


def run(scheduler: Scheduler, submits: list[Submit]) -> None:
    for submit in submits:
        scheduler.requests.submit(submit)
    while not scheduler.requests.is_idle:
        plan = scheduler.schedule(0.0)
        assert plan is not None
        uids = [row.uid for row in plan.rows if row.outputs == TOKENS]
        scheduler.apply(StepResult(TokenColumns(uids, [5] * len(uids))), 0.0)


def family(first: int) -> list[Submit]:
    limits = Limits(max_new_tokens=4)
    return [submit_of(uid, [uid, *range(4000)], limits=limits) for uid in range(first, first + 100)]


def test_filling_a_large_pool_triggers_no_garbage_collection_and_leaves_no_cycles() -> None:
    scheduler = Scheduler(
        settings_of(max_running=64, chunk_tokens=8192, context_length=8192), num_pages=NUM_PAGES, page_size=16
    )
    run(scheduler, family(0))
    before = gc.get_threshold()
    collections: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        collections.append(phase)

    gc.collect()
    gc.set_threshold(*GC_THRESHOLDS)
    gc.callbacks.append(note)
    try:
        run(scheduler, family(100))
        run(scheduler, family(200))  # pages are evicted by now
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)
    assert scheduler.cache.num_cached == pytest.approx(NUM_PAGES, abs=600)
    assert collections == []
    assert gc.collect() == 0
