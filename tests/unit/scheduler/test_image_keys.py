"""Images in the scheduler: their ids in the prefix cache, and the number of images that a step starts."""

from __future__ import annotations

import hashlib

from aioengine.protocol.columns import TokenColumns
from aioengine.protocol.messages import Continuation, FirstToken, Limits, Media, Sampling, Submit, TextRules
from aioengine.scheduler.admission import ImageBudget
from aioengine.scheduler.plan import StepPlan, StepResult
from aioengine.scheduler.request import Request, with_image_keys
from aioengine.scheduler.scheduler import Scheduler
from aioengine.settings.config import SchedulerSettings
from aioengine.settings.page_groups import PageGroups
from tests.kit.integrity import check_scheduler

PLACEHOLDER = 99


def image(start: int, num_tokens: int, name: str = "a") -> Media:
    return Media(start, num_tokens, num_tokens, hashlib.sha256(name.encode()).digest(), f"/{name}")


def submit(uid: int, parts: list[int | str], *, output: list[int] | None = None, max_new_tokens: int = 4) -> Submit:
    """Create a request. Numbers are text tokens, and a name is an image of 6 tokens."""
    token_ids: list[int] = []
    media: list[Media] = []
    for part in parts:
        if isinstance(part, str):
            media.append(image(len(token_ids), 6, part))
            token_ids += [PLACEHOLDER] * 6
        else:
            token_ids.append(part)
    submit = Submit(uid, token_ids, Sampling(0), Limits(max_new_tokens), TextRules(), media=media)
    if output is not None:
        submit.continuation = Continuation(FirstToken(uid, 0, 0.0, 0.0), output)
    return submit


def scheduler(chunk_tokens: int = 64, num_pages: int = 64) -> Scheduler:
    settings = SchedulerSettings(
        max_running=8, chunk_tokens=chunk_tokens, context_length=256, policy="fcfs", prefix_cache=True, depth=0
    )
    return Scheduler(settings, num_pages=num_pages, page_size=4)


def step(of: Scheduler) -> StepPlan:
    plan = of.schedule(0.0)
    assert plan is not None
    tokens = TokenColumns()
    for row in plan.rows:
        if row.outputs:
            tokens.add(row.uid, (7,))
    of.apply(StepResult(tokens), 0.0)
    return plan


def test_positions_of_images_have_ids_that_no_text_has() -> None:
    prompt = [1, 2, *[PLACEHOLDER] * 4, 3, *[PLACEHOLDER] * 2]
    keys = with_image_keys(prompt, [image(2, 4), image(7, 2, "b")])
    assert keys[:2] == [1, 2]
    assert keys[6] == 3
    assert len({*keys[2:6]}) == len({*keys[7:]}) == 1
    assert keys[2] != keys[7]
    assert max(keys[2:6] + keys[7:]) < 0
    assert prompt[2] == PLACEHOLDER, "the prompt itself stays"


def test_rows_name_placeholders_and_output() -> None:
    request = Request(submit(1, [1, "a", 2], output=[5, 6]), number=1, max_tokens=20)
    assert request.ids_to_compute(0, 10) == [1, *[PLACEHOLDER] * 6, 2, 5, 6]
    assert request.ids_to_compute(3, 9) == [*[PLACEHOLDER] * 4, 2, 5]
    assert request.ids_to_compute(8, 10) == [5, 6]


def test_equal_images_share_pages_and_others_do_not() -> None:
    world = scheduler()
    num_cached: dict[int, int] = {}
    for uid, parts in enumerate(([1, 2, "a", 3], [1, 2, "a", 4, 5], [1, 2, "b", 3], [1, 2, *[PLACEHOLDER] * 6, 3])):
        world.requests.submit(submit(uid, list(parts), max_new_tokens=1))
        plan = step(world)
        num_cached[uid] = plan.rows[0].start
        assert plan.new_rows[0].token_ids[2:8] == [PLACEHOLDER] * 6
        assert len(plan.new_rows[0].media) == (uid < 3)
    assert num_cached == {0: 0, 1: 8, 2: 0, 3: 0}
    check_scheduler(world)


def test_requests_about_one_image_wait_for_the_first() -> None:
    world = scheduler()
    for uid in range(3):
        world.requests.submit(submit(uid, [1, 2, "a", uid, uid], max_new_tokens=2))
    assert [row.uid for row in step(world).rows] == [0]
    assert [(row.uid, row.start) for row in step(world).rows] == [(0, 10), (1, 8), (2, 8)]


def test_image_features_of_a_step_do_not_exceed_its_tokens() -> None:
    world = scheduler(chunk_tokens=16)
    for uid, name in enumerate("abc"):
        world.requests.submit(submit(uid, [uid, name, 8], max_new_tokens=1))
    first = step(world)
    assert [(row.uid, row.count) for row in first.rows] == [(0, 8), (1, 8)]
    assert [(row.uid, row.count) for row in step(world).rows] == [(2, 8)]


def test_the_budget_of_images() -> None:
    budget = ImageBudget(10, keeps_whole=False)
    assert budget.limited([image(2, 50)], 0, 8, is_first=True) == 8, "a large one alone"
    assert budget.limited([image(3, 4, "b")], 0, 8, is_first=True) == 3, "up to the next one"
    assert budget.limited([image(0, 4, "b")], 0, 8, is_first=True) == 0
    assert budget.limited([image(2, 50)], 8, 8, is_first=False) == 8, "one that began before"
    assert budget.limited([image(2, 50)], 8, 8, is_first=True) == 0, "one of whose pages some were cached"
    assert budget.limited([image(40, 4)], 0, 8, is_first=True) == 8, "one that is not reached"


def test_images_that_are_computed_in_one_step() -> None:
    images = [image(2, 4), image(8, 6, "b")]
    budget = ImageBudget(50, keeps_whole=True)
    assert budget.limited(images, 0, 1, is_first=True) == 1
    assert budget.limited(images, 0, 5, is_first=True) == 2, "up to the image"
    assert budget.limited(images, 0, 7, is_first=True) == 7
    assert budget.limited(images, 0, 13, is_first=True) == 8, "up to the second one"
    assert budget.limited(images, 8, 3, is_first=False) == 6, "one may exceed the budget"
    assert budget.limited(images, 8, 3, is_first=False) == 0, "and no second one"
    assert ImageBudget(50, keeps_whole=True).limited(images, 10, 0, is_first=True) == 4, "of which a part is cached"


def test_unsplit_images_wait_for_pages_that_windows_release() -> None:
    settings = SchedulerSettings(
        max_running=8, chunk_tokens=8, context_length=128, policy="fcfs", prefix_cache=True, depth=0,
        whole_image_tokens=6,
    )  # fmt: skip
    groups = PageGroups(windows=(None, 8), page_size=4, min_tokens=6)
    of = Scheduler(settings, num_pages=groups.pages_for(128) + 8, page_size=4, windows=groups.windows)
    for uid in range(5):
        of.requests.submit(submit(uid, [*[9] * (10 + uid), str(uid), 3, "b", 5], max_new_tokens=30))
    rooms: dict[int, int] = {}
    for _ in range(200):
        if of.requests.is_idle:
            break
        plan = step(of)
        rooms |= {new.uid: len(new.pages) * 2 for new in plan.new_rows}
        for row in plan.rows:
            rooms[row.uid] += len(row.new_pages) * 2
            assert row.start + row.count <= rooms[row.uid]
            for start in (10 + row.uid, 17 + row.uid):
                assert not start < row.start + row.count < start + 6, "no image is divided"
    assert of.requests.is_idle
    assert of.cache.clear()
