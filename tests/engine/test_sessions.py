"""Sessions: each turn equals a plain request with all its ids."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from msgspec.structs import replace

from aioengine import AsyncEngine, EngineClosedError, EngineDrainingError, EngineOverloadedError
from aioengine.frontend.sessions import sessions
from aioengine.testing.fake_engine import FakeSetup, fake_async_engine, fake_engine
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioengine import Answer, BatchOutput, Engine
    from aioengine.frontend.engine_parts import Blueprint

pytestmark = pytest.mark.one_loop

PARAMS: dict[str, object] = {"temperature": 0, "max_new_tokens": 20}
UNTIL_LEFT: dict[str, object] = {"temperature": 0, "max_new_tokens": None, "ignore_eos": True}
LONG: dict[str, object] = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}
TEXTS = ["The beginning of a conversation that is longer than a page. ", "And then? ", "Go on. ", "Why? "]


@pytest.fixture(scope="module")
def llm() -> Iterator[Engine]:
    with fake_engine() as engine:
        yield engine


@pytest.fixture
def sid(llm: Engine) -> Iterator[str]:
    name = llm.open_session(1000)
    yield name
    llm.close_session(name)


def encoded(llm: Engine | AsyncEngine, text: str, *, is_first: bool = False) -> list[int]:
    ids = llm.tokenizer.encode(text)
    return ids if is_first or ids[0] != llm.tokenizer.bos_token_id else ids[1:]


def rid_of(answer: Answer) -> str:
    return answer["meta_info"]["id"]


def check_plain(llm: Engine, ids: list[int], turn: Answer) -> None:
    """Check that the turn equals a plain request with these ids."""
    plain = llm.generate(input_ids=ids, sampling_params=PARAMS)
    assert (turn["output_ids"], turn["text"]) == (plain["output_ids"], plain["text"])
    assert turn["meta_info"]["prompt_tokens"] == len(ids)
    assert turn["meta_info"]["finish_reason"] == plain["meta_info"]["finish_reason"]


# ---------------------------------------------------------------- results of turns


def test_turns_equal_one_plain_request_of_all_ids(llm: Engine, sid: str) -> None:
    rid, history = None, list[int]()
    for text in TEXTS:
        turn = llm.generate(text, PARAMS, session_params={"id": sid, "rid": rid})
        history += encoded(llm, text, is_first=rid is None)
        if rid is not None:
            assert turn["meta_info"]["cached_tokens"] >= (len(history) - len(text)) // 16 * 16 - 16
        check_plain(llm, history, turn)
        rid, history = rid_of(turn), history + turn["output_ids"]


def test_a_request_can_be_continued_twice(llm: Engine, sid: str) -> None:
    first = llm.generate(TEXTS[0], PARAMS, session_params={"id": sid})
    history = encoded(llm, TEXTS[0], is_first=True) + first["output_ids"]
    for text in TEXTS[1:]:
        turn = llm.generate(text, PARAMS, session_params={"id": sid, "rid": rid_of(first)})
        check_plain(llm, history + encoded(llm, text), turn)


def test_turns_may_drop_output_cut_at_an_offset_or_add_no_ids(llm: Engine, sid: str) -> None:
    begin = encoded(llm, TEXTS[0], is_first=True)
    first = llm.generate(TEXTS[0], PARAMS, session_params={"id": sid})
    of_first = {"id": sid, "rid": rid_of(first)}
    new = encoded(llm, TEXTS[1])
    dropped = llm.generate(TEXTS[1], PARAMS, session_params={**of_first, "drop_previous_output": True})
    check_plain(llm, begin + new, dropped)
    for offset in (1, 7, len(begin) + 3, 10**6):
        cut = llm.generate(TEXTS[1], PARAMS, session_params={**of_first, "offset": offset})
        check_plain(llm, (begin + first["output_ids"])[:offset] + new, cut)
    bare = llm.generate(input_ids=[], sampling_params=PARAMS, session_params=of_first)
    check_plain(llm, begin + first["output_ids"], bare)
    deep = llm.generate(TEXTS[2], PARAMS, session_params={"id": sid, "rid": rid_of(cut), "offset": len(begin) + 1})
    check_plain(llm, (begin + first["output_ids"])[: len(begin) + 1] + encoded(llm, TEXTS[2]), deep)


def test_replace_forgets_the_requests_that_continued_it(llm: Engine, sid: str) -> None:
    first = llm.generate(TEXTS[0], PARAMS, session_params={"id": sid})
    of_first = {"id": sid, "rid": rid_of(first)}
    second = llm.generate(TEXTS[1], PARAMS, session_params=of_first)
    third = llm.generate(TEXTS[2], PARAMS, session_params={"id": sid, "rid": rid_of(second)})
    other = llm.generate(TEXTS[3], PARAMS, session_params={**of_first, "replace": True})
    check_plain(llm, encoded(llm, TEXTS[0], is_first=True) + first["output_ids"] + encoded(llm, TEXTS[3]), other)
    for gone in (second, third):
        with pytest.raises(ValueError, match="has no request"):
            llm.generate("x", PARAMS, session_params={"id": sid, "rid": rid_of(gone)})
    llm.generate(TEXTS[0], PARAMS, session_params={"id": sid, "replace": True})
    for gone in (first, other):
        with pytest.raises(ValueError, match="has no request"):
            llm.generate("x", PARAMS, session_params={"id": sid, "rid": rid_of(gone)})


async def test_replace_aborts_a_request_that_runs() -> None:
    async with fake_async_engine(step_time_s=0.005) as engine:  # it runs for 7 s unless it is aborted
        sid = await engine.open_session()
        stream = await engine.async_generate("Hello", LONG, rid="a", stream=True, session_params={"id": sid})
        await anext(stream)
        with pytest.raises(ValueError, match=r"appending to a request that hasn't finished, 'a'"):
            await engine.async_generate("x", PARAMS, session_params={"id": sid, "rid": "a"})
        replacing = {"id": sid, "rid": "a", "replace": True}
        replaced = await engine.async_generate("more", PARAMS, session_params=replacing)
        assert replaced["meta_info"]["prompt_tokens"] > len("Hello" + "more")
        reasons = [chunk["meta_info"]["finish_reason"] async for chunk in stream]
        assert reasons[-1] == "abort"
        assert (await engine.async_generate("y", PARAMS, session_params={"id": sid, "rid": "a"}))["output_ids"]


def test_turns_may_be_samples_batches_and_streams(llm: Engine, sid: str) -> None:
    begin = encoded(llm, TEXTS[0], is_first=True)
    samples = cast("BatchOutput", llm.generate(TEXTS[0], {**PARAMS, "n": 2}, rid="s", session_params={"id": sid}))
    other = llm.open_session(0, "other")
    params = [{"id": sid, "rid": "s_0"}, None, {"id": other}, {"id": sid, "rid": "s_1"}]
    answers = llm.generate([TEXTS[1]] * 4, PARAMS, session_params=params)
    fresh = encoded(llm, TEXTS[1], is_first=True)
    for answer, ids in zip(
        answers, [begin + samples[0]["output_ids"] + encoded(llm, TEXTS[1]), fresh, fresh], strict=False
    ):
        check_plain(llm, ids, answer)
    chunks = list(llm.generate(TEXTS[2], PARAMS, stream=True, session_params={"id": other, "rid": rid_of(answers[2])}))
    ids = fresh + answers[2]["output_ids"] + encoded(llm, TEXTS[2])
    output_ids = [token_id for chunk in chunks for token_id in chunk["output_ids"]]
    assert output_ids == llm.generate(input_ids=ids, sampling_params=PARAMS)["output_ids"]
    turn = llm.generate(TEXTS[3], PARAMS, session_params={"id": other, "rid": chunks[-1]["meta_info"]["id"]})
    check_plain(llm, ids + output_ids + encoded(llm, TEXTS[3]), turn)
    llm.close_session("other")


async def test_a_stream_that_is_left_and_attached_to_again_can_be_continued() -> None:
    async with fake_async_engine() as engine:
        sid = await engine.open_session()
        async for _ in engine.async_generate(
            "Hello", PARAMS, rid="r", stream=True, resume_ttl=60, session_params={"id": sid}
        ):
            break
        output_ids = [token_id async for chunk in engine.attach("r") for token_id in chunk["output_ids"]]
        turn = await engine.async_generate("More", PARAMS, session_params={"id": sid, "rid": "r"})
        ids = encoded(engine, "Hello", is_first=True) + output_ids + encoded(engine, "More")
        plain = await engine.async_generate(input_ids=ids, sampling_params=PARAMS)
        assert turn["output_ids"] == plain["output_ids"]


def test_random_sessions_equal_a_plain_tree(llm: Engine) -> None:
    """Random roots, branches, offsets, dropped outputs and replaced requests. Forgotten requests are refused."""
    draw = random.Random(11)
    for _ in range(6):
        sid = llm.open_session()
        turns: dict[str, tuple[list[int], list[int], str | None]] = {}  # rid -> prompt, output, parent
        for number in range(12):
            new = [draw.randrange(10, 200) for _ in range(draw.randrange(1, 30))]
            parent = draw.choice([None, *turns])
            offset, drop, replace = draw.choice([0, 0, 5, 40]), draw.random() < 0.3, draw.random() < 0.2
            if parent is None:
                offset, drop = 0, False
            if replace:
                gone = {parent}
                for rid, (_, _, above) in list(turns.items()):
                    if above in gone:
                        gone.add(rid)
                        del turns[rid]
            prompt, output, _ = turns.get(parent or "", ([], [], None))
            history = prompt if drop else prompt + output
            ids = history[: offset or None] + new
            switches = {"offset": offset, "drop_previous_output": drop, "replace": replace}
            answer = llm.generate(
                input_ids=new, sampling_params=PARAMS, rid=f"{sid}-{number}",
                session_params={"id": sid, "rid": parent, **switches},
            )  # fmt: skip
            check_plain(llm, ids, answer)
            turns[rid_of(answer)] = ids, answer["output_ids"], parent
        llm.close_session(sid)


def test_turns_are_the_same_without_the_prefix_cache() -> None:
    with fake_engine(
        num_pages=12, context_length=180
    ) as small:  # each turn evicts the pinned pages of the other sessions
        ids = [small.open_session() for _ in range(4)]
        rids: list[str | None] = [None] * 4
        histories: list[list[int]] = [[] for _ in ids]
        for text in TEXTS[:3]:
            for place, sid in enumerate(ids):
                turn = small.generate(text, PARAMS, session_params={"id": sid, "rid": rids[place]})
                histories[place] += encoded(small, text, is_first=rids[place] is None)
                check_plain(small, histories[place], turn)
                rids[place] = rid_of(turn)
                histories[place] += turn["output_ids"]
                assert turn["meta_info"]["num_preemptions"] == 0
        assert small.stats()["num_free_pages"] == small.stats()["num_pages"] == 12


# ---------------------------------------------------------------- streaming sessions


async def test_a_streaming_session_is_a_chain_with_one_request_at_a_time() -> None:
    async with fake_async_engine() as engine:
        sid = await engine.open_session(1000, streaming=True)
        history: list[int] = []
        for number, text in enumerate(TEXTS):
            stream = engine.async_generate(text, PARAMS, stream=True, session_params={"id": sid, "rid": "ignored"})
            too_soon = engine.async_generate("x", PARAMS, session_params={"id": sid})
            with pytest.raises(ValueError, match="already has an active request"):
                await too_soon
            output_ids = [token_id async for chunk in stream for token_id in chunk["output_ids"]]
            history += encoded(engine, text, is_first=number == 0)
            plain = await engine.async_generate(input_ids=history, sampling_params=PARAMS)
            assert output_ids == plain["output_ids"]
            history += output_ids


async def test_incomplete_turn_is_rolled_back() -> None:
    async with fake_async_engine() as engine:
        sid = await engine.open_session(1000, "mine", True)
        first = await engine.async_generate(TEXTS[0], PARAMS, session_params={"id": sid})
        history = encoded(engine, TEXTS[0], is_first=True) + first["output_ids"]
        for way in ("abort", "leave", "cancel", "deadline", "too large"):
            call = engine.async_generate(
                "x" * (5000 if way == "too large" else 5), LONG, stream=True, session_params={"id": sid},
                timeout=1e-6 if way == "deadline" else None,
            )  # fmt: skip
            if way == "too large":
                with pytest.raises(ValueError, match="tokens"):
                    await call
            elif way == "cancel":
                task = asyncio.create_task(anext(call))  # type: ignore[arg-type]
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                async with call:
                    async for _ in call:
                        if way == "leave":
                            break
                        call.abort()
        turn = await engine.async_generate(TEXTS[1], PARAMS, session_params={"id": sid})
        history += encoded(engine, TEXTS[1])
        plain = await engine.async_generate(input_ids=history, sampling_params=PARAMS)
        assert turn["output_ids"] == plain["output_ids"]


async def test_turn_that_is_aborted_before_its_start_is_not_continued_while_its_batch_runs() -> None:
    async with fake_async_engine(step_time_s=0.001) as engine:
        sid = await engine.open_session(streaming=True)
        session = {"id": sid}
        first = await engine.async_generate(TEXTS[0], PARAMS, session_params=session)
        batch = engine.async_generate(
            [TEXTS[1], "another prompt"], UNTIL_LEFT, rid="x", stream=True, session_params=[session, None]
        )
        engine.abort_request("x_0")  # before its prompt is tokenized
        async for chunk in batch:
            if chunk["index"] == 0:
                assert chunk["meta_info"]["finish_reason"] == "abort"
                break
        turn = await engine.async_generate(TEXTS[2], PARAMS, session_params=session)
        history = encoded(engine, TEXTS[0], is_first=True) + first["output_ids"]
        assert turn["meta_info"]["prompt_tokens"] == len(history) + len(encoded(engine, TEXTS[2]))
        await batch.aclose()


@pytest.mark.parametrize("wrong", [{"offset": 3}, {"replace": True}, {"drop_previous_output": True}])
def test_streaming_session_refuses_options_of_branches(llm: Engine, wrong: dict[str, object]) -> None:
    sid = llm.open_session(streaming=True)
    with pytest.raises(ValueError, match=f"streaming=True, which does not allow {next(iter(wrong))}"):
        llm.generate("x", PARAMS, session_params={"id": sid, **wrong})
    with pytest.raises(ValueError, match="already has an active request"):
        llm.generate("x", {**PARAMS, "n": 2}, session_params={"id": sid})
    llm.close_session(sid)


# ---------------------------------------------------------------- errors


def test_wrong_session_params_are_refused_by_the_call(llm: Engine, sid: str) -> None:
    def refused(value: object, error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            llm.generate("x", PARAMS, stream=True, session_params=value)  # type: ignore[arg-type]

    refused("sid", TypeError, "session_params must be a dict")
    refused({}, ValueError, "session_params has no id")
    refused({"id": 3}, TypeError, "the id of session_params must be a string")
    refused({"id": "x" * 600}, ValueError, "at most 512 bytes")
    refused({"id": sid, "rid": 3}, TypeError, "the rid of session_params")
    refused({"id": sid, "offset": -1}, ValueError, "the offset of session_params")
    refused({"id": sid, "offset": 1.5}, TypeError, "the offset of session_params")
    refused({"id": sid, "replace": 1}, TypeError, "replace of session_params must be True or False")
    refused({"id": sid, "ofset": 1}, TypeError, r"no 'ofset' \(did you mean 'offset'\?\)")
    refused([{"id": sid}], TypeError, "session_params is a list, but there is one prompt")
    with pytest.raises(ValueError, match="input_ids is empty"):
        llm.generate(input_ids=[])


@pytest.mark.parametrize("task", ["embed", "classify"])
async def test_sessions_are_refused_for_models_that_do_not_generate(task: str) -> None:
    def blueprint() -> Blueprint:
        blueprint = FakeSetup().blueprint()
        return replace(
            blueprint, settings=replace(blueprint.settings, model=replace(blueprint.settings.model, task=task))
        )

    async with AsyncEngine.from_blueprint(blueprint) as engine:
        with pytest.raises(
            ValueError, match=f"sessions are for models that generate, and the task of this model is '{task}'"
        ):
            await engine.open_session()
        await engine.close_session("any")


def test_session_params_that_do_not_fit_the_session_raise_at_the_await(llm: Engine, sid: str) -> None:
    def refused(value: dict[str, object], match: str) -> None:
        with pytest.raises(ValueError, match=match):
            llm.generate("x", PARAMS, session_params=value)
        with pytest.raises(ValueError, match=match):
            next(llm.generate("x", PARAMS, stream=True, session_params=value))
        wrong, right = llm.generate(["x", "y"], PARAMS, session_params=[value, {"id": sid}], return_exceptions=True)
        assert isinstance(wrong, ValueError)
        assert right["output_ids"]

    refused({"id": "unknown"}, r"session 'unknown' does not exist; open it first")
    refused({"id": sid, "rid": "unknown"}, f"session '{sid}' has no request 'unknown'")
    refused({"id": sid, "offset": 3}, "session_params has offset=3 but no rid")
    refused({"id": sid, "rid": None, "drop_previous_output": True}, "has drop_previous_output=True but no rid")
    with pytest.raises(ValueError, match="no tokens"):
        llm.generate(input_ids=[], sampling_params=PARAMS, session_params={"id": sid})
    assert llm.generate("x", {"max_new_tokens": 0}, rid="zero", session_params={"id": sid})["output_ids"] == []
    turn = llm.generate("y", PARAMS, session_params={"id": sid, "rid": "zero"})
    assert turn["meta_info"]["prompt_tokens"] == 2


def test_history_that_is_too_long_is_refused(llm: Engine, sid: str) -> None:
    first = llm.generate("x" * 1500, PARAMS, session_params={"id": sid})
    with pytest.raises(ValueError, match="2048"):
        llm.generate("y" * 600, PARAMS, session_params={"id": sid, "rid": rid_of(first)})
    kept = {"id": sid, "rid": rid_of(first)}
    for wrong in ({"max_new_tokens": 600}, {"max_new_tokens": 2}):  # it is refused before a request is replaced
        with pytest.raises(ValueError, match="2048"):
            llm.generate(
                "y" * (10 if wrong["max_new_tokens"] > 2 else 600), wrong, session_params={**kept, "replace": True}
            )
    assert llm.generate("y", PARAMS, session_params=kept)["output_ids"]
    with pytest.raises(ValueError, match="2048"):  # too many ids are not checked one by one
        llm.generate(input_ids=[2**40] * 3000, session_params={"id": sid, "rid": rid_of(first)})


def test_wrong_arguments_of_open_and_close_session_are_refused(llm: Engine) -> None:
    def refused(error: type[Exception], match: str, **arguments: object) -> None:
        with pytest.raises(error, match=match):
            llm.open_session(**arguments)  # type: ignore[arg-type]

    refused(ValueError, "capacity_of_str_len must be", capacity_of_str_len=-1)
    refused(TypeError, "session_id must be a string", session_id=3)
    refused(ValueError, "session_id is empty", session_id="")
    refused(ValueError, "lone surrogate", session_id="\udfff")
    refused(ValueError, "at most 512 bytes", session_id="é" * 400)
    refused(TypeError, "streaming must be True or False", streaming=1)
    refused(ValueError, "timeout must be a number above 0", timeout=0)
    refused(ValueError, "timeout must be a number above 0", timeout=float("nan"))
    with pytest.raises(TypeError, match="session_id must be a string"):
        llm.close_session(None)  # type: ignore[arg-type]
    llm.close_session("was never opened")


def test_session_ids_may_be_unusual_texts(llm: Engine) -> None:
    for name in ("_0", "a_1_2", "\0", " ", "'; DROP TABLE", "🙂" * 100, "None"):
        assert llm.open_session(session_id=name) == name
        with pytest.raises(ValueError, match="is open already"):
            llm.open_session(session_id=name)
        assert llm.generate("x", PARAMS, session_params={"id": name})["output_ids"]
        llm.close_session(name)
        with pytest.raises(ValueError, match="does not exist"):
            llm.generate("x", PARAMS, session_params={"id": name})


# ---------------------------------------------------------------- opening and closing


async def test_running_requests_continue_after_close_session() -> None:
    async with fake_async_engine() as engine:
        plain = await engine.async_generate("Hello", LONG)
        sid = await engine.open_session()
        stream = await engine.async_generate("Hello", LONG, stream=True, session_params={"id": sid})
        first = await anext(stream)
        await engine.close_session(sid)
        assert await engine.open_session(session_id=sid) == sid  # the id is free
        text = first["text"] + "".join([chunk["text"] async for chunk in stream])
        assert text == plain["text"]
        with pytest.raises(ValueError, match="has no request"):
            await engine.async_generate("x", session_params={"id": sid, "rid": stream.rid})
        await engine.close_session(sid)
        await until(lambda: engine.stats()["num_pinned_pages"] == 0)


async def test_with_instead_of_async_with_is_refused_with_advice() -> None:
    async with fake_async_engine() as engine:
        with (
            pytest.raises(TypeError, match="a session of an AsyncEngine needs `async with`"),
            cast("Any", engine.open_session()),
        ):
            pass


async def test_the_end_of_a_block_closes_its_session() -> None:
    async with fake_async_engine() as engine:
        async with engine.open_session(session_id="mine") as sid:
            assert sid == "mine"
            await engine.async_generate("x", PARAMS, session_params={"id": sid})
        with pytest.raises(ZeroDivisionError):
            async with engine.open_session(session_id="mine"):
                raise ZeroDivisionError
        assert engine.stats()["num_sessions"] == 0
        assert await asyncio.create_task(engine.open_session(session_id="mine")) == "mine"
        with pytest.raises(ValueError, match="is open already"):
            async with engine.open_session(session_id="mine"):
                pass
        async with engine.open_session():
            await engine.shutdown()


async def test_pages_are_pinned_until_the_session_is_closed() -> None:
    async with fake_async_engine(num_pages=32) as engine:
        sid = await engine.open_session()
        first = await engine.async_generate("a" * 100, PARAMS, session_params={"id": sid})
        await until(lambda: engine.stats()["num_pinned_pages"] == 7)
        for letter in "bcdefg":  # more than there are pages
            await engine.async_generate(letter * 200, PARAMS)
        turn = await engine.async_generate("b", PARAMS, session_params={"id": sid, "rid": first["meta_info"]["id"]})
        assert turn["meta_info"]["cached_tokens"] == 112
        stats = engine.stats()
        assert stats["num_sessions"] == 1
        await engine.async_generate("z" * 490, PARAMS)  # it needs all pages
        await until(lambda: engine.stats()["num_pinned_pages"] == 0)
        assert engine.stats()["num_free_pages"] == engine.stats()["num_pages"] == 32
        await engine.close_session(sid)


async def test_idle_sessions_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(sessions, "time", clock)
    monkeypatch.setattr(sessions, "CHECK_S", 0.0)
    async with fake_async_engine() as engine:
        lasting = await engine.open_session()
        kept = await engine.open_session(timeout=500.0)
        idle = await engine.open_session(timeout=100.0)
        stream = await engine.async_generate("Hello", LONG, stream=True, session_params={"id": idle})
        clock.now = 120.0  # a session with a running request is not idle
        async for _ in stream:
            assert engine.stats()["num_sessions"] == 3
        clock.now = 219.0
        for _ in range(20):
            await asyncio.sleep(0)
        assert engine.stats()["num_sessions"] == 3
        clock.now = 220.0
        await until(lambda: engine.stats()["num_sessions"] == 2)
        with pytest.raises(ValueError, match="does not exist"):
            await engine.async_generate("x", session_params={"id": idle})
        for sid in (lasting, kept):
            assert (await engine.async_generate("x", PARAMS, session_params={"id": sid}))["output_ids"]


async def test_the_number_of_sessions_and_of_their_tokens_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSION_TOKENS", 1000)
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 1000)
    async with fake_async_engine() as engine:
        names = [await engine.open_session() for _ in range(1000)]
        with pytest.raises(EngineOverloadedError, match="1000 sessions are open"):
            await engine.open_session()
        assert engine.stats()["num_sessions"] == 1000
        options = {"session_params": {"id": names[0]}}
        await engine.async_generate("x" * 600, PARAMS, **options)  # type: ignore[arg-type]
        for stream in (True, False):
            with pytest.raises(EngineOverloadedError, match="the limit is 1000"):
                await engine.async_generate("x" * 300, PARAMS, stream=stream, **options)  # type: ignore[call-overload]
        await engine.async_generate("x" * 300, PARAMS)
        for name in names:
            await engine.close_session(name)
        sid = await engine.open_session()
        for _ in range(20):  # replaced requests do not count
            await engine.async_generate("x" * 300, PARAMS, session_params={"id": sid, "replace": True})
        assert engine.stats()["num_sessions"] == 1


async def test_failed_and_left_turns_free_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSION_TOKENS", 1600)
    async with fake_async_engine() as engine:
        sid = await engine.open_session()
        for _ in range(10):
            async for _ in engine.async_generate("x" * 600, UNTIL_LEFT, stream=True, session_params={"id": sid}):
                break
            with pytest.raises(ValueError, match="2048"):
                await engine.async_generate("x" * 5000, session_params={"id": sid})
            await engine.async_generate("x" * 600, PARAMS, rid="same", session_params={"id": sid, "replace": True})


async def test_sessions_of_draining_and_ended_engines_are_refused() -> None:
    engine = fake_async_engine()
    await engine.start()
    sid = await engine.open_session(timeout=100.0)
    assert (await engine.async_generate("x", PARAMS, session_params={"id": sid}))["output_ids"]
    assert await engine.drain()
    with pytest.raises(EngineDrainingError):
        await engine.open_session()
    await engine.close_session(sid)
    await engine.shutdown()
    for call in (engine.open_session(), engine.close_session(sid)):
        with pytest.raises(EngineClosedError):
            await call
    await engine.start()
    with pytest.raises(ValueError, match="does not exist"):
        await engine.async_generate("x", session_params={"id": sid})
    await engine.shutdown()
