"""Checks tokenizer.json for values with which the tokenizers library ends the process or uses up the memory."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator  # noqa: TC003  # Structs look up the types of their methods
from typing import TYPE_CHECKING, Final

import msgspec

from aioengine.api import checks
from aioengine.model_files import folder_files

if TYPE_CHECKING:
    from pathlib import Path

_MAX_PARTS: Final = 1000
"""Maximum parts of a section. The largest known section has about 20."""
_MAX_GROWTH: Final = 256
"""Maximum ratio of lengths of a text after and before a section. Unicode normalization makes some letters 18 times as
long.
"""
_GROWTHS: Final = {"ByteLevel": 4, "BertNormalizer": 3}
"""Parts that replace a character by several: by its bytes, or by itself with spaces around it."""
_MAX_ADDED: Final = 1024
"""Maximum characters and tokens that a section adds to a text."""


class _Pattern(msgspec.Struct, frozen=True):
    String: str | None = None


class _Ids(msgspec.Struct, frozen=True):
    ids: list[int]


class _Id(msgspec.Struct, frozen=True):
    id: str


class _Piece(msgspec.Struct, frozen=True):
    """An entry of a template: a special token, or one of the texts."""

    SpecialToken: _Id | None = None
    Sequence: object = None


class _Part(msgspec.Struct, frozen=True):
    """A normalizer, pre-tokenizer, post-processor or decoder. A sequence has its parts in one of the last lists."""

    type: str = ""
    pattern: _Pattern | None = None
    content: str = ""
    prepend: str = ""
    precompiled_charsmap: str | None = None
    single: list[_Piece] = []
    pair: list[_Piece] = []
    special_tokens: dict[str, _Ids] = {}
    normalizers: list[_Part] = []
    pretokenizers: list[_Part] = []
    processors: list[_Part] = []
    decoders: list[_Part] = []

    def leaves(self) -> Iterator[_Part]:
        """Yield the parts of a sequence and of sequences in it, or the part itself."""
        parts = self.normalizers or self.pretokenizers or self.processors or self.decoders
        if not parts:
            yield self
        for part in parts:
            yield from part.leaves()

    @property
    def growth(self) -> float:
        """How many times as long a text may become."""
        replaced = self.pattern.String if self.pattern is not None else None
        repetitions = [sum(piece.Sequence is not None for piece in template) for template in (self.single, self.pair)]
        longest = max(_GROWTHS.get(self.type, 1), _longest_text(self.precompiled_charsmap or ""), *repetitions)
        return max(longest, len(self.content) / max(len(replaced or ""), 1))

    @property
    def num_added(self) -> int:
        """Characters and tokens that are added to every text."""
        templates = [[piece.SpecialToken for piece in pieces] for pieces in (self.single, self.pair)]
        sizes = {name: len(token.ids) for name, token in self.special_tokens.items()}
        most = max(sum(sizes.get(token.id, 1) for token in tokens if token is not None) for tokens in templates)
        return len(self.prepend) + most


class _Model(msgspec.Struct, frozen=True):
    """``merges``: pairs, or texts with a space between the two parts."""

    continuing_subword_prefix: object = None
    merges: msgspec.Raw = msgspec.Raw(b"[]")


class _File(msgspec.Struct, frozen=True):
    model: _Model
    normalizer: _Part | None = None
    pre_tokenizer: _Part | None = None
    post_processor: _Part | None = None
    decoder: _Part | None = None


def read_tokenizer(path: Path) -> bytes | None:
    """Return the contents of a tokenizer.json, checked before the library reads it; None if there is no such file.

    Raises ValueError if it is not JSON, has no model, or has a dangerous value. The library makes further checks.
    """
    content = folder_files.read_bytes(path, folder_files.MAX_TOKENIZER_BYTES)
    if content is None:
        return None
    file = folder_files.decode_json(path, content, _File)
    try:
        _check(file)
    except ValueError as error:
        raise ValueError(f"{folder_files.shown_path(path)}: {error}") from error
    return content


def _check(file: _File) -> None:
    if isinstance(file.model.continuing_subword_prefix, str):
        _check_merges(file.model.continuing_subword_prefix, file.model.merges)
    for section in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        part: _Part | None = getattr(file, section)
        parts = [] if part is None else list(part.leaves())
        if len(parts) > _MAX_PARTS:
            raise ValueError(f"its {section} has {len(parts)} parts; at most {_MAX_PARTS} work")
        growth = math.prod((part.growth for part in parts), start=1.0)
        if growth > _MAX_GROWTH:
            raise ValueError(f"its {section} makes texts {growth:g} times as long; at most {_MAX_GROWTH} works")
        if (added := sum(part.num_added for part in parts)) > _MAX_ADDED:
            raise ValueError(f"its {section} adds {added} characters or tokens to a text; at most {_MAX_ADDED} works")


def _check_merges(prefix: str, content: msgspec.Raw) -> None:
    """Raise ValueError if the second part of a merge does not start with the prefix, or the prefix is not ASCII.

    The library removes as many bytes from it as the prefix has characters.
    """
    try:
        merges = msgspec.json.decode(content, type=list[str | tuple[str, str]])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # the library refuses them, too
        return
    for merge in merges:
        right = merge.partition(" ")[2] if isinstance(merge, str) else merge[1]
        if not prefix.isascii() or not right.startswith(prefix):
            raise ValueError(
                f"its continuing_subword_prefix is {checks.shown(prefix)}, and the merge {checks.shown(merge)} has a "
                "second part without it"
            )


def _longest_text(table: str) -> int:
    """Return the bytes of the longest replacement of a character in the table of a Precompiled normalizer, or 0.

    The table, in base64, is the size of a trie in 4 bytes, the trie, and the replacements, each with a null byte at its
    end.
    """
    try:
        content = base64.b64decode(table)
    except ValueError:  # the library refuses it, too
        return 0
    texts = content[4 + int.from_bytes(content[:4], "little") :]
    return max(map(len, texts.split(b"\0")))
