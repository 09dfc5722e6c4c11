"""HTTP statuses and headers of errors. tests/engine/test_disconnects.py tests ``until_disconnect``."""

from __future__ import annotations

import inspect

import pytest

from aioengine import errors
from aioengine.http import headers_of, status_of

CLASSES = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)]


@pytest.mark.parametrize("error_type", CLASSES)
def test_every_error_has_a_status_that_fits_its_base(error_type: type[Exception]) -> None:
    status = status_of(error_type.__new__(error_type))
    assert status == vars(error_type).get("status_code", status)
    assert status in ({400} if issubclass(error_type, ValueError) else {500, 503})


def test_status_of_builtin_errors() -> None:
    assert (
        status_of(ValueError("x"))
        == status_of(TypeError("x"))
        == status_of(UnicodeDecodeError("utf-8", b"", 0, 1, "x"))
        == 400
    )
    assert status_of(OSError("x")) == status_of(KeyError("x")) == 500


def test_status_code_of_a_foreign_error_is_kept() -> None:
    class TeapotError(ValueError):
        status_code = 418

    assert status_of(TeapotError()) == 418


def test_retry_after_is_rounded_up_to_whole_seconds() -> None:
    assert headers_of(errors.EngineOverloadedError("full", retry_after=1.2)) == {"Retry-After": "2"}
    assert headers_of(errors.EngineDrainingError("draining")) == {}
    assert headers_of(ValueError("x")) == {}
