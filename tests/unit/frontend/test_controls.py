"""Control calls without processes."""

from __future__ import annotations

import asyncio

import pytest

from aioengine.errors import RequestError
from aioengine.frontend.controls import Controls
from aioengine.protocol.messages import Control, Reply


async def test_replicas_continue_if_a_pause_is_lost_by_one_of_them() -> None:
    sent: list[Control] = []
    controls = Controls(sent.extend, lambda: None)
    paused = asyncio.create_task(controls.pause("in_place"))
    await asyncio.sleep(0)
    controls.answer(Reply(sent[0].call_id, False, "a scheduler was lost", stage="crash"))
    with pytest.raises(RequestError, match="a scheduler was lost"):
        await paused
    assert [control.name for control in sent] == ["pause", "continue"]
