"""Tests with processes: their folders have short paths."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A Ray cluster with one node on this machine."""
    from tests.processes.ray_kit import running_cluster

    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in which the paths of an engine's sockets fit into the system's 107 bytes, unlike in pytest's."""
    with TemporaryDirectory(prefix="aioengine-test-") as folder:
        yield Path(folder)
