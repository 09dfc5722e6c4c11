"""The tokens that tokenizer_config.json adds to those of tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from aioengine import folder_files

if TYPE_CHECKING:
    from pathlib import Path

    Json = dict[str, Any]

_JSON_NAMES: dict[type[object], str] = {
    list: "a list",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}

CONFIG = "tokenizer_config.json"
OLDER_CONFIG = "special_tokens_map.json"


def read_json(path: Path) -> Json:
    """The object in a JSON file; empty where there is no file.

    Raises:
        ValueError: the file cannot be read, is not JSON, or holds something else than an object.
    """
    value: object = folder_files.read_json(path, object)
    if value is None and not path.exists():
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{str(path)!r} must hold a JSON object, not {_JSON_NAMES[type(value)]}")
    return cast("Json", value)


def named_tokens(config: Json, older: Json) -> dict[str, str]:
    """Every ``..._token`` of the config files. The older file counts where the newer one does not describe tokens."""
    extra = config.get("extra_special_tokens")
    found: dict[str, str] = {}
    for source in (
        config,
        {} if "added_tokens_decoder" in config else older,
        cast("Json", extra) if isinstance(extra, dict) else {},
    ):
        for name, token in source.items():
            content = _content(token)
            if name.endswith("_token") and content:
                found[name] = content
    return found


def described_tokens(config: Json) -> list[tuple[str, dict[str, bool]]]:
    """The text and the flags of each entry of ``added_tokens_decoder``, in the order of the ids.

    Raises:
        ValueError: an entry is not of the form {"id": {"content": text, ...}}.
    """
    described = cast("dict[str, Json]", config.get("added_tokens_decoder") or {})
    form = f'added_tokens_decoder in {CONFIG} is not of the form {{"id": {{"content": text, ...}}}}'
    try:
        entries = [entry for _, entry in sorted(described.items(), key=lambda item: int(item[0]))]
        return [
            (str(entry["content"]), {name: value for name, value in entry.items() if isinstance(value, bool)})
            for entry in entries
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(form) from error


def special_tokens(config: Json, named: Mapping[str, str]) -> list[str]:
    """The texts of the special tokens, each once: the named ones and those of the lists."""
    found = list(named.values())
    for key in ("additional_special_tokens", "extra_special_tokens"):
        listed = config.get(key)
        if isinstance(listed, list):
            found += [content for token in cast("list[object]", listed) if (content := _content(token))]
    return list(dict.fromkeys(found))


def added_texts(folder: Path) -> list[str]:
    """The texts of all tokens that the config files in the folder add or describe, in the order of adding.

    Raises:
        ValueError: one of the files cannot be read.
    """
    config = read_json(folder / CONFIG)
    named = named_tokens(config, read_json(folder / OLDER_CONFIG))
    return list(dict.fromkeys([*(text for text, _ in described_tokens(config)), *special_tokens(config, named)]))


def _content(token: object) -> str | None:
    """The text of a token in a config file: a string, or an object with its flags."""
    if isinstance(token, Mapping):
        token = cast("Mapping[str, object]", token).get("content")
    return token if isinstance(token, str) else None
