"""Sessions: requests that continue earlier requests. The token ids of a session are kept in the user's process.

A session is a tree of turns. A turn is one request (one row of a call). Its prompt consists of its history (the ids of
its parent, which may be cut) and new ids. The first turns are children of an empty root:

    root ── "a": prompt, answer ── "b": + prompt, answer        generate(..., session_params={"id": ..., "rid": "a"})
                               └── "c": + prompt, answer

For the scheduler, a turn is a plain request with the ids of its whole history and the number of its session. The
scheduler pins the pages of answered requests. When the session is closed and no turn runs, the control call
"close_sessions" unpins them. Until then the session also keeps the files of its images. If a process is lost, the pages
are computed again from the ids, so no session is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

from msgspec import Struct, field, structs

from aioengine.api import checks
from aioengine.errors import EngineClosedError, EngineOverloadedError
from aioengine.frontend.calls.call import Call, CallRow
from aioengine.frontend.calls.overload import QueueLimits
from aioengine.frontend.calls.row_types import KeptRow
from aioengine.frontend.controls import Controls
from aioengine.frontend.engine_parts import EngineParts
from aioengine.frontend.intake.prompts import MediaIds
from aioengine.frontend.intake.requests import MAX_TIMEOUT_S
from aioengine.frontend.sessions.session_params import MAX_ID_BYTES, SessionParams
from aioengine.logs import log
from aioengine.protocol.messages import Abort, Media
from aioengine.supervision.tasks import post

logger = logging.getLogger(__name__)

MAX_SESSIONS: Final = 1 << 16
MAX_SESSION_TOKENS: Final = 1 << 25
"""Limit for the tokens of all sessions. A token takes four bytes."""

TOKENS_PER_TURN: Final = 128
"""Each turn counts this many tokens in addition to its own, about as much as the memory of its objects."""

CHECK_S: Final = 1.0
"""Seconds between checks for idle sessions."""


class Turn(Struct, eq=False):
    """One request of a session.

    Attributes:
        parent: the turn that it continues; None: it is the root.
        num_kept: number of ids that its prompt takes from its history. New ids follow.
        ids: its own ids: the new ids of its prompt, and after its end also its answer.
        num_prompt: number of ids of its whole prompt.
        media: the images of its whole prompt.
        row: its row from its start to the end of its call, with its output; None before and after.
        is_call_over: its call is over, and ``ids`` has its answer.
        num_counted: number of tokens for ``MAX_SESSION_TOKENS``.
        is_dropped: no other turn can continue it any more.
    """

    session: Session
    rid: str = ""
    parent: Turn | None = None
    num_kept: int = 0
    num_prompt: int = 0
    ids: array[int] = field(default_factory=partial(array, "I"))
    media: list[Media] = []
    num_counted: int = 0
    is_dropped: bool = False
    is_call_over: bool = False
    children: dict[Turn, None] = {}
    row: KeptRow | None = None

    @property
    def is_over(self) -> bool:
        """Whether it gets no more output. (Its call may still have other rows; see ``is_call_over``.)"""
        row = self.row
        return row is None or row.final_info is not None or row.call.is_left

    @property
    def has_failed(self) -> bool:
        """Whether a turn that is over has no answer that another turn can continue."""
        row = self.row
        if row is None:  # it was aborted before its start, or its call is over (failed turns are then dropped)
            return not self.is_call_over
        if row.final_info is None or row.error is not None:
            return True
        return self.session.is_streaming and row.final_info["finish_reason"] not in ("stop", "length")

    def history(self, num_ids: int) -> list[int]:
        """Return the first ``num_ids`` ids of its prompt and answer, from this turn and its ancestors."""
        parts: list[array[int]] = []
        turn: Turn | None = self
        while turn is not None and num_ids > 0:
            if num_ids > turn.num_kept:
                parts.append(turn._own_ids()[: num_ids - turn.num_kept])
                num_ids = turn.num_kept
            turn = turn.parent
        joined = array("I")
        for part in reversed(parts):
            joined += part
        return joined.tolist()

    def media_in(self, num_ids: int) -> list[Media]:
        """Return the images in its first ``num_ids`` ids. Raises ValueError if an image is cut."""
        media = [image for image in self.media if image.start < num_ids]
        if media and (end := media[-1].start + media[-1].num_tokens) > num_ids:
            raise ValueError(f"offset={num_ids} is inside the image at tokens {media[-1].start} to {end}")
        return media

    @property
    def num_ids(self) -> int:
        return self.num_kept + len(self._own_ids())

    def _own_ids(self) -> array[int]:
        return self.ids if self.row is None else self.ids + array("I", self.row.kept_ids)


class Session:
    """An open session.

    Attributes:
        number: identifies it in the scheduler.
        used_at: when its last turn ended; before the first end, when it was opened.
        turns: the turns that other turns can continue, by the id of their requests.
        current: the newest turn, until it has ended.
        last: the newest turn with an answer, which the next turn of a streaming session continues.
        num_open: number of running turns. num_tokens: sum of ``Turn.num_counted``. is_used: it had a turn.
        images: content of an image -> number of turns with this image.
    """

    def __init__(self, name: str, number: int, *, is_streaming: bool, timeout_s: float | None) -> None:
        self.id = name
        self.number = number
        self.is_streaming = is_streaming
        self.timeout_s = timeout_s
        self.used_at = time.monotonic()
        self.root = self.last = Turn(self)
        self.current: Turn | None = None
        self.turns: dict[str, Turn] = {}
        self.images = Counter[bytes]()
        self.num_open = 0
        self.num_tokens = 0
        self.is_used = False
        self.is_closed = False

    def parent_of(self, params: SessionParams) -> Turn:
        """Return the turn that a new turn continues.

        Raises:
            ValueError: there is no such turn, it still runs, or an option is not allowed.
        """
        about_history = {"offset": params.offset, "drop_previous_output": params.drop_previous_output}
        if self.is_streaming:
            for name, value in {**about_history, "replace": params.replace}.items():
                if value:
                    raise ValueError(f"session {self.id!r} was opened with streaming=True, which does not allow {name}")
            if self.current is not None and not self.current.is_over:
                raise ValueError(f"streaming session {self.id!r} already has an active request; wait for its end")
            if self.current is not None and not self.current.has_failed:
                self.last = self.current
            return self.last
        if params.rid is None:
            for name, value in about_history.items():
                if value:
                    raise ValueError(f"session_params has {name}={value} but no rid, whose history is to be cut")
            return self.root
        parent = self.turns.get(params.rid)
        if parent is None or (parent.is_over and parent.has_failed):
            rid = checks.shown(params.rid)
            raise ValueError(f"invalid request: session {self.id!r} has no request {rid}, or it failed")
        if not parent.is_over and not params.replace:
            text = f"session {self.id!r}: appending to a request that hasn't finished, {parent.rid!r}"
            raise ValueError(f"{text}; wait for its end, or replace it")
        return parent


class SessionOpening(Coroutine[Any, Any, str]):
    """Opens a session when it is awaited, and returns its id. ``async with`` closes the session after its block."""

    def __init__(self, opening: Coroutine[Any, Any, str], close: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        self._opening = opening
        self._close = close
        self._id = ""

    if not TYPE_CHECKING:  # type checkers report ``with`` themselves

        def __enter__(self) -> NoReturn:
            self._opening.close()
            raise TypeError("a session of an AsyncEngine needs `async with`")

        __exit__ = __enter__  # Python calls __enter__ only if __exit__ exists

    async def __aenter__(self) -> str:
        self._id = await self._opening
        return self._id

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(EngineClosedError):  # the shutdown closed it
            await self._close(self._id)

    def __await__(self) -> Generator[Any, Any, str]:
        return self._opening.__await__()

    def send(self, value: object) -> Any:
        return self._opening.send(value)

    def throw(self, *error: Any) -> Any:
        return self._opening.throw(*error)

    def close(self) -> None:
        self._opening.close()


class Sessions:
    """The open sessions and the running turns, protected by the engine's lock.

    ``begin``, ``attach`` and ``end`` run on the engine's loop, and their callers hold the lock. The other methods take
    it themselves.
    """

    def __init__(self, parts: EngineParts, controls: Controls, lock: threading.RLock, limits: QueueLimits) -> None:
        bos_token_id = None if parts.tokenizer is None else parts.tokenizer.bos_token_id
        self._lock = lock
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._bos = [] if bos_token_id is None else [bos_token_id]
        self._task = parts.settings.model.task
        self._images = parts.images
        self._send = parts.processes.send
        self._controls = controls
        self._by_id: dict[str, Session] = {}
        self._running: dict[Call, dict[int, Turn]] = {}
        self._num_opened = 0
        self._num_tokens = 0
        self._timer: asyncio.TimerHandle | None = None
        self._to_unpin: list[Session] = []  # closed sessions, until the next iteration of the loop

    def __len__(self) -> int:
        return len(self._by_id)

    # ------------------------------------------------------------ from any thread

    def open(self, capacity: object, session_id: object, streaming: object, timeout: object) -> str:
        """Open a session, and return its id.

        Raises:
            TypeError, ValueError: an argument is wrong, the id is in use, or the model does not generate.
            EngineOverloadedError: too many sessions are open.
            EngineError: the engine accepts no calls.
        """
        if self._task != "generate":
            raise ValueError(f"sessions are for models that generate, and the task of this model is '{self._task}'")
        checks.whole("capacity_of_str_len", capacity, 0)
        name = os.urandom(16).hex() if session_id is None else _checked_id(session_id)
        is_streaming = checks.switch("streaming", streaming)
        timeout_s = None if timeout is None else checks.number("timeout", timeout, 0, MAX_TIMEOUT_S, above=True)
        with self._lock:
            self._limits.check_refusal()
            if name in self._by_id:
                raise ValueError(f"session {checks.shown(name)} is open already; choose another session_id")
            if len(self._by_id) >= MAX_SESSIONS:
                raise EngineOverloadedError(f"{MAX_SESSIONS} sessions are open; close some, or set a timeout")
            self._num_opened += 1
            session = Session(name, self._num_opened, is_streaming=is_streaming, timeout_s=timeout_s)
            self._by_id[name] = session
        if timeout_s is not None:
            post(self._loop, self._watch)
        return name

    def close(self, session_id: object) -> None:
        """Close a session; its running turns continue. An unknown id is logged.

        Raises:
            TypeError, ValueError: ``session_id`` is not an id.
        """
        name = _checked_id(session_id)
        with self._lock:
            session = self._by_id.get(name)
            if session is not None:
                self._close(session)
        if session is None:
            log(logger, logging.INFO, "no session %s is open; it was not closed", checks.shown(name))

    def clear(self) -> None:
        """Forget all sessions, because the engine has ended."""
        with self._lock:
            self._by_id.clear()
            self._running.clear()
            self._num_tokens = 0
        if self._timer is not None:
            self._timer.cancel()

    # ------------------------------------------------------------ turns, on the loop

    def begin(self, params: SessionParams, ids: list[int], call: Call, check: Callable[[int], object]) -> list[int]:
        """Begin a turn with new ``ids`` for the next row of ``call``; return its whole prompt.

        Raises:
            ValueError: there is no such session, it does not allow this turn, or ``check`` refuses the length.
            EngineOverloadedError: the sessions have too many tokens, or their images too many bytes.
        """
        session = self._by_id.get(params.id)
        if session is None:
            raise ValueError(f"invalid request: session {checks.shown(params.id)} does not exist; open it first")
        parent = session.parent_of(params)
        num_kept = parent.num_prompt if params.drop_previous_output else parent.num_ids
        if params.offset:
            num_kept = min(num_kept, params.offset)
        num_cut = 1 if num_kept and ids[:1] == self._bos else 0  # a history begins with this token already
        media = parent.media_in(num_kept)
        if isinstance(ids, MediaIds):
            shift = num_kept - num_cut
            media += [structs.replace(image, start=image.start + shift) for image in ids.media]
        ids = ids[num_cut:]
        if not num_kept and not ids:
            raise ValueError(f"the prompt has no tokens, and no history in session {session.id!r}; give at least one")
        check(num_kept + len(ids))
        if self._num_tokens + len(ids) + TOKENS_PER_TURN > MAX_SESSION_TOKENS:
            raise EngineOverloadedError(
                f"all sessions have {self._num_tokens} tokens; the limit is {MAX_SESSION_TOKENS}"
            )
        if media:
            self._keep_images(session, media)
        if params.replace:
            self._replace(parent)
        num_prompt = num_kept + len(ids)
        index = call.num_started
        turn = Turn(session, call.row_rid(index), parent, num_kept, num_prompt, media=media)
        turn.ids.extend(ids)
        self._add(turn, parent)
        self._running.setdefault(call, {})[index] = turn
        all_ids = parent.history(num_kept) + ids
        return MediaIds(all_ids, media) if media else all_ids

    def attach(self, row: CallRow) -> int:
        """Connect a row to its turn. Return the number of its session; 0: the row has no session."""
        turn = self._running.get(row.call, {}).get(row.index)
        if turn is None:
            return 0
        turn.row = cast("KeptRow", row)
        return turn.session.number

    def end(self, call: Call) -> None:
        """End the turns of a call that is over."""
        for turn in self._running.pop(call, {}).values():
            self._end_turn(turn)

    def _keep_images(self, session: Session, media: list[Media]) -> None:
        """Keep the images of a new turn. Raises ValueError or EngineOverloadedError if there are too many."""
        assert self._images is not None
        limit = self._images.model.limits.max_images_per_prompt
        if len(media) > limit:
            raise ValueError(f"prompt and history have {len(media)} images; the limit is max_images_per_prompt={limit}")
        contents = [image.content for image in media]
        self._images.keep(set(contents) - session.images.keys())
        session.images.update(contents)

    def _release_images(self, turn: Turn) -> None:
        """Release the images of a turn that has ended and is dropped."""
        session, contents = turn.session, [image.content for image in turn.media]
        turn.media = []
        session.images -= Counter(contents)  # without images that no turn has
        if self._images is not None and contents:
            self._images.let_go({*contents} - session.images.keys())

    def _add(self, turn: Turn, parent: Turn) -> None:
        session = turn.session
        old = session.turns.get(turn.rid)
        if old is not None and old is not parent and not old.children and old.is_over:
            self._drop(old)
        parent.children[turn] = None
        session.turns[turn.rid] = session.current = turn
        session.num_open += 1
        session.is_used = True
        self._count(turn, len(turn.ids) + TOKENS_PER_TURN)

    def _end_turn(self, turn: Turn) -> None:
        session, row = turn.session, turn.row
        has_failed = turn.has_failed
        if row is not None:
            turn.ids.extend(row.kept_ids)
            turn.row = None
        turn.is_call_over = True
        session.num_open -= 1
        session.used_at = time.monotonic()
        is_newest = session.current is turn
        if is_newest:
            session.current = None
        if session.is_closed:
            self._unpin_later(session)
        elif has_failed and not turn.children:
            self._drop(turn)
        elif not turn.is_dropped:
            self._count(turn, len(turn.ids) + TOKENS_PER_TURN - turn.num_counted)
            if is_newest:
                session.last = turn
        if turn.is_dropped:
            self._release_images(turn)

    def _replace(self, parent: Turn) -> None:
        """Abort ``parent`` and all turns after it, and drop the latter. Unpin all pages of the session."""
        replaced, waiting = [parent], list(parent.children)
        while waiting:
            turn = waiting.pop()
            replaced.append(turn)
            waiting += turn.children
            self._drop(turn)
        uids = [turn.row.uid for turn in replaced if turn.row is not None and not turn.is_over]
        if uids:
            self._send([Abort(uids)])
        self._unpin([parent.session])  # before the new turn is submitted

    def _drop(self, turn: Turn) -> None:
        """Drop a turn: no other turn can continue it any more. It has no children, or they are dropped too."""
        if turn.is_dropped:
            return
        turn.is_dropped = True
        self._count(turn, -turn.num_counted)
        if turn.session.turns.get(turn.rid) is turn:
            del turn.session.turns[turn.rid]
        if turn.parent is not None:
            del turn.parent.children[turn]
        if turn.is_call_over:
            self._release_images(turn)

    def _count(self, turn: Turn, num_tokens: int) -> None:
        turn.num_counted += num_tokens
        turn.session.num_tokens += num_tokens
        self._num_tokens += num_tokens

    # ------------------------------------------------------------ the end of sessions

    def _close(self, session: Session) -> None:
        del self._by_id[session.id]
        session.is_closed = True
        self._num_tokens -= session.num_tokens
        for turn in (session.root, *session.turns.values()):
            turn.children.clear()  # breaks reference cycles
        session.turns.clear()
        session.last = session.root
        if session.is_used:
            self._unpin_later(session)

    def _unpin(self, sessions: list[Session]) -> None:
        self._controls.send("close_sessions", {"sessions": [str(session.number) for session in sessions]})

    def _unpin_later(self, session: Session) -> None:
        """Unpin the pages of a closed session if no turn runs. One message unpins many sessions."""
        if not session.num_open:
            self._to_unpin.append(session)
            if len(self._to_unpin) == 1:
                post(self._loop, self._unpin_now)

    def _unpin_now(self) -> None:
        with self._lock:
            sessions, self._to_unpin = self._to_unpin, []
        self._unpin(sessions)
        if self._images is not None:
            for session in sessions:
                self._images.let_go(session.images)
                session.images.clear()

    def _watch(self) -> None:
        """Close idle sessions periodically, while any session has a timeout. On the loop."""
        if self._timer is None:
            self._timer = self._loop.call_later(CHECK_S, self._close_idle)

    def _close_idle(self) -> None:
        self._timer = None
        now = time.monotonic()
        with self._lock:
            timed = [session for session in self._by_id.values() if session.timeout_s is not None]
            for session in timed:
                if not session.num_open and now - session.used_at >= cast("float", session.timeout_s):
                    self._close(session)
        if timed:
            self._watch()


def _checked_id(value: object) -> str:
    return checks.text("session_id", value, max_bytes=MAX_ID_BYTES, if_empty="leave it out for a random id")
