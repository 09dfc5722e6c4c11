"""Where the time of a start goes."""

from __future__ import annotations

import time


class StartTimes:
    """Seconds of the parts of a start, which follow one another from the moment that this is made."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._started_at = self._since = time.monotonic()

    def end(self, part: str) -> None:
        """All since the part before was ``part``."""
        now = time.monotonic()
        self._seconds[part] = now - self._since
        self._since = now

    def facts(self) -> dict[str, str | int | float | bool]:
        """``load_s`` for all, and ``start_..._s`` for each part."""
        parts = {f"start_{part}_s": round(seconds, 3) for part, seconds in self._seconds.items()}
        return {"load_s": self._since - self._started_at, **parts}
