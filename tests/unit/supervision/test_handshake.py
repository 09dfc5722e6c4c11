"""Waiting for the children's first words."""

from __future__ import annotations

import pytest

from aioengine.errors import EngineStartupError
from aioengine.supervision.handshake import Handshake


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        (["scheduler"], "the scheduler process was not ready within 0.01 seconds"),
        (["scheduler", "detokenizer"], "the detokenizer and scheduler processes were not ready within"),
    ],
)
async def test_a_timeout_names_who_was_not_ready(roles: list[str], words: str) -> None:
    with pytest.raises(EngineStartupError, match=words):
        await Handshake(roles).wait(0.01)
