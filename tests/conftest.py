"""What holds for all tests.

Hypothesis draws the same examples in every run, and takes the time that it takes: a test fails because of what it
checks or not at all. ``--hypothesis-profile=long`` looks further: other examples in every run, and many more.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "quick",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=30,
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "long", settings.get_profile("quick"), derandomize=False, max_examples=1000, stateful_step_count=60
)
settings.load_profile("quick")

# As in the processes of an engine, read when torch is imported: threads that spin where they wait for each other take
# most of the time where the cores have other work.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# The processes of the engines read compiled modules, which takes half a second less than to compile them at each start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Ten thousand tests are many objects, none of which is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def earlier_objects_are_not_collected() -> None:
    """Garbage collections look at the objects of this module's tests: torch and transformers are a million others."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def interrupts_arrive() -> Iterator[None]:
    """Shells start programs in the background with Ctrl-C ignored, children inherit that; tests do interrupt."""
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
