"""A model's tokens as the llguidance library reads them: their bytes, and the ids of a text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

SPECIAL: Final = b"\xff"
"""The library's mark of special tokens, before their text."""

MAX_KNOWN_TEXTS: Final = 16_384


def token_bytes(text: str | bytes, *, is_special: bool) -> bytes:
    """The bytes of a token as the library reads them."""
    data = text.encode() if isinstance(text, str) else text
    return SPECIAL + data if is_special else data


class TokenSource:
    """What the library reads of a tokenizer: its tokens, and how it writes text that the grammar forces."""

    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(
        self,
        tokens: list[bytes],
        special: set[int],
        eos_token_ids: list[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = sorted(special)
        self.eos_token_ids = eos_token_ids
        self.eos_token_id = eos_token_ids[0]
        self._encode = encode
        self._ids = {data: token_id for token_id, data in enumerate(tokens) if data and token_id not in special}
        self._longest = max(map(len, self._ids), default=1)
        self._known: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        """The ids of ``text``. The same texts are asked for again and again."""
        found = self._known.get(text)
        if found is None:
            found = self._tokenize(text)
            if len(self._known) < MAX_KNOWN_TEXTS:
                self._known[text] = found
        return found

    def _tokenize(self, text: str) -> list[int]:
        """As the tokenizer does it, or where that adds or changes something, by the longest tokens."""
        ids = self._encode(text)
        data = text.encode()
        if b"".join(self.tokens[token_id] for token_id in ids if token_id < len(self.tokens)) == data:
            return ids
        found: list[int] = []
        start = 0
        while start < len(data):
            pieces = (data[start : start + size] for size in range(self._longest, 0, -1))
            piece = next((each for each in pieces if each in self._ids), None)
            if piece is None:
                return found
            found.append(self._ids[piece])
            start += len(piece)
        return found
