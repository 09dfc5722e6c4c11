"""Controls: control calls to the scheduler process (pause, flush the cache, profile). Each has one reply."""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypedDict

from aioengine.api import checks
from aioengine.errors import EngineError, EngineStalledError, RequestError
from aioengine.protocol.messages import Argument, Control, Reply

CONTROL_TIMEOUT_S: Final = 60.0
ACTIVITIES: Final = {"CPU": "CPU", "GPU": "GPU", "MEM": "MEM"}
WRITE_TIMEOUT_S: Final = 600.0
"""A trace of many steps is long."""

PauseMode = Literal["abort", "in_place", "retract"]


class Outcome(NamedTuple):
    """The result of a control call; true if it succeeded."""

    success: bool
    message: str

    def __bool__(self) -> bool:
        return self.success


class ProfileOptions(TypedDict, total=False):
    """Keyword arguments of ``start_profile``.

    num_steps: end after this many steps (``stop_profile`` then returns the file). activities: some of "CPU", "GPU"
    (ignored without a GPU) and "MEM" (allocations); default: CPU and GPU. with_stack: record the Python stack of every
    operation. record_shapes: record the shapes of tensors. profile_prefix: the start of the file name.
    """

    num_steps: int | None
    activities: Sequence[str] | None
    with_stack: bool | None
    record_shapes: bool | None
    profile_prefix: str | None


class Controls:
    """Sends control calls and waits for their replies. On the engine's loop.

    Attributes:
        is_paused: whether the scheduler was paused.
    """

    def __init__(self, send: Callable[[list[Control]], None], abort_all: Callable[[], None]) -> None:
        """``abort_all`` aborts every open call."""
        self._send = send
        self._abort_all = abort_all
        self.is_paused = False
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._num_asked = 0
        self._failure: EngineError | None = None

    async def ask(
        self, name: str, arguments: dict[str, Argument] | None = None, *, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> Reply:
        """Send a control call and wait for its reply.

        Raises:
            RequestError: the runner failed, or a process died before the reply and is being replaced.
            EngineStalledError: there was no reply in time.
            EngineError: the engine died, or was shut down, before the reply.
        """
        if self._failure is not None:
            raise copy(self._failure)
        self._num_asked += 1
        call_id = self._num_asked
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = answer
        try:
            self._send([Control(call_id, name, arguments or {})])
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise EngineStalledError(f"the scheduler did not answer {name!r} in {timeout_s:g} s") from None
        finally:
            del self._waiting[call_id]

    def send(self, name: str, arguments: Mapping[str, Argument] | None = None) -> None:
        """Send a control call without waiting for its reply."""
        self._num_asked += 1
        self._send([Control(self._num_asked, name, dict(arguments or {}))])

    def answer(self, reply: Reply) -> None:
        waiting = self._waiting.get(reply.call_id)
        if waiting is None or waiting.done():
            return
        if reply.stage:
            waiting.set_exception(RequestError(reply.stage, reply.message))
        else:
            waiting.set_result(reply)

    async def call(self, name: str) -> Outcome:
        """Send a control call without arguments, and return its outcome."""
        reply = await self.ask(name)
        return Outcome(reply.success, reply.message)

    async def pause(self, mode: PauseMode) -> Outcome:
        """Pause the scheduler. "abort" ends all its requests before, "retract" releases the pages of running ones."""
        checks.choice("mode", mode, dict.fromkeys(("abort", "in_place", "retract")))
        if mode == "abort":
            self._abort_all()
        try:
            reply = await self.ask("pause", {"retracts": True} if mode == "retract" else None)
        except RequestError:
            if not self.is_paused:
                self.unpause_later()  # other replicas may be paused
            raise
        self.is_paused |= reply.success
        return Outcome(reply.success, reply.message)

    async def unpause(self) -> Outcome:
        """Continue after a pause."""
        outcome = await self.call("continue")
        self.is_paused &= not outcome.success
        return outcome

    def unpause_later(self) -> None:
        """Continue after a pause, without waiting for the reply."""
        self.send("continue")
        self.is_paused = False

    async def freeze_gc(self) -> None:
        """Exclude all present objects from garbage collection, here and in the scheduler process."""
        gc.collect()
        gc.freeze()
        await self.call("freeze_gc")

    async def start_profile(self, output_dir: str | os.PathLike[str] | None, options: ProfileOptions) -> None:
        """Start a profile of the scheduler process.

        Raises:
            TypeError, ValueError: an argument is wrong.
            RuntimeError: a profile is running already, or the folder cannot be written to.
        """
        num_steps = options.get("num_steps")
        switches = {name: options.get(name) for name in ("with_stack", "record_shapes")}
        reply = await self.ask(
            "start_profile",
            {
                "folder": _folder(output_dir),
                "prefix": _prefix(options.get("profile_prefix")),
                "num_steps": None if num_steps is None else checks.whole("num_steps", num_steps, 1),
                "activities": ",".join(_activities(options.get("activities"))),
                **{name: value is not None and checks.switch(name, value) for name, value in switches.items()},
            },
        )
        if not reply.success:
            raise RuntimeError(reply.message)

    async def stop_profile(self) -> str:
        """End the profile and write it; return the path of the file.

        Raises:
            RuntimeError: no profile was started, or the file cannot be written.
        """
        reply = await self.ask("stop_profile", timeout_s=WRITE_TIMEOUT_S)
        if not reply.success:
            raise RuntimeError(reply.message)
        return reply.message

    def fail(self, error: EngineError) -> None:
        """Fail all waiting calls, because no reply will arrive."""
        self._failure = error
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(copy(error))


def _folder(output_dir: str | os.PathLike[str] | None) -> str:
    """Return an absolute path: the other process may have another working folder."""
    if not isinstance(output_dir, str | os.PathLike | None):
        raise checks.wrong_type("output_dir", "a path or None", output_dir)
    return checks.text("output_dir", str(Path(output_dir or tempfile.gettempdir()).absolute()))


def _prefix(value: object) -> str:
    prefix = "" if value is None else checks.text("profile_prefix", value)
    if "/" in prefix:
        raise checks.wrong_value("profile_prefix", "the beginning of a file name, without '/'", value)
    return f"{prefix}-" if prefix else ""


def _activities(value: Sequence[str] | None) -> list[str]:
    words = ("CPU", "GPU") if value is None else checks.sequence("activities", value, allowed="a list of strings")
    return [checks.choice("activities entries", word, ACTIVITIES) for word in words]
