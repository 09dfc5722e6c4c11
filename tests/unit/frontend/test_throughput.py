"""The log line about the throughput: its times and its figures."""

from __future__ import annotations

import logging

import pytest
from msgspec.structs import replace

from aioengine.frontend.throughput import Throughput
from aioengine.protocol.messages import Stats

IDLE = Stats(num_pages=100, num_free_pages=100)
BUSY = Stats(
    sent_at=10.0,
    num_steps=20,
    prompt_tokens=1000,
    cached_tokens=250,
    output_tokens=305,
    num_running=3,
    num_waiting=2,
    num_pages=100,
    num_free_pages=63,
)


def logged(caplog: pytest.LogCaptureFixture, log_level: str, *stats: Stats) -> list[str]:
    caplog.set_level(logging.INFO, "aioengine")
    throughput = Throughput(log_level)
    for snapshot in stats:
        throughput.record(snapshot)
    return caplog.messages


def later(stats: Stats, seconds: float, **changes: int) -> Stats:
    return replace(stats, sent_at=stats.sent_at + seconds, **changes)


def test_line_has_the_figures_of_its_interval(caplog: pytest.LogCaptureFixture) -> None:
    second = later(BUSY, 20.0, num_steps=50, output_tokens=345, num_running=1, num_waiting=0)
    assert logged(caplog, "info", IDLE, BUSY, second) == [
        "3 running, 2 waiting; 100.0 prompt tokens/s (25 % cached), 30.5 output tokens/s; KV pool 37 % used",
        "1 running, 0 waiting; 0.0 prompt tokens/s (0 % cached), 2.0 output tokens/s; KV pool 37 % used",
    ]


def test_line_is_logged_once_in_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    snapshots = [later(IDLE, tenths / 10, num_steps=tenths, num_running=1) for tenths in range(350)]
    assert len(logged(caplog, "debug", *snapshots)) == 3


def test_idle_engine_logs_no_line(caplog: pytest.LogCaptureFixture) -> None:
    idle = later(BUSY, 0.0, num_running=0, num_waiting=0)
    assert logged(caplog, "info", *(later(idle, seconds) for seconds in range(60))) == []


@pytest.mark.parametrize("log_level", ["warning", "error", "critical"])
def test_levels_above_info_log_no_line(log_level: str, caplog: pytest.LogCaptureFixture) -> None:
    assert logged(caplog, log_level, IDLE, BUSY) == []
