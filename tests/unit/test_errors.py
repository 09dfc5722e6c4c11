"""Every public error keeps its type, message and attributes through pickle, copy and process pools."""

from __future__ import annotations

import copy
import inspect
import multiprocessing
import pickle
import traceback
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.pool import Pool
from typing import TYPE_CHECKING

import pytest

from aioengine import errors
from aioengine.errors import EngineDeadError, EngineError, EngineOverloadedError, RequestError, describe

if TYPE_CHECKING:
    from collections.abc import Callable

# parameter name of a constructor -> value
VALUES: dict[str, object] = {
    "role": "scheduler",
    "pid": 11,
    "exit_code": -9,
    "log_lines": ("one line", "another"),
    "retry_after": 2.5,
    "stage": "forward",
    "cause": "no memory",
}
CLASSES = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)]


def make(error_type: type[Exception]) -> Exception:
    """Return an error with all attributes set."""
    parameters = inspect.signature(error_type.__init__).parameters.values()
    named = [parameter for parameter in parameters if parameter.name in VALUES]
    positional = [VALUES[parameter.name] for parameter in named if parameter.kind is not inspect.Parameter.KEYWORD_ONLY]
    keywords = {
        parameter.name: VALUES[parameter.name]
        for parameter in named
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    error = error_type(*(positional or ["the message"]), **keywords)
    error.add_note("a note")
    error.__cause__ = OSError(2, "no such file")
    return error


WAYS: dict[str, Callable[[Exception], Exception]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda error: pickle.loads(pickle.dumps(error)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("error_type", CLASSES)
def test_copied_errors_are_equal(error_type: type[Exception], way: str) -> None:
    error = make(error_type)
    copied = WAYS[way](error)
    assert type(copied) is error_type
    assert (str(copied), copied.args) == (str(error), error.args)
    assert vars(copied) == vars(error)
    assert vars(copied)["__notes__"] == ["a note"]
    assert type(copied.__cause__) is FileNotFoundError
    assert str(copied.__cause__) == str(error.__cause__)
    assert copied.__suppress_context__ is error.__suppress_context__


def test_properties_of_an_error_without_a_cause() -> None:
    copied = pickle.loads(pickle.dumps(EngineDeadError("detokenizer", pid=5, exit_code=-6)))
    assert (copied.role, copied.pid, copied.exit_code, copied.signal, copied.log_lines) == ("detokenizer", 5, -6, 6, ())
    assert copied.__cause__ is None
    assert not copied.__suppress_context__
    assert pickle.loads(pickle.dumps(EngineOverloadedError("full", retry_after=7.0))).retry_after == 7.0


class Unpicklable(Exception):
    """Its constructor has other arguments than it passes on, as in many libraries."""

    def __init__(self, url: str, status: int) -> None:
        super().__init__(f"{url}: {status}")


def test_a_cause_that_cannot_be_pickled_is_kept_as_text() -> None:
    error = EngineError("boom")
    error.__cause__ = RequestError("forward", "inner")
    error.__cause__.__cause__ = Unpicklable("a", 500)
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied.__cause__) is RequestError
    assert type(copied.__cause__.__cause__) is EngineError
    assert str(copied.__cause__.__cause__) == "Unpicklable: a: 500"
    assert copy.copy(error).__cause__ is error.__cause__
    assert type(copy.copy(error.__cause__).__cause__) is Unpicklable


def test_error_that_is_its_own_cause_can_be_copied() -> None:
    error = EngineError("boom")
    error.__cause__ = error
    for copied in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert copied.__cause__ is copied


def test_subclass_with_other_arguments_can_be_copied() -> None:
    copied = pickle.loads(pickle.dumps(Tagged("forward", "no memory", "tag")))
    assert (type(copied), copied.tag, copied.stage, str(copied)) == (
        Tagged, "tag", "forward", "the request failed in stage 'forward': no memory"
    )  # fmt: skip


def test_error_that_contains_itself_in_a_list_can_be_copied() -> None:
    error = EngineError("boom")
    for _ in range(50):
        inner, error = error, EngineError("boom")
        error.others = [inner, error]  # type: ignore[attr-defined]  # pyright: ignore
    for copied in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        inner, itself = vars(copied)["others"]
        assert itself is copied
        assert type(vars(inner)["others"][0]) is EngineError


class Tagged(RequestError):
    def __init__(self, stage: str, cause: str, tag: str) -> None:
        super().__init__(stage, cause)
        self.tag = tag


def fail(error_type: type[Exception]) -> None:
    raise make(error_type)


def check_raised(error_type: type[Exception], raised: Exception) -> None:
    assert type(raised) is error_type
    assert str(raised) == str(make(error_type))
    assert vars(raised) == vars(make(error_type))
    assert "no such file" in "".join(traceback.format_exception(raised))


@pytest.mark.process
def test_errors_pass_through_process_pools() -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as executor, Pool(1, context=context) as pool:
        for error_type in CLASSES:
            with pytest.raises(error_type) as from_executor:
                executor.submit(fail, error_type).result(30)
            check_raised(error_type, from_executor.value)
            with pytest.raises(error_type) as from_pool:
                pool.apply_async(fail, (error_type,)).get(30)
            check_raised(error_type, from_pool.value)


def test_a_description_can_be_sent_to_other_processes() -> None:
    described = describe(ValueError("\ud800" * 1_000_000))
    assert described.encode().startswith(b"ValueError: \\ud800\\ud800")
    assert len(described) < 30_000
