"""Every error that aioengine raises.

    ValueError
    ├── RequestTooLargeError          the prompt (with its output) can never fit
    ├── UnknownParameterError         (also a TypeError) an unknown sampling parameter
    └── UnsupportedSchemaError        an output constraint that cannot be enforced completely
    RuntimeError
    └── EngineError                   not the caller's mistake
        ├── EngineStartupError        a process could not start; has the message of the child process
        ├── EngineDeadError           a process died: role, pid, exit code or signal, last log lines
        ├── EngineStalledError        a process makes no progress
        ├── EngineOverloadedError     the queue is full; ``retry_after`` seconds
        ├── EngineDrainingError       drain() was called; new requests are refused
        ├── EngineClosedError         shutdown() was called, or the engine was never started
        ├── RequestError              one request failed, in ``stage``; others continue
        └── WrongLoopError            an AsyncEngine was used from another event loop

Mistakes of the caller are ``ValueError`` or ``TypeError``; all others are ``RuntimeError``. ``status_code`` of each
class is the HTTP status for a response: 400 for mistakes of the caller, 500 for a failed request and for a mistake in
the server's code, 503 if the engine cannot answer now.

All of them can be pickled and copied, with their attributes, notes and causes.
"""

from __future__ import annotations

import pickle
from typing import Any, Final

MAX_DESCRIBED_CHARACTERS: Final = 4096
"""Longer descriptions of errors are cut (``describe``)."""


def _reduce(self: object) -> tuple[Any, ...]:
    """Pickle an error with its attributes and its cause; a cause that cannot be pickled becomes its text.

    By default, unpickling calls the class with ``args``. They hold the message, not the arguments of the constructor.
    """
    assert isinstance(self, Exception)
    state = _state(self)
    cause = self.__cause__
    if cause is not None and not isinstance(cause, _OWN):
        try:
            pickle.loads(pickle.dumps(cause))
        except Exception as error:
            state["__cause__"] = EngineError(describe(cause))
            state["__cause__"].add_note(f"The exception itself cannot be pickled: {describe(error)}")
    return _rebuild, (type(self), self.args), state


def _copy(error: Exception) -> Exception:
    copied = _rebuild(type(error), error.args)
    copied.__setstate__(_state(error))
    return copied


def _rebuild(error_type: type[Exception], args: tuple[object, ...]) -> Exception:
    return error_type.__new__(error_type, *args)


def _state(error: Exception) -> dict[str, Any]:
    # Setting __cause__ sets __suppress_context__, so the order matters.
    return {**vars(error), "__cause__": error.__cause__, "__suppress_context__": error.__suppress_context__}


def describe(error: BaseException) -> str:
    """Return the type and the message of any exception, also if its ``__str__`` raises.

    The text can be sent to other processes: its length is limited, and lone surrogates are escaped.
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


class UnknownParameterError(TypeError, ValueError):
    """An unknown sampling parameter. The message names it and the most similar known one."""

    status_code = 400

    __reduce__ = _reduce
    __copy__ = _copy


class UnsupportedSchemaError(ValueError):
    """An output constraint that the engine cannot enforce completely. It is refused instead of weakened.

    ``pointer``: the JSON pointer to the place in the schema; empty for the root, for other constraints, and if the
    whole schema cannot be compiled. ``keyword``: the JSON Schema keyword that cannot be enforced there, or the name of
    the sampling parameter.
    """

    status_code = 400

    def __init__(self, message: str, *, pointer: str = "", keyword: str = "") -> None:
        self.pointer = pointer
        self.keyword = keyword
        super().__init__(message)

    __reduce__ = _reduce
    __copy__ = _copy


class EngineError(RuntimeError):
    """Base class of all errors that are not the caller's mistake."""

    status_code = 503

    __reduce__ = _reduce
    __copy__ = _copy


class EngineStartupError(EngineError):
    """The engine could not start. The message has the error of the child process, and a note has its traceback."""


class EngineDeadError(EngineError):
    """A process of the engine died and will not be replaced. The engine answers no more requests.

    ``exit_code``: negative if a signal killed the process (-9 for SIGKILL); None if unknown, because the program
    ignores SIGCHLD or waits for its children itself. ``reason``: set if no process died but a task of the engine in the
    user's process was cancelled or failed (``role`` is "frontend").
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
        cause = reason or f"the {role} process (pid {pid}) {describe_exit(exit_code)}"
        text = f"{cause}; shut the engine down and start a new one"
        super().__init__("\n".join([text, *(f"  {role}: {line}" for line in log_lines)]))

    @property
    def signal(self) -> int | None:
        """The signal that killed the process; None if it exited by itself or the signal is unknown."""
        return -self.exit_code if self.exit_code is not None and self.exit_code < 0 else None


class EngineStalledError(EngineError):
    """A process of the engine has made no progress for longer than ``stall_timeout``."""


class EngineOverloadedError(EngineError):
    """The queue is full; try again after ``retry_after`` seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        self.retry_after = retry_after
        super().__init__(message)


class EngineDrainingError(EngineError):
    """The engine finishes its requests and accepts no new ones."""


class EngineClosedError(EngineError):
    """The engine was shut down, was not started, or was started by the parent of this forked process.

    An ``AsyncEngine`` can be started again; an ``Engine`` that was shut down stays closed.
    """


class RequestError(EngineError):
    """One request failed; the engine and all other requests continue.

    ``cause`` is the error, and ``stage`` the part of the engine where it happened: ``tokenize``; ``image``: an image
    could not be prepared; ``submit``; ``schedule``, also for an aborted ``encode``, ``score`` or ``beam_search``;
    ``forward``; ``sample``; ``no_token``: the grammar and the token lists of the request allow no token
    (``status_code`` is 400); ``detokenize``; ``stop_regex``: a pattern of the caller was too slow (``status_code`` is
    400); ``deliver``; ``engine``; ``adapter``: the LoRA adapter could not be read; ``control``: a control call failed
    in the runner; ``crash``: the request killed a process of the engine repeatedly, or a process was lost during a
    control call (control calls are not repeated).
    """

    status_code = 500

    def __init__(self, stage: str, cause: str) -> None:
        self.stage = stage
        self.cause = cause
        if stage in ("stop_regex", "no_token"):
            self.status_code = 400
        super().__init__(f"the request failed in stage {stage!r}: {cause}")


class WrongLoopError(EngineError):
    """An AsyncEngine belongs to the event loop on which it was started."""

    status_code = 500


def describe_exit(code: int | None) -> str:
    """Describe an exit code as the end of a sentence."""
    if code is None:
        return "ended with an unknown exit code (this program ignores SIGCHLD or waits for its children by itself)"
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


_OWN = (RequestTooLargeError, UnknownParameterError, UnsupportedSchemaError, EngineError)
