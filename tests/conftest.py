"""Settings and fixtures of all tests.

By default, Hypothesis draws the same examples in every run and has no time limit, so that results can be repeated.
With ``--hypothesis-profile=long`` it draws many more examples, which differ in every run.
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

# As in the processes of an engine. OpenMP reads it when torch is imported. Threads that spin while they wait would take
# most of the time of busy cores.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Engine processes start half a second faster if they can read compiled modules.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disable garbage collection: thousands of test objects are created, and none is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def freeze_existing_objects() -> None:
    """Exclude existing objects from garbage collection. torch and transformers have a million objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def restore_interrupts() -> Iterator[None]:
    """Restore Ctrl-C. Programs that a shell starts in the background ignore it, and so would their children."""
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
