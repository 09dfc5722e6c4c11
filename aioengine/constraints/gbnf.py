"""Grammars in GBNF: escapes that the library reads correctly, and the names of its rules."""

from __future__ import annotations

import re
from typing import Final

_LONG_ESCAPES: Final = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def with_short_escapes(text: str) -> str:
    """Replace long escapes in GBNF, because the library drops the zeros of ``\\u00e9``. Other text stays as it is."""
    return _LONG_ESCAPES.sub(_short_escape, text) if "::=" in text else text


def _short_escape(escape: re.Match[str]) -> str:
    digits = escape[1] or escape[2]
    code = int(digits or "0", 16)
    if digits and code < 0x80:
        return f"\\x{code:02x}"
    return chr(code) if 0x80 <= code < 0xD800 or 0xE000 <= code < 0x110000 else escape[0]


def lark_names(text: str) -> dict[str, str]:
    """Return the names of the rules in GBNF, by the names that the library gives them in Lark's syntax."""
    names = {
        re.sub("([a-z])([A-Z])", r"\1_\2", name.replace("-", "_")).lower(): name
        for name in re.findall(r"(?<![\w-])([\w-]++)\s*+::=", text)
    }
    return {**names, "start": names.get("root", "start")}
