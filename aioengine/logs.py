"""Logs and warnings in the user's process. Exceptions of the program's handlers do not reach the engine."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings


def log(logger: logging.Logger, level: int, message: str, *arguments: object) -> None:
    """Log ``message % arguments``. An exception of a handler is printed to stderr, as ``logging`` does for its own.

    So are SystemExit and KeyboardInterrupt, which would end a task of the engine instead of the program.
    """
    try:
        logger.log(level, message, *arguments)
    except BaseException as error:
        cause = (type(error), error, error.__traceback__)
        record = logger.makeRecord(logger.name, level, __file__, 0, message, arguments, cause)
        with contextlib.suppress(Exception):  # stderr is closed, or an object of another kind
            logging.Handler().handleError(record)


def warn(logger: logging.Logger, message: str, *arguments: object) -> None:
    """Log a warning, as ``log`` does."""
    log(logger, logging.WARNING, message, *arguments)


def warn_caller(message: str, *, stacklevel: int) -> None:
    """Issue a ``UserWarning``. It is raised if the program turns warnings into errors, unlike errors of stderr."""
    try:
        warnings.warn(message, UserWarning, stacklevel=stacklevel + 1)
    except UserWarning:
        raise
    except Exception as error:
        log(logging.getLogger(__name__), logging.DEBUG, "a warning could not be shown: %s", error)


class StderrLogs(logging.Handler):
    """Prints records to stderr while the program has no log handler of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            with contextlib.suppress(Exception):  # stderr is closed, or an object of another kind
                sys.stderr.write(self.format(record) + "\n")
                sys.stderr.flush()


def show_logs(level: str) -> None:
    """Make the loggers ``aioengine.*`` show the records of an engine with ``log_level=level``.

    "debug" and "info" set the level of the loggers, unless the program has set it. In a program without a log handler,
    the records go to stderr, because Python itself prints only warnings and errors. Other levels change nothing.
    """
    if level not in ("debug", "info"):
        return
    logger = logging.getLogger("aioengine")
    if logger.level == logging.NOTSET:
        logger.setLevel(level.upper())
    if not logger.hasHandlers():
        handler = StderrLogs()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
