"""The last responses, for ``previous_response_id``."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from aioengine.openai.replies import CallError

MAX_STORED: Final = 1000
"""Responses that can be continued. The oldest ones are forgotten."""
MAX_STORED_BYTES: Final = 256 * 1024 * 1024
"""Approximate size of their items."""


class StoredResponses:
    """The last responses and the items of their conversations, within limits."""

    def __init__(self, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._entries: OrderedDict[str, tuple[dict[str, Any], list[dict[str, Any]], int]] = OrderedDict()
        self._num_bytes = 0
        self._max_bytes = max_bytes

    def add(self, response: dict[str, Any], items: list[dict[str, Any]]) -> None:
        size = len(str(items))
        self._entries[response["id"]] = response, items, size
        self._num_bytes += size
        while len(self._entries) > MAX_STORED or self._num_bytes > self._max_bytes:
            self._num_bytes -= self._entries.popitem(last=False)[1][2]

    def find(self, response_id: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return a response, and all items until its end. Raises CallError if it is not stored."""
        if response_id not in self._entries:
            raise CallError(f"the response {response_id[:100]!r} is not stored", 404, code="response_not_found")
        return self._entries[response_id][:2]

    def remove(self, response_id: str) -> None:
        """Forget a response. Raises CallError if it is not stored."""
        self.find(response_id)
        self._num_bytes -= self._entries.pop(response_id)[2]
