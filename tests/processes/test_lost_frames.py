"""Damaged frames on any channel at any moment: no output is lost, and calls wait only briefly."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from aioengine.errors import EngineError
from aioengine.protocol.codec import FrameEncoder
from aioengine.testing.fake_engine import fake_async_engine
from aioengine.testing.fake_runner import build
from aioengine.transport.local import LocalSender
from tests.processes.engine_kit import Frontend, fake_settings
from tests.processes.restart_kit import ANSWERS, ask_all, undisturbed, until_idle

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioengine.protocol.messages import Message
    from aioengine.settings.config import Settings
    from aioengine.testing.fake_runner import FakeRunner

SOON_S = 8.0
"""A frame is missed within two heartbeats; the rest is for a busy machine."""


class Damage:
    """Truncates one of the frames of all senders in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_left = -1  # until the frame that is damaged; below 0: none will be
        plain = LocalSender.send

        def send(own: LocalSender, messages: list[Message]) -> None:
            plain(own, messages)
            if self.num_left == 0:
                own._receiver.frames.append(own._receiver.frames.pop()[:-1])
            self.num_left -= 1

        monkeypatch.setattr(LocalSender, "send", send)


@pytest.mark.parametrize("stream", [True, False])
async def test_damaged_frame_of_any_channel_causes_a_restart(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children are tasks. In each round a later frame is damaged, until the requests end first."""
    monkeypatch.setattr("aioengine.processes.scheduler_process.HEARTBEAT_S", 0.05)
    monkeypatch.setattr("aioengine.processes.detokenizer_process.HEARTBEAT_S", 0.05)
    expected = await undisturbed(has_answers=True)
    damage, place, num_rounds = Damage(monkeypatch), 0, 0
    async with fake_async_engine(ANSWERS, max_restarts=10_000) as engine:
        while damage.num_left < 0:
            damage.num_left = place
            async with asyncio.timeout(SOON_S):
                assert await ask_all(engine, stream=stream) == expected, f"frame {place}"
                if damage.num_left < 0:
                    await until_idle(engine)
            place += 3
            num_rounds += 1
        damage.num_left = -1
        assert engine.stats()["num_restarts"] > num_rounds / 2  # lost heartbeats may not be noticed in time
    assert num_rounds > 20


async def test_damaged_frame_without_restarts_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    damage = Damage(monkeypatch)
    async with fake_async_engine(ANSWERS, max_restarts=0) as engine:
        damage.num_left = 30
        async with asyncio.timeout(SOON_S):
            with pytest.raises(EngineError):
                await ask_all(engine, stream=True)
        assert engine.health()["state"] == "dead"


def build_damaging(settings: Settings, report: Callable[..., None]) -> FakeRunner:
    """Build a runner in a process that damages one frame of each sender. Only the first process does."""
    options = dict(settings.runner.options)
    damage_at, marker = options.pop("damage_at"), Path(str(options.pop("marker")))
    if not marker.exists():
        marker.touch()
        plain = FrameEncoder.encode
        has_damaged: set[FrameEncoder] = set()

        def encode(own: FrameEncoder, messages: list[Message]) -> bytes:
            frame = plain(own, messages)
            if own._number != damage_at or own in has_damaged:
                return frame
            has_damaged.add(own)
            return frame[:-1]

        FrameEncoder.encode = encode  # type: ignore[method-assign]
    runner = msgspec.structs.replace(settings.runner, options=options)
    return build(msgspec.structs.replace(settings, runner=runner), report)


@pytest.mark.process
@pytest.mark.parametrize("damage_at", [2, 5, 40])
async def test_damaged_frame_between_processes_causes_a_restart(
    damage_at: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    factory = f"{__name__}:build_damaging"
    settings = fake_settings(factory=factory, step_time_s=0.002, damage_at=damage_at, marker=str(tmp_path / "marker"))
    async with Frontend(settings, max_restarts=3) as frontend, asyncio.timeout(SOON_S):
        frontend.submit(1, num_tokens=100)
        await frontend.finished(1)
        while not frontend.supervisor.num_restarts:
            await frontend.idle_stats()
        assert len(frontend.token_ids(1)) == 100
        assert frontend.supervisor.num_restarts <= 2  # by both of its readers, which may notice at different times
    assert "dropped a frame" in caplog.text
