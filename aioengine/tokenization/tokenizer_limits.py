"""What a tokenizer.json may not have: values with which the tokenizers library ends the process or takes all memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, cast

import msgspec

from aioengine import checks

_MAX_GROWTH: Final = 256
"""How much longer the normalizer may make a text. Unicode's own forms make some letters 18 times as long."""
_MAX_PREPENDED: Final = 1024


class _Model(msgspec.Struct, frozen=True):
    """``merges``: pairs, or the two parts with a space between them."""

    continuing_subword_prefix: str | None = None
    merges: msgspec.Raw = msgspec.Raw(b"[]")


class _File(msgspec.Struct, frozen=True):
    model: _Model = _Model()
    normalizer: msgspec.Raw = msgspec.Raw(b"null")


def check_tokenizer(content: bytes) -> None:
    """Check the contents of a tokenizer.json before the library reads it; what it refuses itself is left to it.

    Raises:
        ValueError: the file has such a value.
    """
    try:
        found = msgspec.json.decode(content, type=_File)
        normalizer = msgspec.json.decode(found.normalizer)
        prefix = found.model.continuing_subword_prefix
        merges = msgspec.json.decode(found.model.merges, type=list[str | tuple[str, str]]) if prefix else []
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    if prefix is not None:
        _check_merges(prefix, merges)
    if (growth := _growth(normalizer)) > _MAX_GROWTH:
        raise ValueError(f"its normalizer makes texts {growth:g} times as long; at most {_MAX_GROWTH} works")


def _check_merges(prefix: str, merges: list[str | tuple[str, str]]) -> None:
    """Raise ValueError where the second part of a merge does not begin with the prefix, of which the library cuts off
    as many bytes as it has characters.
    """
    for merge in merges:
        right = merge.partition(" ")[2] if isinstance(merge, str) else merge[1]
        if not prefix.isascii() or not right.startswith(prefix):
            raise ValueError(
                f"its continuing_subword_prefix is {checks.shown(prefix)}, and the merge {checks.shown(merge)} goes on "
                "without it"
            )


def _growth(normalizer: object) -> float:
    """How many times as long a text may become, as far as replacements make it longer."""
    if not isinstance(normalizer, Mapping):
        return 1
    given = cast("Mapping[str, object]", normalizer)
    if isinstance(parts := given.get("normalizers"), list):
        growth = 1.0
        for part in cast("list[object]", parts):
            growth *= _growth(part)
        return growth
    prepended, content = given.get("prepend"), given.get("content")
    if isinstance(prepended, str) and len(prepended) > _MAX_PREPENDED:
        return len(prepended)
    pattern = given.get("pattern")
    replaced = cast("Mapping[str, object]", pattern).get("String") if isinstance(pattern, Mapping) else None
    size = len(replaced) if isinstance(replaced, str) else 1
    return max(1, len(content) / max(size, 1)) if isinstance(content, str) else 1
