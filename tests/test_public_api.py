"""Public names and their signatures equal public_api.txt, so that they do not change by accident.

After an intended change: ``python -m tests.test_public_api > tests/public_api.txt``.
"""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import msgspec
import pytest

import aioengine
from aioengine import http
from tests.kit.source import PACKAGE, ROOT

RECORD = Path(__file__).parent / "public_api.txt"
SAMPLE = Path(__file__).parent / "typing" / "sample.py"


def surface() -> list[str]:
    """Return a line for each public name and each public member of a public class."""
    helpers = [getattr(http, name) for name in http.__all__]
    return [
        *(line for name in sorted(aioengine.__all__) for line in described(name, vars_of(name))),
        *(line for helper in helpers for line in described(f"http.{helper.__name__}", helper)),
    ]


def vars_of(name: str) -> object:
    value: object = getattr(aioengine, name)
    return value


def described(name: str, value: object) -> Iterator[str]:
    if not inspect.isclass(value):
        yield f"{name}{signature(value)}" if callable(value) else f"{name}: {type(value).__name__}"
        return
    yield f"class {name}({', '.join(base.__name__ for base in value.__bases__)})"
    if issubclass(value, msgspec.Struct):
        yield from (f"{name}.{field.name}" for field in msgspec.structs.fields(value))
    elif value.__init__ is not object.__init__:
        yield f"{name}{signature(value.__init__)}"
    yield from (f"{name}.{member}" for member in sorted(members(value)))


def members(of: type) -> Iterator[str]:
    """Return public methods and properties that the package defines."""
    fields = set(of.__struct_fields__) if issubclass(of, msgspec.Struct) else set[str]()
    for attribute in dir(of):
        owner = next(base for base in of.__mro__ if attribute in vars(base))
        if attribute.startswith("_") or attribute in fields or not owner.__module__.startswith("aioengine"):
            continue
        member = inspect.getattr_static(of, attribute)
        if isinstance(member, property):
            yield f"{attribute}: property"
        elif callable(member) or isinstance(member, classmethod | staticmethod):
            yield f"{attribute}{signature(getattr(of, attribute))}"
        else:
            yield f"{attribute}: {type(member).__name__}"


def signature(of: object) -> str:
    """Return the parameters with their defaults and types, without self."""
    try:
        signature_of_object = inspect.signature(of)  # type: ignore[arg-type]
    except ValueError:
        return "(...)"
    parameters = [entry for name, entry in signature_of_object.parameters.items() if name != "self"]
    return str(signature_of_object.replace(parameters=parameters)).replace("'", "")


def undocumented() -> Iterator[str]:
    for name in aioengine.__all__:
        value = vars_of(name)
        if not inspect.isclass(value):
            if inspect.isfunction(value) and not value.__doc__:
                yield name
            continue
        if not value.__doc__:
            yield name
        for attribute in dir(value):
            member = inspect.getattr_static(value, attribute)
            owner = next(base for base in value.__mro__ if attribute in vars(base))
            is_ours = owner.__module__.startswith("aioengine") and not attribute.startswith("_")
            is_spoken = inspect.isfunction(member) or isinstance(member, property | classmethod | staticmethod)
            if is_ours and is_spoken and not inspect.getdoc(getattr(value, attribute)):
                yield f"{name}.{attribute}"


def is_error(value: object) -> TypeGuard[type[Exception]]:
    return inspect.isclass(value) and issubclass(value, Exception)


def test_public_names_and_signatures_equal_the_record() -> None:
    assert surface() == RECORD.read_text().splitlines()


@pytest.mark.parametrize(
    "name", ["generate", "chat", "encode", "rerank", "score", "beam_search", "drain", "stop_profile"]
)
def test_synchronous_methods_have_the_documentation_of_the_asynchronous_ones(name: str) -> None:
    ours = getattr(aioengine.Engine, name)
    theirs = getattr(aioengine.AsyncEngine, f"async_{name}", None) or getattr(aioengine.AsyncEngine, name)
    assert inspect.signature(ours).parameters == inspect.signature(theirs).parameters
    assert (ours.__name__, ours.__qualname__) == (name, f"Engine.{name}")
    assert (inspect.getdoc(ours) or "").endswith(inspect.getdoc(theirs) or "missing")
    assert not inspect.iscoroutinefunction(ours)


def test_everything_public_has_a_docstring() -> None:
    assert list(undocumented()) == []


def test_all_has_only_existing_names_and_each_once() -> None:
    assert len(set(aioengine.__all__)) == len(aioengine.__all__)
    assert all(hasattr(aioengine, name) for name in aioengine.__all__)


def test_every_error_has_a_documented_base_class() -> None:
    errors_in_all = [value for name in aioengine.__all__ if is_error(value := vars_of(name))]
    assert len(errors_in_all) >= 10
    assert all(issubclass(error, (ValueError, TypeError, RuntimeError)) for error in errors_in_all)


def test_every_error_class_is_public() -> None:
    names = {name for name, value in vars(aioengine.errors).items() if is_error(value)}
    assert names <= set(aioengine.__all__)


def test_the_package_is_marked_as_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


@pytest.mark.slow
@pytest.mark.timeout(650)
def test_a_sample_program_passes_mypy_in_strict_mode() -> None:
    if shutil.which("mypy", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("mypy is not installed (the dev extra has it)")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", str(SAMPLE)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    print("\n".join(surface()))
