"""Regular expressions in the config of a model or adapter, which may come from an untrusted source. Torch-free."""

from __future__ import annotations

import time
from typing import Any, Final

from aioengine.api.checks import shown

_MATCH_TIMEOUT_S: Final = 0.2
PATTERNS_TIMEOUT_S: Final = 10.0
"""Time limit for all patterns of a config. peft writes at most one per layer, which takes a millisecond."""


class ConfigPatterns:
    """Compiles and matches the patterns of a config within a time limit for all of them.

    Raises ValueError if they take too long, or a pattern is invalid.
    """

    def __init__(self, where: str) -> None:
        """where: the file or field, for messages."""
        self._where = where
        self._used_s = 0.0

    def compiled(self, field: str, pattern: str) -> Any:
        import regex  # slow to import, and most folders have no patterns

        from aioengine.constraints.patterns import expanded_size

        start_s = time.monotonic()
        try:
            expanded_size(pattern)  # limits the time of compiling
            return regex.compile(pattern, cache_pattern=False)
        except (ValueError, regex.error) as error:
            raise ValueError(f"{self._where}: {field} has {shown(pattern)}, an invalid or too large pattern") from error
        finally:
            self._add_time(start_s)

    def matches(self, pattern: Any, name: str) -> bool:
        start_s = time.monotonic()
        try:
            return pattern.search(name, timeout=_MATCH_TIMEOUT_S) is not None
        except TimeoutError as error:
            raise ValueError(f"{self._where}: {shown(pattern.pattern)} takes too long to match {name}") from error
        finally:
            self._add_time(start_s)

    def _add_time(self, start_s: float) -> None:
        self._used_s += time.monotonic() - start_s
        if self._used_s > PATTERNS_TIMEOUT_S:
            raise ValueError(f"{self._where}: its patterns take more than {PATTERNS_TIMEOUT_S:g} seconds")
