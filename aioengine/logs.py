"""Logging from the user's process: a log handler of the program that raises does not reach the engine."""

from __future__ import annotations

import logging


def log(logger: logging.Logger, level: int, message: str, *arguments: object) -> None:
    """Log ``message % arguments``. What a handler raises is printed to stderr, as ``logging`` does for its own."""
    try:
        logger.log(level, message, *arguments)
    except Exception as error:
        cause = (type(error), error, error.__traceback__)
        record = logger.makeRecord(logger.name, level, __file__, 0, message, arguments, cause)
        logging.Handler().handleError(record)


def warn(logger: logging.Logger, message: str, *arguments: object) -> None:
    """Log a warning, as ``log`` does."""
    log(logger, logging.WARNING, message, *arguments)
