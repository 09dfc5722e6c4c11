"""Every error that aioengine raises.

    ValueError
    ├── RequestTooLargeError          the prompt (with its output) can never fit
    ├── UnknownParameterError         (also a TypeError) a sampling key that does not exist
    └── UnsupportedSchemaError        an output constraint that could not be enforced in full
    RuntimeError
    └── EngineError                   not the caller's mistake
        ├── EngineStartupError        a process could not start; carries the child's own message
        ├── EngineDeadError           a process died: role, pid, exit code or signal, last log lines
        ├── EngineStalledError        a process lives but makes no progress
        ├── EngineOverloadedError     the queue is full; ``retry_after`` seconds
        ├── EngineDrainingError       drain() was called, no new requests are taken
        ├── EngineClosedError         shutdown() was called, or the engine was never started
        ├── RequestError              one request failed, in ``stage``; others continue
        └── WrongLoopError            an AsyncEngine was used from another event loop

Mistakes of the caller are ``ValueError`` or ``TypeError``; all others are ``RuntimeError``. Each class has the HTTP
status for a response as ``status_code``: 400 for mistakes of the caller, 500 for a failed request and for a mistake of
the server's code, 503 where the engine cannot answer now.

All of them can be pickled and copied, with their attributes, notes and causes.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from typing import Any, Final

MAX_DESCRIBED_CHARACTERS: Final = 4096
"""Of ``describe``."""

_is_trial = ContextVar("_is_trial", default=False)
"""Set while a value is pickled to find out whether it can be: nested trials would take exponential time."""


def _reduce(self: object) -> tuple[Any, ...]:
    """How an error is pickled.

    Python would call the class with ``args``, which hold the message and not the arguments of the constructor.
    """
    assert isinstance(self, Exception)
    if _is_trial.get():
        return _rebuild, (type(self), self.args), _state(self, self.__cause__)
    known = _importable(type(self))
    notes = [] if known is type(self) else [f"It was of the class {type(self).__qualname__}, which cannot be imported."]
    args = tuple(_portable(value, "An argument", notes) for value in self.args)
    state = {name: _portable(value, name, notes) for name, value in _state(self, self.__cause__).items()}
    if notes:
        state["__notes__"] = [*getattr(self, "__notes__", ()), *notes]
    return _rebuild, (known, args), state


def _copy(error: Exception) -> Exception:
    copied = _rebuild(type(error), error.args)
    copied.__setstate__(_state(error, error.__cause__))
    return copied


def _deepcopy(error: Exception, memo: dict[int, object]) -> Exception:
    """A copy that shares with ``error`` whatever cannot be copied."""
    from copy import deepcopy  # imported already where this is called

    notes: list[str] = []

    def copy_of(value: object) -> object:
        try:
            return deepcopy(value, memo)
        except Exception as nested:
            notes.append(f"It shares a {type(value).__name__}, which cannot be copied: {describe(nested)}")
            return value

    copied = memo[id(error)] = _rebuild(type(error), error.args)
    copied.args = tuple(copy_of(value) for value in error.args)
    copied.__setstate__({name: copy_of(value) for name, value in _state(error, error.__cause__).items()})
    for note in notes:
        copied.add_note(note)
    return copied


def _importable(error_type: type[Exception]) -> type[Exception]:
    """The class, or where it was made in a function, the nearest of its bases that another process can import."""
    return next(base for base in error_type.__mro__ if issubclass(base, _OWN) and _can_be_found(base))


def _can_be_found(error_type: type) -> bool:
    found: object = sys.modules.get(error_type.__module__)
    for name in error_type.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is error_type


def _rebuild(error_type: type[Exception], args: tuple[object, ...]) -> Exception:
    return error_type.__new__(error_type, *args)


def _state(error: Exception, cause: BaseException | None) -> dict[str, Any]:
    is_suppressed = error.__suppress_context__
    return {**vars(error), "__cause__": cause, "__suppress_context__": is_suppressed}  # the latter is set by the former


def _portable(value: object, name: str, notes: list[str]) -> object:
    """``value``, or its text where it cannot be pickled: an answer that cannot be read breaks a whole process pool."""
    if value is None or type(value) in (str, int, float, bool) or isinstance(value, _OWN):
        return value
    import pickle  # imported already wherever an error is pickled

    token = _is_trial.set(True)
    try:
        pickle.loads(pickle.dumps(value))
    except Exception as error:
        if not isinstance(value, BaseException):
            notes.append(f"{name} cannot be pickled: {describe(error)}")
            return _shown(value)
        stand_in = EngineError(describe(value))
        stand_in.add_note(f"The exception itself cannot be pickled: {describe(error)}")
        return stand_in
    finally:
        _is_trial.reset(token)
    return value


def _shown(value: object) -> str:
    try:
        return repr(value)
    except Exception as error:
        return f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"


def describe(error: BaseException) -> str:
    """The type and the message of an error of any class, whose message may raise an error itself.

    It can be sent to other processes: it is not long, with escapes for what UTF-8 does not encode.
    """
    try:
        described = f"{type(error).__name__}: {error}"
    except BaseException as nested:
        described = f"{type(error).__name__} (its message raised {type(nested).__name__})"
    if len(described) > MAX_DESCRIBED_CHARACTERS:
        described = f"{described[:MAX_DESCRIBED_CHARACTERS]}... ({len(described)} characters)"
    return described.encode(errors="backslashreplace").decode()


class RequestTooLargeError(ValueError):
    """The prompt, or the prompt with its explicit ``max_new_tokens``, does not fit the context or the KV pool."""

    status_code = 400

    __reduce__ = _reduce
    __copy__ = _copy
    __deepcopy__ = _deepcopy


class UnknownParameterError(TypeError, ValueError):
    """A sampling parameter that does not exist; the message names it and the nearest that does."""

    status_code = 400

    __reduce__ = _reduce
    __copy__ = _copy
    __deepcopy__ = _deepcopy


class UnsupportedSchemaError(ValueError):
    """An output constraint that this engine could not enforce in full, refused instead of weakened.

    ``pointer``: the JSON pointer to the place in the schema; empty for its root, for other constraints, and if the
    schema as a whole cannot be compiled. ``keyword``: the keyword of JSON Schema that cannot be enforced there, or the
    name of the sampling parameter.
    """

    status_code = 400

    def __init__(self, message: str, *, pointer: str = "", keyword: str = "") -> None:
        self.pointer = pointer
        self.keyword = keyword
        super().__init__(message)

    __reduce__ = _reduce
    __copy__ = _copy
    __deepcopy__ = _deepcopy


class EngineError(RuntimeError):
    """Root of everything that is not the caller's mistake."""

    status_code = 503

    __reduce__ = _reduce
    __copy__ = _copy
    __deepcopy__ = _deepcopy


