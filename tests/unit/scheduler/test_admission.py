"""Admission: asking changes nothing, and the reserve prevents preemption for some steps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aioengine.memory.prefix_cache import Match, PrefixCache
from aioengine.memory.radix import Node
from aioengine.protocol.messages import Limits, Sampling, Submit, TextRules
from aioengine.scheduler.admission import MAX_PARTIAL, Admission, Refusal, steps_ahead
from aioengine.scheduler.request import Request

PAGE = 4


def request_of(uid: int, token_ids: list[int], *, max_new: int = 400) -> Request:
    submit = Submit(uid, token_ids, Sampling(seed=0), Limits(max_new_tokens=max_new), TextRules())
    return Request(submit, number=uid, max_tokens=len(token_ids) + max_new)


def running(cache: PrefixCache, uid: int, token_ids: list[int], *, num_computed: int, max_new: int = 400) -> Request:
    request = request_of(uid, token_ids, max_new=max_new)
    request.start(cache.allocate(token_ids, cache.match(token_ids)), 0)
    cache.insert(request.allocation, token_ids, num_computed)
    return request


def ask(cache: PrefixCache, request: Request, others: list[Request], *, left: int = 64) -> Match | Refusal:
    return Admission(cache, 64).ask(request, others, left=left, num_partial=0)


def picture(cache: PrefixCache) -> object:
    """Return the state of a cache for comparisons."""

    def of(node: Node) -> object:
        return node.key, node.page, node.num_locks, node.is_pending, [of(child) for child in node.children.values()]

    tree = cache._tree
    unlocked = [node.page for node in tree.unlocked]
    return of(tree.root), unlocked, list(cache._free), tree.num_nodes


def test_a_single_request_needs_only_the_pages_of_its_prompt() -> None:
    cache = PrefixCache(num_pages=3, page_size=PAGE)
    assert ask(cache, request_of(1, [1] * 12), []) == Match([], None)
    assert ask(cache, request_of(2, [1] * 13), []) is Refusal.FULL


def test_pages_for_some_steps_of_each_running_request_are_reserved() -> None:
    for num_pages, answer in [(9, Refusal.FULL), (10, Match([], None))]:
        cache = PrefixCache(num_pages=num_pages, page_size=PAGE)
        other = running(cache, 1, [1, 2], num_computed=2)
        assert ask(cache, request_of(2, [3] * 4), [other]) == answer


def test_requests_that_end_soon_need_no_reserve() -> None:
    cache = PrefixCache(num_pages=2, page_size=PAGE)
    other = running(cache, 1, [1, 2], num_computed=2, max_new=2)
    assert ask(cache, request_of(2, [3, 4], max_new=2), [other]) == Match([], None)
    assert ask(cache, request_of(2, [3, 4], max_new=3), [other]) is Refusal.FULL


def test_a_preempted_request_needs_a_larger_reserve() -> None:
    request = request_of(1, [1])
    first = steps_ahead(request, 1, 64)
    request.num_preemptions = 1
    assert steps_ahead(request, 1, 64) >= 2 * first
    assert steps_ahead(request, 640, 64) >= steps_ahead(request, 1, 64) + 10


def waits(cache: PrefixCache, request: Request) -> bool:
    return Admission(cache, 64).waits(request)


def test_a_prefix_that_is_being_computed_is_waited_for_and_then_used() -> None:
    cache = PrefixCache(num_pages=100, page_size=PAGE)
    other = running(cache, 1, list(range(20)), num_computed=7)
    request = request_of(2, [*range(20), 50])
    assert ask(cache, request, [other]) is Refusal.LATER
    assert waits(cache, request)
    cache.insert(other.allocation, other.token_ids, 19)
    assert waits(cache, request)
    assert ask(cache, request, [other]) is Refusal.LATER
    cache.insert(other.allocation, other.token_ids, 20)
    assert not waits(cache, request)
    answer = ask(cache, request, [other])
    assert isinstance(answer, Match)
    assert [node.page for node in answer.path] == other.allocation.pages[:5]
    assert request.waits_for is None


def test_a_request_does_not_wait_for_a_prefix_whose_request_has_ended() -> None:
    cache = PrefixCache(num_pages=100, page_size=PAGE)
    other = running(cache, 1, list(range(20)), num_computed=8)
    request = request_of(2, [*range(20), 50])
    assert ask(cache, request, [other]) is Refusal.LATER
    cache.release(other.allocation)
    assert not waits(cache, request)
    answer = ask(cache, request, [])
    assert isinstance(answer, Match)
    assert len(answer.path) == 2


def test_with_many_partial_prompts_only_short_prompts_are_admitted() -> None:
    cache = PrefixCache(num_pages=1000, page_size=PAGE)
    admission = Admission(cache, 64)
    assert admission.ask(request_of(1, [1] * 65), [], left=64, num_partial=MAX_PARTIAL) is Refusal.LATER
    assert isinstance(admission.ask(request_of(1, [1] * 64), [], left=64, num_partial=MAX_PARTIAL), Match)


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=6),
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.integers(1, 24),
    st.data(),
)
def test_asking_for_admission_changes_neither_cache_nor_requests(
    prompts: list[list[int]], wanted: list[int], num_pages: int, data: st.DataObject
) -> None:
    cache = PrefixCache(num_pages=num_pages, page_size=PAGE)
    others: list[Request] = []
    for uid, prompt in enumerate(prompts):
        if cache.pages_for(len(prompt)) > cache.num_allocatable:
            continue
        other = running(cache, uid, prompt, num_computed=data.draw(st.integers(0, len(prompt))))
        if data.draw(st.booleans()):
            cache.release(other.allocation)
        else:
            others.append(other)
    before = picture(cache)
    request = request_of(99, wanted)
    ask(cache, request, others)
    assert picture(cache) == before
    assert (request.num_tokens, request.num_computed, request.allocation.pages) == (len(wanted), 0, [])
