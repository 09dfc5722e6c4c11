"""The wait for the ``Ready`` of all children."""

from __future__ import annotations

import pytest

from aioengine.errors import EngineStartupError
from aioengine.protocol.messages import DETOKENIZER, SCHEDULER, Role
from aioengine.supervision.handshake import Handshake


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        ([SCHEDULER], "the scheduler process was not ready within 0.01 seconds"),
        ([SCHEDULER, DETOKENIZER], "the detokenizer and scheduler processes were not ready within"),
        ([SCHEDULER, Role("scheduler", 1)], "the scheduler and scheduler-1 processes were not ready within"),
    ],
)
async def test_timeout_names_the_processes_that_were_not_ready(roles: list[Role], words: str) -> None:
    with pytest.raises(EngineStartupError, match=words):
        await Handshake(roles).wait(0.01)
