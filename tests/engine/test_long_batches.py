"""The number of rows of a long batch that an iteration of the loop handles is bounded in all parts of the engine."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from aioengine.api.params import SamplingParams
from aioengine.errors import EngineClosedError
from aioengine.frontend.calls.call_ids import MAX_IDS_FREED, CallIds
from aioengine.frontend.intake import prompts, requests
from aioengine.frontend.intake.request_checks import RequestChecks
from aioengine.frontend.intake.requests import PROMPTS_IN_PIECE
from aioengine.frontend.intake.submitter import MAX_ROWS_ENDED_AT_ONCE, Submitter
from tests.engine.engine_double import World, expected_text
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.one_loop

MANY = 20_000
ONE = {"temperature": 0, "max_new_tokens": 1}
MESSAGE = {"role": "user", "content": "a"}


class Turns:
    """Counts function calls on the loop's thread. ``most``: the largest counts in one iteration of the loop."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.most: Counter[str] = Counter()
        self._now: Counter[str] = Counter()
        self._patch = patch
        self._thread = threading.get_ident()

    def watch(self, owner: object, name: str) -> None:
        """Count the calls of a function."""
        plain: Callable[..., object] = getattr(owner, name)

        def counting(*arguments: Any, **options: Any) -> object:
            self._now[name] += threading.get_ident() == self._thread
            return plain(*arguments, **options)

        self._patch.setattr(owner, name, counting)

    async def run(self) -> None:
        """Start a new count in each iteration until the task is cancelled."""
        while True:
            self.end()
            await asyncio.sleep(0)

    def end(self) -> None:
        self.most |= self._now
        self._now.clear()


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    watched = Turns(monkeypatch)
    for name in ("text_prompt", "ids_prompt", "chat_prompt", "_rid"):
        watched.watch(requests, name)
    watched.watch(SamplingParams, "parse")
    watched.watch(RequestChecks, "_check_params")
    watched.watch(Submitter, "_start_row")
    watched.watch(prompts, "_message")
    watched.watch(CallIds, "find")
    watched.watch(CallIds, "_free")
    return watched


CALLS: dict[str, Callable[[World, list[object], list[str]], Any]] = {
    "texts": lambda world, params, rids: world.engine.async_generate(["a"] * MANY, params, rid=rids),  # type: ignore[arg-type]
    "ids": lambda world, params, rids: world.engine.async_generate(
        input_ids=[[97]] * MANY, sampling_params=params, rid=rids
    ),  # type: ignore[arg-type]
    "chats": lambda world, params, rids: world.engine.async_chat([[MESSAGE]] * MANY, params, rid=rids),  # type: ignore[arg-type]
}


def limits_of_a_turn() -> dict[str, int]:
    # Two pieces: the call checks the first one, and the loop the second one before a new count starts.
    num_rows = 2 * PROMPTS_IN_PIECE
    names = ("text_prompt", "ids_prompt", "chat_prompt", "_rid", "_check_params", "_message", "_start_row")
    return {
        **dict.fromkeys(names, num_rows),
        "parse": num_rows + 2,
        "find": 4 * num_rows,
        "_free": 2 * MAX_IDS_FREED,
    }


@pytest.mark.parametrize("kind", CALLS)
async def test_iterations_of_the_loop_handle_a_limited_number_of_rows(turns: Turns, kind: str) -> None:
    world = World(max_running=256)
    async with world.engine, asyncio.timeout(50):
        world.double.is_held = True
        params: list[object] = [{**ONE, "stop_token_ids": [1 + place % 50]} for place in range(MANY)]
        counting = asyncio.create_task(turns.run())
        generation = CALLS[kind](world, params, [f"r{place}" for place in range(MANY)])
        waiting = asyncio.ensure_future(generation)
        [call] = world.engine._frontend_here().calls.opened  # pyright: ignore[reportPrivateUsage]
        await until(lambda: call.request.is_checked)
        assert len(world.double.submits) > 1
        waiting.cancel()
        await until(lambda: not world.engine._frontend_here().calls.ids._owners)  # pyright: ignore[reportPrivateUsage]
        counting.cancel()
    turns.end()
    limits = limits_of_a_turn()
    assert {name: most for name, most in turns.most.items() if most > limits[name]} == {}
    assert turns.most["_check_params"] >= PROMPTS_IN_PIECE
    assert MAX_ROWS_ENDED_AT_ONCE <= PROMPTS_IN_PIECE


@pytest.fixture
async def world() -> Any:
    world = World(max_running=256)
    async with world.engine:
        yield world


