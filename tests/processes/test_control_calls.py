"""Control calls of the runner, from the frontend to the runner and back."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from aioengine.errors import RequestError
from aioengine.frontend.controls import Controls
from aioengine.protocol.messages import MAX_REPLY_BYTES, Reply
from aioengine.testing.fake_engine import fake_async_engine
from aioengine.testing.fake_runner import ECHO, FakeRunner
from aioengine.testing.faults import Faults
from tests.kit.waiting import until
from tests.processes.restart_kit import ANSWERS, ask_all, frontend_of, undisturbed, until_idle, until_restarted
from tests.processes.test_scheduler_service import Loop, submit

if TYPE_CHECKING:
    from pathlib import Path

    from aioengine.api.engine import AsyncEngine

FILES = ["/models/one.safetensors", "/models/two.safetensors"]


def controls_of(engine: AsyncEngine) -> Controls:
    return frontend_of(engine).controls


@pytest.mark.process
@pytest.mark.parametrize("has_answers", [True, False])
async def test_control_calls_are_answered_while_requests_run_with_equal_output(has_answers: bool) -> None:
    """With both fake runners. Requests are repeated until control calls have run at several steps."""
    answers = ANSWERS if has_answers else None
    steps: set[int] = set()
    async with fake_async_engine(answers, processes=True, step_time_s=0.002) as engine:
        while len(steps) <= 3:
            asking = asyncio.create_task(ask_all(engine, stream=True))
            while not asking.done():
                num_before = engine.stats()["output_tokens"]
                reply = await controls_of(engine).ask(ECHO, {"files": list(FILES), "rank": 8})
                facts = json.loads(reply.data)
                assert facts["arguments"] == {"files": FILES, "rank": 8}
                assert facts["num_in_flight"] == 0
                steps.add(facts["num_steps"])
                await until(lambda: asking.done() or engine.stats()["output_tokens"] > num_before)  # noqa: B023
            assert await asking == await undisturbed(has_answers)
            await until_idle(engine)


@pytest.mark.process
async def test_control_call_that_is_lost_with_its_process_fails_alone(tmp_path: Path) -> None:
    faults = Faults(kill_at_control=ECHO, once=str(tmp_path / "once"))
    async with fake_async_engine(ANSWERS, faults=faults, step_time_s=0.002) as engine:
        asking = asyncio.create_task(ask_all(engine, stream=True))
        await until(lambda: engine.stats()["output_tokens"] > 3)
        with pytest.raises(RequestError, match="by signal 9 before it answered 'echo'; this call was not") as caught:
            await controls_of(engine).ask(ECHO)
        assert caught.value.stage == "crash"
        await until_restarted(engine, 1)
        assert await asking == await undisturbed(has_answers=True)
        assert (await controls_of(engine).ask(ECHO)).success
        await until_idle(engine)


@pytest.mark.process
async def test_control_call_that_raises_fails_alone() -> None:
    async with fake_async_engine(ANSWERS, processes=True, faults=Faults(raise_at_control=ECHO)) as engine:
        with pytest.raises(
            RequestError, match="echo failed: InjectedFault: control call 'echo', as asked for"
        ) as caught:
            await controls_of(engine).ask(ECHO)
        assert caught.value.stage == "control"
        assert await ask_all(engine, stream=False) == await undisturbed(has_answers=True)
        assert engine.stats()["num_restarts"] == 0


def test_unknown_control_call_is_refused_with_the_known_names() -> None:
    reply = Loop().call("load_adaptor")
    assert (reply.success, reply.stage) == (False, "")
    assert reply.message.startswith("unknown control call 'load_adaptor'; allowed: flush_cache, pause, continue, ")
    assert reply.message.endswith("stop_profile, echo")


def test_failed_control_call_is_a_reply_with_stage_and_message(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(raise_at_control=ECHO)
    reply = loop.call(ECHO)
    assert (reply.success, reply.stage) == (False, "control")
    assert reply.message == "echo failed: InjectedFault: control call 'echo', as asked for by raise_at_control"
    answers = [
        (lambda: Reply(0, True, data="0" * (MAX_REPLY_BYTES + 1)), "ValueError: its reply has 33,554,433 bytes"),
        (lambda: None, "AttributeError"),
        (lambda: Reply(0, False, "no file /a\udc80"), "no file /a\\udc80"),
    ]
    for answer, words in answers:
        monkeypatch.setattr(FakeRunner, "_echo", lambda _self, _call, answer=answer: answer())
        assert words in loop.call(ECHO).message
    loop.give(1.0, submit(1))
    loop.run(1.0)
    assert loop.ends().keys() == {1}
