"""``map`` answers any number of prompts, returns errors of wrong items as rows, and continues files."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from aioengine.api.answers import FinishReason
from aioengine.api.jobs import Item, JobRow
from aioengine.api.journal import SUFFIX
from aioengine.api.params import SamplingParams
from aioengine.errors import EngineClosedError, EngineDeadError, RequestTooLargeError, WrongLoopError
from aioengine.testing.fake_engine import fake_async_engine, fake_engine
from aioengine.testing.faults import Faults
from tests.kit.waiting import until, wait_until

ANSWERS = {"": "one two three"}


def errors(rows: list[JobRow]) -> dict[int, str]:
    return {row["index"]: row["error"]["message"] for row in rows if "error" in row}


def contents(path: Path) -> tuple[bytes, bytes]:
    return path.read_bytes(), Path(f"{path}{SUFFIX}").read_bytes()


class TestRows:
    @pytest.mark.parametrize("ordered", [True, False])
    async def test_rows_equal_the_answers_of_generate(self, ordered: bool) -> None:
        prompts = [f"{number} and more" for number in range(40)]
        params = {"max_new_tokens": 9, "seed": 3}
        async with fake_async_engine(max_running=4) as engine:
            expected = await engine.async_generate(prompts, params)
            rows = [row async for row in engine.map(iter(prompts), params, ordered=ordered, window=7)]
            if ordered:
                assert [row["index"] for row in rows] == list(range(40))
            rows.sort(key=lambda row: row["index"])
            assert [row["output_ids"] for row in rows] == expected["output_ids"]
            assert rows[0]["meta_info"]["finish_reason"] == "length"

    async def test_items_may_be_texts_ids_arguments_and_conversations(self) -> None:
        items: list[Item] = [
            "a",
            [97],
            {"prompt": "a", "sampling_params": {"max_new_tokens": 5}, "rid": "mine"},
            {"input_ids": [97], "sampling_params": SamplingParams(max_new_tokens=2)},
            {"messages": [{"role": "user", "content": "a"}], "sampling_params": {"stop": " two"}},
        ]
        async with fake_async_engine(ANSWERS) as engine:
            rows = [row async for row in engine.map(items, {"max_new_tokens": 7}, return_prompt_token_ids=True)]
            assert [row["text"] for row in rows] == ["one two", "one two", "one t", "on", "one"]
            assert rows[0]["prompt_token_ids"] == [97]
            assert rows[2]["meta_info"]["id"] == "mine"

    async def test_wrong_items_have_rows_with_errors(self) -> None:
        items = [
            "a",
            {"prompt": "a", "sampling_params": {"temperature": 3}},
            {"promt": "a"},
            "x" * 5000,
            {"prompt": ["a", "b"]},
            {"prompt": "a", "sampling_params": {"n": 2}},
            {"prompt": "a", "stream": True},
            {"prompt": "\ud800"},
            7,
            "a",
        ]
        async with fake_async_engine(ANSWERS) as engine:
            rows = [row async for row in engine.map(cast("list[Item]", items))]
            assert [row["index"] for row in rows] == list(range(10))
            messages = errors(rows)
            assert sorted(messages) == [1, 2, 3, 4, 5, 6, 7, 8]
            assert "temperature must be" in messages[1]
            assert "'promt'" in messages[2]
            assert "one answer" in messages[4]
            assert "one answer" in messages[5]
            assert "leave out stream" in messages[6]
            assert rows[3]["error"]["type"] == "RequestTooLargeError"
            assert rows[3]["error"]["status_code"] == 400
            json.dumps(rows)

    async def test_errors_are_raised_if_asked_for(self) -> None:
        async with fake_async_engine(ANSWERS) as engine:
            rows = engine.map(["a", "x" * 5000, "b"], return_exceptions=False)
            assert (await anext(rows))["index"] == 0
            with pytest.raises(RequestTooLargeError):
                await anext(rows)
            with pytest.raises(StopAsyncIteration):
                await anext(rows)

    @pytest.mark.one_loop
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"sampling_params": {"temperature": 3}}, "temperature"),
            ({"sampling_params": {"n": 2}}, "n must be 1"),
            ({"window": 0}, "window must be"),
            ({"ordered": 1}, "ordered must be"),
            ({"rid": "mine"}, "rid belongs to one item"),
            ({"prompts": "abc"}, "prompts must be an iterable"),
            ({"return_exceptions": None}, "return_exceptions must be"),
            ({"resume_ttl": 3.0}, "resume_ttl is for streams"),
            ({"lora_pth": "a"}, "lora_path"),
        ],
    )
    async def test_errors_of_the_whole_job_are_raised_by_the_call(
        self, arguments: dict[str, Any], message: str
    ) -> None:
        async with fake_async_engine(ANSWERS) as engine:
            with pytest.raises((TypeError, ValueError), match=message):
                engine.map(**{"prompts": ["a"], **arguments})

    async def test_overload_only_delays_a_job(self) -> None:
        async with fake_async_engine(max_running=1, max_queued=1, step_time_s=0.0) as engine:
            rows = [row async for row in engine.map(list("abcdef"), {"max_new_tokens": 4}, window=6)]
            assert errors(rows) == {}
            assert len(rows) == 6

    async def test_rows_refused_for_their_deadline_have_errors(self) -> None:
        async with fake_async_engine(max_running=1, max_queued=0) as engine, asyncio.timeout(30):
            items = [{"prompt": "a", "refuse_late": True, "timeout": 100.0}] * 3
            rows = [row async for row in engine.map(items, window=3)]
            assert [row["error"]["type"] for row in rows if "error" in row] == ["EngineOverloadedError"] * 2


class TestEnds:
    @pytest.mark.parametrize("way", ["aclose", "drop"])
    async def test_leaving_aborts_the_requests(self, way: str) -> None:
        async with fake_async_engine(num_pages=4096, context_length=16_000) as engine:
            rows = engine.map(["a", *["b"] * 5], {"max_new_tokens": 8000}, ordered=False)
            waiting = asyncio.ensure_future(anext(rows))
            await until(lambda: engine.stats()["num_streams"] == 6)
            waiting.cancel()
            await asyncio.wait([waiting])
            if way == "aclose":
                await rows.aclose()
            del rows, waiting
            gc.collect()
            await until(lambda: engine.stats()["num_streams"] == engine.stats()["num_running"] == 0)

    async def test_a_dead_engine_ends_the_job_and_its_rows_are_computed_by_the_next_one(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        prompts = [f"prompt {number}" for number in range(30)]
        faults = Faults(kill_at=12)
        done: list[int] = []
        async with fake_async_engine(faults=faults, max_restarts=0, max_running=2) as engine:
            rows = engine.map(prompts, {"max_new_tokens": 3}, checkpoint=path, window=4)
            with pytest.raises(EngineDeadError):  # noqa: PT012
                async for row in rows:
                    done.append(row["index"])  # noqa: PERF401  # a comprehension would lose them
        assert 0 < len(done) < 30
        async with fake_async_engine(max_running=2) as engine:
            again = [row async for row in engine.map(prompts, {"max_new_tokens": 3}, checkpoint=path)]
            assert errors(again) == {}
            assert [row["index"] for row in again] == list(range(30))
            assert 30 - engine.stats()["num_finished"] >= len(done)

    async def test_shutting_down_ends_the_job(self) -> None:
        async with fake_async_engine(context_length=16_000, num_pages=4096) as engine:
            rows = engine.map(["a", "b"], {"max_new_tokens": 8000})
            waiting = asyncio.ensure_future(anext(rows))
            await until(lambda: engine.stats()["num_streams"] == 2)
            await engine.drain(timeout=0)
            with pytest.raises(EngineClosedError):
                await waiting
        with pytest.raises(EngineClosedError):
            engine.map(["a"])

    async def test_another_loop_is_refused(self) -> None:
        async with fake_async_engine() as engine:

            async def elsewhere() -> None:
                with pytest.raises(WrongLoopError):
                    engine.map(["a"])

            await asyncio.to_thread(asyncio.run, elsewhere())


class TestCheckpoints:
    async def test_finished_rows_are_returned_and_not_computed_again(self, tmp_path: Path) -> None:
        path, prompts = tmp_path / "rows.jsonl", [f"{number}" for number in range(12)]
        async with fake_async_engine() as engine:
            first: list[JobRow] = []
            async with engine.map(prompts, {"max_new_tokens": 3}, checkpoint=path, window=3) as rows:
                async for row in rows:
                    first.append(row)
                    if len(first) == 5:
                        break
            num_before = engine.stats()["num_finished"]
            num_done = len(path.read_bytes().splitlines())
            assert 5 <= num_done <= 8
            again = [row async for row in engine.map(prompts, {"max_new_tokens": 3}, checkpoint=path)]
            assert json.loads(json.dumps(again[:5])) == json.loads(json.dumps(first))
            reasons = [row["meta_info"]["finish_reason"] for row in again]
            assert reasons == ["length"] * 12
            assert all(isinstance(reason, FinishReason) for reason in reasons)
            written = contents(path)
            last = [row async for row in engine.map(prompts, {"max_new_tokens": 3}, checkpoint=path, ordered=False)]
            assert sorted(row["index"] for row in last) == list(range(12))
            assert contents(path) == written
            await until(lambda: engine.stats()["num_finished"] - num_before <= 12 - num_done)

    async def test_a_dropped_job_can_be_continued_at_once(self, tmp_path: Path) -> None:
        async with fake_async_engine() as engine:
            options: Any = {"sampling_params": {"max_new_tokens": 3}, "checkpoint": tmp_path / "rows"}
            for _ in range(3):
                async for _ in engine.map(list("abcdef"), window=1, **options):
                    break
                gc.collect()
            rows = [row async for row in engine.map(list("abcdef"), **options)]
            assert len(rows) == 6

    async def test_other_items_and_parameters_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "rows"
        async with fake_async_engine() as engine:
            assert len([row async for row in engine.map(["a", "b"], checkpoint=path)]) == 2
            for items, arguments, message in (
                (["a", "c"], {}, "item 1 is not the item that"),
                (["a"], {}, "the input has 1 items"),
                (["a", "b"], {"sampling_params": {"seed": 1}}, "sampling_params was {} and is"),
                (["a", "b"], {"return_exceptions": False}, "return_exceptions was true and is false"),
                (["a", "b"], {"cache_salt": "x"}, "options was {} and is"),
            ):
                with pytest.raises(ValueError, match=message):
                    async for _ in engine.map(items, checkpoint=path, **cast("Any", arguments)):
                        pass

    async def test_items_that_json_cannot_represent_are_refused(self, tmp_path: Path) -> None:
        async with fake_async_engine() as engine:
            with pytest.raises(TypeError, match="item 0 of a job"):
                await anext(engine.map([{"prompt": "a", "image_data": object()}], checkpoint=tmp_path / "rows"))

    async def test_arrays_are_lists_in_the_file(self, tmp_path: Path) -> None:
        async with fake_async_engine() as engine:
            options: Any = {"return_hidden_states": "last", "checkpoint": tmp_path / "rows"}
            first = [row async for row in engine.map(["a"], {"max_new_tokens": 2}, **options)]
            again = [row async for row in engine.map(["a"], {"max_new_tokens": 2}, **options)]
            np.testing.assert_allclose(first[0]["meta_info"]["hidden_states"], again[0]["meta_info"]["hidden_states"])

    async def test_a_file_that_cannot_be_written_ends_the_job(self, tmp_path: Path) -> None:
        async with fake_async_engine() as engine:
            with pytest.raises(FileNotFoundError):
                await anext(engine.map(["a"], checkpoint=tmp_path / "missing" / "rows"))


class TestEngine:
    def test_items_are_read_on_the_calling_thread_and_may_call_the_engine(self) -> None:
        threads = set[int]()

        def items() -> Iterator[str]:
            for number in range(9):
                threads.add(threading.get_ident())
                yield engine.generate(f"{number}", {"max_new_tokens": 2})["text"]

        with fake_engine(max_running=2) as engine:
            rows = list(engine.map(items(), {"max_new_tokens": 3}, window=3))
            assert [row["index"] for row in rows] == list(range(9))
        assert threads == {threading.get_ident()}

    def test_checkpoints(self, tmp_path: Path) -> None:
        with fake_engine(ANSWERS) as engine:
            for num_rows in (2, 3, 4):
                with engine.map(list("abcd"), checkpoint=tmp_path / "rows", window=1) as rows:
                    assert [next(rows)["index"] for _ in range(num_rows)] == list(range(num_rows))
            with pytest.raises(ValueError, match="item 0 is not the item that"):
                list(engine.map(["x"], checkpoint=tmp_path / "rows"))

    def test_leaving_aborts_the_requests(self) -> None:
        with fake_engine(context_length=16_000, num_pages=4096) as engine:
            items: list[Item] = ["a", *[{"prompt": "b", "sampling_params": {"max_new_tokens": 8000}}] * 3]
            for row in engine.map(items, {"max_new_tokens": 1}):
                assert row["index"] == 0
                break
            gc.collect()
            assert wait_until(lambda: engine.stats()["num_streams"] == engine.stats()["num_running"] == 0)

    def test_errors_of_items_and_of_a_closed_engine(self) -> None:
        with fake_engine(ANSWERS) as engine:
            rows = list(engine.map(["a", "x" * 5000]))
            assert sorted(errors(rows)) == [1]
            with pytest.raises(RequestTooLargeError):
                list(engine.map(["a", "x" * 5000], return_exceptions=False))
            left = engine.map(["a", "b"], window=1)
            next(left)
        with pytest.raises(EngineClosedError):
            next(left)
        assert list(left) == []

    def test_the_bar_shows_rows_and_tokens_per_second(self, capsys: pytest.CaptureFixture[str]) -> None:
        with fake_engine(ANSWERS) as engine:
            assert len(list(engine.map(["a", "b", "c"], progress=True))) == 3
            shown = capsys.readouterr().err
            assert "3/3" in shown
            assert "tokens/s" in shown
            assert len(list(engine.map(["a", "b", "c"]))) == 3
            assert capsys.readouterr().err == ""
