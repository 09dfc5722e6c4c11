"""TokenTable has the text of each token id, from the vocabulary and the decoder of a ``tokenizer.json``.

The decoders of nearly all models decode each token independently, except for the first token of a text: byte-level BPE
writes the bytes of the token, and SentencePiece converts U+2581 to a space and ``<0xNN>`` to a byte. For these decoders
a table is enough. For all others, ``read_token_table`` returns None, and ``detokenizer.WindowDetokenizer`` is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from string import hexdigits
from typing import Any, NamedTuple

TokenText = str | bytes
"""``bytes`` if the bytes of the token alone are not valid UTF-8, else ``str``."""


Json = Mapping[str, Any]
"""An object of ``tokenizer.json``."""


class TokenTable(dict[int, TokenText]):
    """``table[token_id]`` is the text of the token anywhere except at the beginning of a text.

    Entries are computed at their first use, so a large vocabulary does not slow the start. Ids without text (unknown
    ids, and special tokens if these are skipped) have the entry ``""``.

    Attributes:
        has_first_rule: the first token of a text has a different text: use ``first``.
        stripped: a character that is removed from the beginning of a text, up to ``num_stripped`` times.
    """

    def __init__(self, tokens: Mapping[int, str], rule: DecoderRule) -> None:
        super().__init__()
        self._tokens = tokens
        self._rule = rule
        self.has_first_rule = rule.has_first_rule
        self.stripped = rule.stripped
        self.num_stripped = rule.num_stripped

    def __missing__(self, token_id: int) -> TokenText:
        token = self._tokens.get(token_id)
        text = "" if token is None else self._rule.text_of(token, is_first=False)
        self[token_id] = text
        return text

    def first(self, token_id: int) -> TokenText | None:
        """Return the text of the token at the beginning of a text. None: no text; the next token is the first."""
        token = self._tokens.get(token_id)
        return None if token is None else self._rule.text_of(token, is_first=True)


def read_token_table(tokenizer: Json, *, skip_special_tokens: bool = True) -> TokenTable | None:
    """Return the table for a parsed ``tokenizer.json``, or None if its decoder needs more than a table.

    As when ``tokenizers`` decodes, no spaces are added between special tokens.
    """
    rule = read_decoder(tokenizer["decoder"])
    if rule is None:
        return None
    vocab: dict[str, int] | list[tuple[str, float]] = tokenizer["model"]["vocab"]
    if isinstance(vocab, dict):
        tokens = {token_id: token for token, token_id in vocab.items()}
    else:  # Unigram: the index of a token is its id
        tokens = dict(enumerate(entry[0] for entry in vocab))
    added = tokenizer["added_tokens"]
    tokens.update((token["id"], token["content"]) for token in added)
    if skip_special_tokens:
        special = {token["content"] for token in added if token["special"]}
        tokens = {token_id: token for token_id, token in tokens.items() if token not in special}
    return TokenTable(tokens, rule)


# ---------------------------------------------------------------- the decoder section


class Stage(NamedTuple):
    """One decoder of the chain: its functions for the first token of a text, and for all later tokens."""

    first: Callable[[str], str]
    later: Callable[[str], str]


@dataclass(slots=True)
class DecoderRule:
    """A chain of decoders whose result depends only on the token and on whether it is the first of a text."""

    stages: list[Stage] = field(default_factory=list[Stage])
    finish: Callable[[str], TokenText] = str
    stripped: str = ""
    num_stripped: int = 0

    @property
    def has_first_rule(self) -> bool:
        return any(stage.first is not stage.later for stage in self.stages)

    def text_of(self, token: str, *, is_first: bool) -> TokenText:
        """Return the text of ``token``."""
        for stage in self.stages:
            token = stage.first(token) if is_first else stage.later(token)
        return self.finish(token)


def read_decoder(decoder: Json | None) -> DecoderRule | None:
    """Return the rule of a decoder section, or None if it cannot be written as a rule.

    Stages before ``Fuse``, ``ByteLevel`` or ``ByteFallback`` work on single tokens. After ``ByteFallback``, only
    ``Fuse`` may follow. After ``Fuse`` or ``ByteLevel``, only a ``Strip`` of the beginning of the text may follow.
    """
    if decoder is None:
        return None
    rule, is_fused, has_bytes = DecoderRule(), False, False
    for part in _flat(decoder):
        kind = part.get("type")
        if kind == "Fuse":
            is_fused = True
        elif is_fused and kind == "Strip" and not rule.num_stripped and not part.get("stop"):
            rule.stripped, rule.num_stripped = part.get("content", " "), part.get("start", 0)
        elif is_fused or has_bytes:
            return None
        elif kind == "ByteLevel":
            rule.finish = byte_level_text
            is_fused = True
        elif kind == "ByteFallback":
            rule.finish = byte_fallback_text
            has_bytes = True
        elif kind == "Metaspace":
            rule.stages.append(_read_metaspace(part))
        elif kind == "Replace" and (text := part.get("pattern", {}).get("String")):
            replace = partial(_replace, text, part.get("content", ""))
            rule.stages.append(Stage(replace, replace))
        else:
            return None
    return rule


def _flat(decoder: Json) -> list[Json]:
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [leaf for part in decoder.get("decoders", ()) for leaf in _flat(part)]


def _replace(text: str, content: str, token: str) -> str:
    return token.replace(text, content)


def _read_metaspace(part: Json) -> Stage:
    mark = part.get("replacement", "\u2581")
    scheme = part.get("prepend_scheme") or ("always" if part.get("add_prefix_space", True) else "never")
    later = partial(_replace, mark, " ")
    return Stage(later if scheme == "never" else partial(_replace, mark, ""), later)


# ---------------------------------------------------------------- tokens that stand for bytes


def _byte_alphabet() -> dict[int, int]:
    """Return a table for ``str.translate`` from the byte-level alphabet to Latin-1.

    In this alphabet, printable bytes are themselves, and other bytes are the code points from 256 on, in order. Latin-1
    characters outside the alphabet map to a character outside Latin-1, so tokens with them cannot be encoded.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return dict.fromkeys(others, 0x10FFFF) | {256 + index: byte for index, byte in enumerate(others)}


_BYTE_ALPHABET = _byte_alphabet()
_HEX_DIGITS = frozenset(hexdigits)


def byte_level_text(token: str) -> TokenText:
    """Return the text of a token of a byte-level vocabulary. A token with other characters is its own text."""
    try:
        data = token.translate(_BYTE_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return token
    return _text_if_valid(data)


def byte_fallback_text(token: str) -> TokenText:
    """Return the text of a token of a vocabulary in which ``<0xNN>`` is a byte."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">") and _HEX_DIGITS.issuperset(token[3:5]):
        return _text_if_valid(bytes.fromhex(token[3:5]))
    return token


def _text_if_valid(data: bytes) -> TokenText:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data