PLACE = 3 * PROMPTS_IN_PIECE
TEXTS = ["a"] * (PLACE + 1)
RIDS = [f"r{number}" for number in range(PLACE + 1)]


async def test_batch_without_a_tokenizer_may_have_any_length() -> None:
    without = World(max_running=256, with_tokenizer=False)
    async with without.engine:
        params: list[Any] = [{**ONE, "allowed_token_ids": [*range(200)]} for _ in range(600)]
        outs = await without.engine.async_generate(input_ids=[[97]] * 600, sampling_params=params)
    assert len(outs) == 600


class TestLaterRows:
    """Errors in later rows fail the call and name the row, while the first rows are already running."""

    @pytest.mark.parametrize(
        ("texts", "params", "rids", "words"),
        [
            ([*TEXTS[:-1], ""], ONE, None, rf"prompt\[{PLACE}\] is empty"),
            ([*TEXTS[:-1], 7], ONE, None, rf"prompt\[{PLACE}\] must be a string"),
            (TEXTS, [*[ONE] * PLACE, {"top_p": 7}], None, "top_p"),
            (TEXTS, [*[ONE] * PLACE, {"stop_token_ids": [10_000]}], None, "10000"),
            (TEXTS, [*[ONE] * PLACE, {**ONE, "n": 2}], None, "n must be the same .* got 1 and 2"),
            (TEXTS, ONE, [*RIDS[:-1], ""], "rid is empty"),
            (TEXTS, ONE, [*RIDS[:-1], "r7"], "'r7' is the id of two"),
        ],
    )
    async def test_wrong_later_row_fails_the_call(
        self, world: World, texts: Any, params: Any, rids: Any, words: str
    ) -> None:
        world.double.is_held = True
        generation = world.engine.async_generate(texts, params, rid=rids)
        with pytest.raises((TypeError, ValueError), match=words):
            await generation
        await until(lambda: not world.double.live)

    async def test_wrong_ids_and_chats_fail_the_call(self, world: World) -> None:
        world.double.is_held = True
        ids: Any = [*[[1]] * PLACE, []]
        with pytest.raises(ValueError, match=rf"input_ids\[{PLACE}\] is empty"):
            await world.engine.async_generate(input_ids=ids, sampling_params=ONE)
        chats: Any = [*[[MESSAGE]] * PLACE, 7]
        with pytest.raises(TypeError, match=rf"messages\[{PLACE}\] must be"):
            await world.engine.async_chat(chats, ONE)

    async def test_wrong_later_row_fails_alone_with_return_exceptions(self, world: World) -> None:
        params: Any = [*[ONE] * PLACE, {"top_p": 7}]
        outs = await world.engine.async_generate(TEXTS, params, return_exceptions=True)
        assert isinstance(outs[-1], ValueError)
        assert {out["text"] for out in outs[:-1]} == {expected_text("a", 1)}

    async def test_ids_of_later_rows_can_be_aborted_at_once(self, world: World) -> None:
        waiting = asyncio.ensure_future(world.engine.async_generate(TEXTS, ONE, rid=RIDS))
        await asyncio.sleep(0)
        world.engine.abort_request(RIDS[-1])
        world.engine.abort_request("unknown")
        outs = await waiting
        reasons = [out["meta_info"]["finish_reason"]["type"] for out in outs]
        assert Counter(reasons) == {"length": PLACE, "abort": 1}
        assert reasons[-1] == "abort"

    async def test_aborted_ids_that_are_not_known_yet_are_looked_up_again(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looks = Counter[str]()
        plain = CallIds.find
        monkeypatch.setattr(CallIds, "find", lambda own, rid: (looks.update([rid]), plain(own, rid))[1])
        generation = world.engine.async_generate(["a"] * MANY, ONE, rid=[f"r{place}" for place in range(MANY)])
        for _ in range(3):
            world.engine.abort_request("unknown")
        [call] = world.engine._frontend_here().calls.opened  # pyright: ignore[reportPrivateUsage]
        await until(lambda: call.request.is_checked)
        await asyncio.sleep(0.01)
        assert looks["unknown"] == 2 * 3
        await generation.aclose()

    async def test_call_aborted_before_its_checks_has_all_answers(self, world: World) -> None:
        generation = world.engine.async_generate(TEXTS, ONE, rid=RIDS)
        generation.abort()
        outs = await generation
        assert [out["meta_info"]["id"] for out in outs] == RIDS

    async def test_shutdown_ends_unchecked_rows(self, world: World) -> None:
        generation = world.engine.async_generate(["a"] * MANY, ONE)
        await asyncio.sleep(0)
        await world.engine.shutdown()
        with pytest.raises(EngineClosedError):
            await generation
