"""What a tokenizer.json may not have: values with which the tokenizers library ends the process or takes all memory."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final, cast

import msgspec

from aioengine.api import checks
from aioengine.model_files import folder_files

if TYPE_CHECKING:
    from pathlib import Path

_SECTIONS: Final = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
"""Sections that may be a sequence of parts -> the name of the list of these."""
_MAX_PARTS: Final = 1000
"""Of a section. The largest known have some 20."""
_MAX_GROWTH: Final = 256
"""How much longer a text may become. Unicode's own forms make some letters 18 times as long."""
_GROWTHS: Final = {"ByteLevel": 4, "BertNormalizer": 3}
"""Parts that write a character as several: for its bytes, or with spaces around it."""
_MAX_ADDED: Final = 1024
"""Characters that normalizers put before a text, and tokens that a template puts around it."""


class _Model(msgspec.Struct, frozen=True):
    """``merges``: pairs, or the two parts with a space between them."""

    continuing_subword_prefix: object = None
    merges: msgspec.Raw = msgspec.Raw(b"[]")


class _File(msgspec.Struct, frozen=True):
    model: _Model
    normalizer: object = None
    pre_tokenizer: object = None
    post_processor: object = None
    decoder: object = None


def read_tokenizer(path: Path) -> bytes | None:
    """Return the contents of a tokenizer.json, checked before the library reads it; None: there is no such file.

    Raises:
        ValueError: the file is not JSON, has no model, or has a dangerous value. The library makes further checks.
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
    for section, of_parts in _SECTIONS.items():
        parts = list(_parts(getattr(file, section), of_parts))
        if len(parts) > _MAX_PARTS:
            raise ValueError(f"its {section} has {len(parts)} parts; at most {_MAX_PARTS} work")
        growth = 1.0
        for part in parts:
            growth *= _growth(part)
        if growth > _MAX_GROWTH:
            raise ValueError(f"its {section} makes texts {growth:g} times as long; at most {_MAX_GROWTH} works")
        if (added := sum(map(_added, parts))) > _MAX_ADDED:
            raise ValueError(f"its {section} adds {added} characters or tokens to a text; at most {_MAX_ADDED} works")


def _check_merges(prefix: str, content: msgspec.Raw) -> None:
    """Raise ValueError where the second part of a merge does not begin with the prefix, of which the library cuts off
    as many bytes as it has characters.
    """
    try:
        merges = msgspec.json.decode(content, type=list[str | tuple[str, str]])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # the library refuses them, too
        return
    for merge in merges:
        right = merge.partition(" ")[2] if isinstance(merge, str) else merge[1]
        if not prefix.isascii() or not right.startswith(prefix):
            raise ValueError(
                f"its continuing_subword_prefix is {checks.shown(prefix)}, and the merge {checks.shown(merge)} goes on "
                "without it"
            )


def _parts(section: object, of_parts: str) -> Iterator[Mapping[str, object]]:
    """The parts of a section in their order, of sequences in sequences too."""
    waiting = [section]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, Mapping):
            continue
        given = cast("Mapping[str, object]", part)
        inner = given.get(of_parts)
        if isinstance(inner, list):
            waiting += reversed(cast("list[object]", inner))
        else:
            yield given


def _growth(part: Mapping[str, object]) -> float:
    """How many times as long a text may become: a part replaces it by a longer one, or a template repeats it."""
    content, pattern = part.get("content"), part.get("pattern")
    growth = float(max(_GROWTHS.get(str(part.get("type")), 1), _longest_in_table(part.get("precompiled_charsmap"))))
    if isinstance(content, str):
        replaced = cast("Mapping[str, object]", pattern).get("String") if isinstance(pattern, Mapping) else None
        growth = max(growth, len(content) / max(len(replaced) if isinstance(replaced, str) else 1, 1))
    return max(growth, *(len(_entries(part, template, "Sequence")) for template in ("single", "pair")))


def _longest_in_table(table: object) -> int:
    """Bytes of the longest text that a Precompiled normalizer may write for a character; 0: there is no such table.

    The table, in base64, is the size of a trie in 4 bytes, the trie, and the texts, each with a null byte behind it.
    """
    if not isinstance(table, str):
        return 0
    try:
        content = base64.b64decode(table)
    except ValueError:  # the library refuses it, too
        return 0
    texts = content[4 + int.from_bytes(content[:4], "little") :]
    return max(map(len, texts.split(b"\0")))


def _added(part: Mapping[str, object]) -> int:
    """Characters, or tokens, that a part adds to every text."""
    prepended = part.get("prepend")
    num_characters = len(prepended) if isinstance(prepended, str) else 0
    tokens = part.get("special_tokens")
    if not isinstance(tokens, Mapping):
        return num_characters
    sizes = {
        name: len(cast("list[object]", ids))
        for name, token in cast("Mapping[str, object]", tokens).items()
        if isinstance(token, Mapping) and isinstance(ids := cast("Mapping[str, object]", token).get("ids"), list)
    }
    return num_characters + max(
        sum(sizes.get(str(entry.get("id")), 1) for entry in _entries(part, template, "SpecialToken"))
        for template in ("single", "pair")
    )


def _entries(part: Mapping[str, object], template: str, kind: str) -> list[Mapping[str, object]]:
    """The entries of a kind in a template of a TemplateProcessing."""
    listed = part.get(template)
    entries = cast("list[object]", listed) if isinstance(listed, list) else []
    found = [cast("Mapping[str, object]", entry).get(kind) for entry in entries if isinstance(entry, Mapping)]
    return [cast("Mapping[str, object]", entry) for entry in found if isinstance(entry, Mapping)]
