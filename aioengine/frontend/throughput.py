"""Logs the throughput every ten seconds while requests are computed."""

from __future__ import annotations

import logging
from typing import Final

from aioengine.logs import log
from aioengine.protocol.messages import Stats

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 10.0


class Throughput:
    """Logs the throughput of each interval in which steps ran or requests waited.

    It needs no timer: the scheduler sends its statistics at least once a second.
    """

    def __init__(self, log_level: str) -> None:
        """``log_level``: of the engine. Nothing is logged unless it is "info" or "debug"."""
        self._is_wanted = log_level in ("debug", "info")
        self._last: Stats | None = None  # at the beginning of the interval

    def record(self, stats: Stats) -> None:
        """Log a line if an interval has ended with these statistics."""
        last = self._last = self._last or stats
        seconds = stats.sent_at - last.sent_at
        if seconds < INTERVAL_S or not self._is_wanted:
            return
        self._last = stats
        if stats.num_steps == last.num_steps and not (stats.num_running or stats.num_waiting):
            return
        num_prompt, num_cached = stats.prompt_tokens - last.prompt_tokens, stats.cached_tokens - last.cached_tokens
        num_used = stats.num_pages - stats.num_free_pages
        log(
            logger,
            logging.INFO,
            "%d running, %d waiting; %.1f prompt tokens/s (%.0f %% cached), %.1f output tokens/s; KV pool %.0f %% used",
            stats.num_running,
            stats.num_waiting,
            num_prompt / seconds,
            100 * num_cached / max(1, num_prompt),
            (stats.output_tokens - last.output_tokens) / seconds,
            100 * num_used / max(1, stats.num_pages),
        )