class EngineStartupError(EngineError):
    """The engine could not start; the message holds the child's own error, a note the traceback of it."""


class EngineDeadError(EngineError):
    """A process of the engine died and has no replacements left; no request can be answered any more.

    ``exit_code`` is minus the number of the signal that killed it, and None where the system did not keep it: in a
    program that ignores SIGCHLD, or waits for its children by itself. ``reason``: where no process
    died: a task of the engine in the user's process was cancelled or failed (``role`` is "frontend" then).
    """

    def __init__(
        self,
        role: str,
        *,
        pid: int | None = None,
        exit_code: int | None = None,
        log_lines: tuple[str, ...] = (),
        reason: str = "",
    ) -> None:
        self.role = role
        self.pid = pid
        self.exit_code = exit_code
        self.log_lines = log_lines
        self.reason = reason
        super().__init__(self._describe())

    @property
    def signal(self) -> int | None:
        """The signal that killed the process, or None where it exited by itself or that is unknown."""
        return -self.exit_code if self.exit_code is not None and self.exit_code < 0 else None

    def _describe(self) -> str:
        reason = self.reason or f"the {self.role} process (pid {self.pid}) {describe_exit(self.exit_code)}"
        text = f"{reason}; shut the engine down and start a new one"
        return "\n".join([text, *(f"  {self.role}: {line}" for line in self.log_lines)])


class EngineStalledError(EngineError):
    """A process of the engine lives but has made no progress for longer than ``stall_timeout``."""


class EngineOverloadedError(EngineError):
    """The queue is full; try again after ``retry_after`` seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        self.retry_after = retry_after
        super().__init__(message)


class EngineDrainingError(EngineError):
    """The engine finishes its requests and accepts no new ones."""


class EngineClosedError(EngineError):
    """The engine was shut down, was not started, or runs in the process of which this one is a fork.

    An ``AsyncEngine`` can be started again; an ``Engine`` that was shut down stays closed.
    """


class RequestError(EngineError):
    """One request failed; the engine and all other requests continue.

    ``stage`` is the part of the engine that failed it (``tokenize``, ``image``: an image of it could not be prepared;
    ``submit``; ``schedule``: also an ``encode``, ``score`` or ``beam_search`` that was aborted; ``forward``,
    ``sample``, ``detokenize``, ``deliver``, ``engine``; ``adapter``: its LoRA adapter could not be read; ``control``:
    a control call failed in the runner; ``crash``: it killed a process of the engine, again and again, or it is a
    control call, which is not repeated, and was in progress when one was lost);
    ``cause``: the error there.
    """

    status_code = 500

    def __init__(self, stage: str, cause: str) -> None:
        self.stage = stage
        self.cause = cause
        super().__init__(f"the request failed in stage {stage!r}: {cause}")


class WrongLoopError(EngineError):
    """An AsyncEngine belongs to the event loop on which it was started."""

    status_code = 500


def describe_exit(code: int | None) -> str:
    """An exit code as the end of a sentence."""
    if code is None:
        return "ended with an unknown exit code (this program ignores SIGCHLD or waits for its children by itself)"
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


_OWN = (RequestTooLargeError, UnknownParameterError, UnsupportedSchemaError, EngineError)
