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
        ├── RequestError              one request failed; ``stage`` tells where, others go on
        └── WrongLoopError            an AsyncEngine was used from another event loop

What a caller can get wrong is a ``ValueError`` or ``TypeError``; everything else is a ``RuntimeError``.

All of them can be pickled and copied, with their attributes, notes and causes.
"""

from __future__ import annotations

from typing import Any


def _reduce(self: object) -> tuple[Any, ...]:
    """How an error is pickled.

    Python would call the class with ``args``, which hold the message and not the arguments of the constructor.
    """
    assert isinstance(self, Exception)
    return _rebuild, (type(self), self.args), _state(self, _portable(self.__cause__))


def _copy(error: Exception) -> Exception:
    copied = _rebuild(type(error), error.args)
    copied.__setstate__(_state(error, error.__cause__))
    return copied


def _rebuild(error_type: type[Exception], args: tuple[object, ...]) -> Exception:
    return error_type.__new__(error_type, *args)


def _state(error: Exception, cause: BaseException | None) -> dict[str, Any]:
    is_suppressed = error.__suppress_context__
    return {**vars(error), "__cause__": cause, "__suppress_context__": is_suppressed}  # the latter is set by the former


def _portable(cause: BaseException | None) -> BaseException | None:
    """``cause``, or its text where it cannot be pickled: an answer that cannot be read breaks a whole process pool."""
    if cause is None or isinstance(cause, _OWN):
        return cause
    import pickle  # imported already wherever an error is pickled

    try:
        pickle.loads(pickle.dumps(cause))
    except Exception as error:
        stand_in = EngineError(describe(cause))
        stand_in.add_note(f"The exception itself cannot be pickled: {describe(error)}")
        return stand_in
    return cause


def describe(error: BaseException) -> str:
    """The type and the message of an error of any class, whose message may raise an error itself."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException as nested:
        return f"{type(error).__name__} (its message raised {type(nested).__name__})"


class RequestTooLargeError(ValueError):
    """The prompt, or the prompt with its explicit ``max_new_tokens``, does not fit the context or the KV pool."""

    __reduce__ = _reduce
    __copy__ = _copy


class UnknownParameterError(TypeError, ValueError):
    """A sampling parameter that does not exist; the message names it and the nearest that does."""

    __reduce__ = _reduce
    __copy__ = _copy


class UnsupportedSchemaError(ValueError):
    """An output constraint that this engine could not enforce in full, refused instead of weakened."""

    __reduce__ = _reduce
    __copy__ = _copy


class EngineError(RuntimeError):
    """Root of everything that is not the caller's mistake."""

    __reduce__ = _reduce
    __copy__ = _copy


class EngineStartupError(EngineError):
    """The engine could not start; the message holds the child's own error."""


class EngineDeadError(EngineError):
    """A process of the engine died, and was replaced as often as it may be; no request can be answered any more.

    ``exit_code`` is minus the number of the signal that killed it, and None where the system did not keep it: in a
    program that ignores SIGCHLD, or waits for its children by itself. ``reason`` says what happened where no process
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

    status_code = 503

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        self.retry_after = retry_after
        super().__init__(message)


class EngineDrainingError(EngineError):
    """The engine finishes what it has and takes nothing new."""


class EngineClosedError(EngineError):
    """The engine was shut down, was not started, or runs in the process of which this one is a fork.

    An ``AsyncEngine`` can be started again; an ``Engine`` that was shut down stays closed.
    """


class RequestError(EngineError):
    """One request failed; the engine and all other requests go on.

    ``stage`` is the part of the engine that failed it (``tokenize``, ``schedule``, ``forward``, ``sample``,
    ``detokenize``; ``crash``: it killed a process of the engine, again and again, or it is a control call, which is not
    tried again, and was on its way when one was lost), ``cause`` what happened there.
    """

    def __init__(self, stage: str, cause: str) -> None:
        self.stage = stage
        self.cause = cause
        super().__init__(f"the request failed in stage {stage!r}: {cause}")


class WrongLoopError(EngineError):
    """An AsyncEngine belongs to the event loop on which it was started."""


def describe_exit(code: int | None) -> str:
    """What an exit code says, as the end of a sentence."""
    if code is None:
        return "ended with an unknown exit code (this program ignores SIGCHLD or waits for its children by itself)"
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


_OWN = (RequestTooLargeError, UnknownParameterError, UnsupportedSchemaError, EngineError)
