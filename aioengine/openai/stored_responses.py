"""The last responses, for ``previous_response_id``."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from msgspec.json import Decoder

from aioengine.openai.replies import CallError, encode

MAX_STORED: Final = 1000
"""Responses that can be continued. The oldest ones are forgotten."""
MAX_STORED_BYTES: Final = 256 * 1024 * 1024
"""Size of all responses and of the items of their conversations."""

_decode = Decoder(tuple[dict[str, Any], list[dict[str, Any]]]).decode


class StoredResponses:
    """The last responses and the items of their conversations, within limits.

    They are stored as JSON, because a client may send objects that need much more memory than their JSON.
    """

    def __init__(self, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._entries: OrderedDict[str, bytes] = OrderedDict()
        self._num_bytes = 0
        self._max_bytes = max_bytes

    def add(self, response: dict[str, Any], items: list[dict[str, Any]]) -> None:
        entry = self._entries[response["id"]] = encode((response, items))
        self._num_bytes += len(entry)
        while len(self._entries) > MAX_STORED or self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._entries.popitem(last=False)[1])

    def find(self, response_id: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return a response, and all items until its end. Raises CallError if it is not stored."""
        if response_id not in self._entries:
            raise CallError(f"the response {response_id[:100]!r} is not stored", 404, code="response_not_found")
        return _decode(self._entries[response_id])

    def remove(self, response_id: str) -> None:
        """Forget a response. Raises CallError if it is not stored."""
        self.find(response_id)
        self._num_bytes -= len(self._entries.pop(response_id))
