"""Requests with slow stop patterns: other requests do not wait, and queued tokens are neither lost nor changed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from aioengine.processes.detokenizer_process import DetokenizerService, TextSource
from aioengine.protocol.columns import TokenColumns
from aioengine.protocol.messages import (
    Abort,
    End,
    FinishCode,
    FirstToken,
    StepOutput,
    TextChunks,
    TextOpened,
    TextRules,
)
from aioengine.text import stop_regex
from aioengine.text.matching_queue import STEP_BUDGET_S, MatchingQueue
from aioengine.text.open_text import OpenText
from aioengine.text.stop_regex import RegexSearch
from aioengine.text.stop_strings import Hit
from tests.processes.test_detokenizer_service import DEMO, ids_of

POLYNOMIAL = TextRules(stop_regex=(r"(.*e){12}Q",))
EXPONENTIAL = TextRules(stop_regex=(r"(\w| |\w\w)+!",))
SENTENCE = "the sea, the bee, the tree, and we see these three trees here and there and here and there; "


@dataclass
class World:
    """A service with manual steps of 10 ms."""

    service: DetokenizerService = field(default_factory=lambda: DetokenizerService(TextSource(str(DEMO))))
    now: float = 100.0
    texts: dict[int, str] = field(default_factory=dict[int, str])
    token_ids: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    ends: dict[int, End] = field(default_factory=dict[int, End])
    aborted: list[int] = field(default_factory=list[int])

    def step(self, output: StepOutput | None = None) -> None:
        self.now += 0.01
        if output is not None:
            self.service.handle([output], self.now)
        outbox = self.service.step(self.now)
        for message in outbox.to_peer:
            assert isinstance(message, Abort)
            self.aborted += message.uids
        for message in outbox.to_frontend:
            assert isinstance(message, TextChunks)
            self.take(message)

    def take(self, chunks: TextChunks) -> None:
        for uid, text in zip(chunks.tokens.uids, chunks.texts, strict=True):
            assert uid not in self.ends
            self.texts[uid] = self.texts.get(uid, "") + text
        for uid, token_id in zip(chunks.tokens.uid_of_each(), chunks.tokens.token_ids, strict=True):
            self.token_ids.setdefault(uid, []).append(token_id)
        for end in chunks.ended:
            assert end.uid not in self.ends
            self.ends[end.uid] = end

    def open(self, uid: int, rules: TextRules, resumed_ids: list[int] | None = None) -> None:
        self.step(StepOutput(opened=[TextOpened(FirstToken(uid, 0, 1.0, 2.0), rules, resumed_ids or [])]))

    def requests(self) -> list[OpenText]:
        return list(self.service._open.values())  # pyright: ignore[reportPrivateUsage]


def test_many_hostile_requests_take_a_bounded_part_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_regex, "REQUEST_BUDGET_S", 0.1)
    monkeypatch.setattr(stop_regex, "PIECE_BUDGET_S", 0.0001)
    world = World()
    honest, hostile = 0, list(range(1, 13))
    with_pattern = 13
    world.open(honest, TextRules())
    world.open(with_pattern, TextRules(stop_regex=("never",)))
    for uid in hostile:
        world.open(uid, POLYNOMIAL if uid % 2 else EXPONENTIAL)
    used_s = [0.0]
    """CPU time before each search of a step or a turn."""
    plain_end, plain_search = MatchingQueue.end, RegexSearch.search

    def end(queue: MatchingQueue, now: float, *, pauses: bool) -> None:
        assert max(used_s[:-1], default=0.0) < STEP_BUDGET_S  # the search that exceeds it is the last
        used_s[:] = [0.0]
        plain_end(queue, now, pauses=pauses)

    def search(own: RegexSearch, text: str) -> tuple[Hit | None, int]:
        before_s = own.used_s
        try:
            return plain_search(own, text)
        finally:
            used_s.append(used_s[-1] + own.used_s - before_s)

    monkeypatch.setattr(MatchingQueue, "end", end)
    monkeypatch.setattr(RegexSearch, "search", search)
    requests = world.requests()
    for token_id in ids_of(SENTENCE * 6):
        world.step(StepOutput(TokenColumns([*hostile, honest, with_pattern], [token_id] * 14)))
        assert world.texts[honest] == (SENTENCE * 6)[: len(world.texts[honest])]
        assert world.token_ids[honest][-1] == token_id  # it never waits
    assert world.texts[honest] == SENTENCE * 6
    for _ in range(30):
        world.step()
    assert world.texts[with_pattern] == SENTENCE * 6  # it waits at times, but not until the others are done
    assert len(world.ends) < len(hostile)
    for _ in range(10_000):
        if len(world.ends) == len(hostile):
            break
        world.step()
    assert sorted(world.ends) == sorted(world.aborted) == hostile
    for uid in hostile:
        assert world.ends[uid].code == FinishCode.FAILED
        assert "stop_regex took longer than" in world.ends[uid].message
        assert SENTENCE.startswith(world.texts.get(uid, "")[: len(SENTENCE)])
    assert all(request.matching_s < 0.5 for request in requests)


RULES = [
    TextRules(stop_regex=("t[a-z]+ee",)),
    TextRules(stop_regex=("never",), stream_interval=3),
    TextRules(stop_regex=(r"[;,] and",), stop=("these",)),
    TextRules(stop_regex=(r"(?<=bee), the",), stream=False),
    TextRules(stop_regex=("; $",), no_stop_trim=True),
]


def play(rules: TextRules, code: FinishCode, num_resumed: int) -> tuple[World, End]:
    world = World()
    token_ids = ids_of(SENTENCE)
    world.open(0, TextRules())
    world.open(1, rules, token_ids[:num_resumed])
    for token_id in token_ids[num_resumed:-1]:
        world.step(StepOutput(TokenColumns([1], [token_id])))
    matched = token_ids[-1] if code == FinishCode.STOP else None
    world.step(StepOutput(TokenColumns([1], [token_ids[-1]]), ended=[End(1, code, matched)]))
    for _ in range(1000):
        if 1 in world.ends:
            break
        world.step()
    end = world.ends[1]
    return world, End(1, end.code, end.matched)


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("code", [FinishCode.LENGTH, FinishCode.STOP])
@pytest.mark.parametrize("num_resumed", [0, 4])
def test_delayed_matching_gives_the_same_text(
    rules: TextRules, code: FinishCode, num_resumed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, end = play(rules, code, num_resumed)
    draw = random.Random(1)
    for delays in (lambda: True, lambda: draw.random() < 0.3, lambda: draw.random() < 0.7):

        def sometimes(self: MatchingQueue, request: OpenText, delays: object = delays) -> bool:
            return request.uid in self.waiting or delays()  # type: ignore[operator]

        with monkeypatch.context() as patch:
            patch.setattr(MatchingQueue, "delays", sometimes)
            patch.setattr(MatchingQueue, "is_due", lambda self, now, has_news: draw.random() < 0.5)
            world, found = play(rules, code, num_resumed)
        assert found == end
        assert world.texts.get(1) == expected.texts.get(1)
        assert world.token_ids.get(1) == expected.token_ids.get(1)
        assert not world.service._matching.waiting  # pyright: ignore[reportPrivateUsage]
        assert len(world.requests()) == 1


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> World:
    """Request 1 has queued tokens: "the" after "see ". Request 0 has no patterns."""
    world = World()
    world.open(0, TextRules())
    world.open(1, TextRules(stop_regex=("the", "x")))
    for token_id in ids_of("see "):
        world.step(StepOutput(TokenColumns([1], [token_id])))
    monkeypatch.setattr(MatchingQueue, "delays", lambda self, request: True)
    for token_id in ids_of("the"):
        world.service.handle([StepOutput(TokenColumns([1], [token_id]))], world.now)
    return world


def test_abort_does_not_wait_for_queued_tokens(waiting: World) -> None:
    waiting.service.handle([StepOutput(ended=[End(1, FinishCode.ABORT)])], waiting.now)
    waiting.step()
    assert waiting.ends[1].code == FinishCode.ABORT
    assert waiting.texts[1] == "see "
    assert len(waiting.service._stopped) == 0


def test_stop_in_queued_text_before_the_end_of_the_scheduler(waiting: World) -> None:
    waiting.step()
    assert (waiting.ends[1].code, waiting.ends[1].matched) == (FinishCode.STOP, "the")
    assert waiting.texts[1] == "see "
    assert len(waiting.service._stopped) == 1
    waiting.step(StepOutput(ended=[End(1, FinishCode.LENGTH)]))
    assert len(waiting.service._stopped) == 0


def test_stop_in_queued_text_after_the_end_of_the_scheduler(waiting: World) -> None:
    waiting.step(StepOutput(ended=[End(1, FinishCode.LENGTH)]))
    waiting.step()
    assert (waiting.ends[1].code, waiting.ends[1].matched) == (FinishCode.STOP, "the")
    assert waiting.aborted == []
    assert len(waiting.service._stopped) == 0


def test_exhausted_queue_pauses_only_if_requests_wait() -> None:
    queue = MatchingQueue()
    queue.spend(0.02)
    assert queue.is_exhausted
    queue.end(5.0, pauses=True)
    assert not queue.is_exhausted
    assert queue.wait_s(5.0) == pytest.approx(0.08)
    world = World()
    world.open(1, TextRules(stop_regex=("x",)))
    assert world.service.wait_s(world.now) > 0.5
