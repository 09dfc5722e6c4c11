"""Tests with processes: their folders have short paths."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    from aioengine import AsyncEngine
    from tests.kit.weight_versions import Reference


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


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three versions of the weights of a model: version -> folder."""
    from tests.kit.weight_versions import save_version  # other tests do not need transformers

    folders = {name: tmp_path_factory.mktemp(name) for name in ("default", "v2", "v3")}
    for seed, folder in enumerate(folders.values()):
        save_version(folder, seed)
    return folders


@pytest.fixture(scope="session")
def reference(versions: dict[str, Path]) -> Reference:
    from tests.kit.weight_versions import Reference

    return Reference(versions)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_engine(versions: dict[str, Path]) -> AsyncIterator[AsyncEngine]:
    from tests.processes.weight_streams import engine_of

    async with engine_of(versions, max_restarts=100) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared_engine: AsyncEngine, versions: dict[str, Path]) -> AsyncEngine:
    """An engine with the version "default". Tests may change its weights, and have the mark ``live``."""
    from tests.processes.weight_streams import begin

    await begin(shared_engine, versions)
    return shared_engine
