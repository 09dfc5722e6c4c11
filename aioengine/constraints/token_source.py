"""The tokens of a model in the form that the llguidance library reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Final

SPECIAL: Final = b"\xff"
"""llguidance's mark of special tokens, before their text."""

MAX_KNOWN_TEXTS: Final = 16_384


def token_bytes(text: str | bytes, *, is_special: bool) -> bytes:
    """Return the bytes of a token, with llguidance's mark if it is special."""
    data = text.encode() if isinstance(text, str) else text
    return SPECIAL + data if is_special else data


class TokenSource:
    """The interface to a tokenizer that llguidance expects: its tokens, and a call that tokenizes forced text."""

    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(
        self, tokens: list[bytes], special: set[int], eos_token_ids: list[int], encode: Callable[[str], list[int]]
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = sorted(special)
        self.eos_token_ids = eos_token_ids
        self.eos_token_id = eos_token_ids[0]
        self._encode = encode
        self._ids = {data: token_id for token_id, data in enumerate(tokens) if data and token_id not in special}
        self._longest = max(map(len, self._ids), default=1)
        self._cached = lru_cache(MAX_KNOWN_TEXTS)(self._tokenize)  # llguidance repeats its calls

    def __call__(self, text: str) -> list[int]:
        """Return the ids of ``text``."""
        return self._cached(text)

    def _tokenize(self, text: str) -> list[int]:
        """Tokenize like the tokenizer. If it adds or changes characters, take the longest tokens instead."""
        ids = self._encode(text)
        data = text.encode()
        if b"".join(self.tokens[token_id] for token_id in ids if token_id < len(self.tokens)) == data:
            return ids
        ids = []
        start = 0
        while start < len(data):
            pieces = (data[start : start + size] for size in range(self._longest, 0, -1))
            piece = next((piece for piece in pieces if piece in self._ids), None)
            if piece is None:
                break
            ids.append(self._ids[piece])
            start += len(piece)
        return ids
