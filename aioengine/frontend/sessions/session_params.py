"""``session_params``: the session that a prompt continues."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from aioengine.api import checks

MAX_ID_BYTES: Final = 512


class SessionParams(Struct, frozen=True):
    """``session_params`` of one prompt, checked.

    Attributes:
        id: the id of the session. rid: the request to continue; None: start a new history.
        offset: number of ids of its history to keep; 0: all.
    """

    id: str
    rid: str | None = None
    offset: int = 0
    replace: bool = False
    drop_previous_output: bool = False


def session_params(value: object) -> SessionParams | None:
    """Check the ``session_params`` of a prompt. None: it has no session.

    Raises:
        TypeError, ValueError: a field is wrong.
    """
    if value is None:
        return None
    given = checks.mapping("session_params", value, allowed="a dict with the id of a session")
    known = SessionParams.__struct_fields__
    for name in given:
        if name not in known:
            hint = checks.did_you_mean(str(name), known)
            raise TypeError(f"session_params has no {checks.shown(name)}{hint}; allowed: {', '.join(known)}")
    if given.get("id") is None:
        raise ValueError("session_params has no id; give the one that open_session returned")
    rid, offset = given.get("rid"), given.get("offset")
    return SessionParams(
        id=checks.text("the id of session_params", given["id"], max_bytes=MAX_ID_BYTES),
        rid=None if rid is None else checks.text("the rid of session_params", rid),
        offset=0 if offset is None else checks.whole("the offset of session_params", offset, 0),
        replace=_switch("replace", given),
        drop_previous_output=_switch("drop_previous_output", given),
    )


def _switch(name: str, given: Mapping[object, object]) -> bool:
    value = given.get(name)
    return False if value is None else checks.switch(f"{name} of session_params", value)
