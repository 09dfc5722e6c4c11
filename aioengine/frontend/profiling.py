"""``start_profile`` and ``stop_profile``: checked here, done by the scheduler process."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypedDict

from aioengine import checks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioengine.frontend.frontend import Frontend

ACTIVITIES: Final = ("CPU", "GPU", "MEM")
WRITE_TIMEOUT_S: Final = 600.0
"""A trace of many steps is long."""


class ProfileOptions(TypedDict, total=False):
    """What ``start_profile`` takes beside the folder.

    num_steps: end by itself after so many steps (``stop_profile`` then gives the file). activities: some of "CPU",
    "GPU" (left out where there is none) and "MEM" (allocations); the first two by default. with_stack: Python's stack
    of every operation. record_shapes: the shapes of its tensors. profile_prefix: begins the file's name.
    """

    num_steps: int | None
    activities: Sequence[str] | None
    with_stack: bool | None
    record_shapes: bool | None
    profile_prefix: str | None


async def start(frontend: Frontend, output_dir: str | os.PathLike[str] | None, options: ProfileOptions) -> None:
    """Have the scheduler process begin a profile.

    Raises:
        TypeError, ValueError: an argument is wrong.
        RuntimeError: one is being made already, or the folder cannot be written to.
    """
    unknown = options.keys() - ProfileOptions.__annotations__.keys()
    if unknown:
        name, known = min(unknown), ["output_dir", *ProfileOptions.__annotations__]
        raise TypeError(f"unknown argument {name!r}{checks.did_you_mean(name, known)}; there are {', '.join(known)}")
    num_steps = options.get("num_steps")
    reply = await frontend.controls.ask(
        "start_profile",
        {
            "folder": _folder(output_dir),
            "prefix": _prefix(options.get("profile_prefix")),
            "num_steps": None if num_steps is None else checks.whole("num_steps", num_steps, 1),
            "activities": ",".join(_activities(options.get("activities"))),
            "with_stack": checks.switch("with_stack", options.get("with_stack") or False),
            "record_shapes": checks.switch("record_shapes", options.get("record_shapes") or False),
        },
    )
    if not reply.success:
        raise RuntimeError(reply.message)


async def stop(frontend: Frontend) -> str:
    """Have the scheduler process write its profile; gives the path of the file.

    Raises:
        RuntimeError: none was started, or the file cannot be written.
    """
    reply = await frontend.controls.ask("stop_profile", timeout_s=WRITE_TIMEOUT_S)
    if not reply.success:
        raise RuntimeError(reply.message)
    return reply.message


def _folder(output_dir: str | os.PathLike[str] | None) -> str:
    """As this process understands it: the other one may work in another folder."""
    if not isinstance(output_dir, str | os.PathLike | None):
        raise checks.wrong_type("output_dir", "a path or None", output_dir)
    return checks.text("output_dir", str(Path(output_dir or tempfile.gettempdir()).absolute()))


def _prefix(value: object) -> str:
    prefix = "" if value is None else checks.text("profile_prefix", value, max_bytes=100)
    if "/" in prefix:
        raise checks.wrong_value("profile_prefix", "the beginning of a file name, without '/'", value)
    return f"{prefix}-" if prefix else ""


def _activities(given: Sequence[str] | None) -> list[str]:
    if given is None:
        return ["CPU", "GPU"]
    kinds = [str(kind).upper() for kind in ([given] if isinstance(given, str) else given)]
    if not kinds or not set(kinds) <= set(ACTIVITIES):
        raise checks.wrong_value("activities", f"some of {', '.join(ACTIVITIES)}", given)
    return kinds
