"""Runs the ranks of a model in threads of the test process."""

from __future__ import annotations

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from msgspec.structs import replace

from aioengine import models
from aioengine.layers.layer import Shard
from aioengine.layers.ranks import RankGroup
from aioengine.model_files.quantization import read_config
from aioengine.processes.runner_process import RankService
from aioengine.runner.build import build
from aioengine.settings.config import RankSettings
from tests.compute.runner_world import World
from tests.compute.stepping import options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from aioengine.protocol.messages import Control
    from aioengine.protocol.rank_step import RankAdapter, RankStep
    from aioengine.settings.config import Settings

T = TypeVar("T")
AnyWorld = TypeVar("AnyWorld", bound=World)
CPU = torch.device("cpu")
_SWITCH_S = 0.0002
"""The threads must change often, because the ranks wait for each other."""


def _run(work: Callable[..., T], *arguments: object) -> T:
    with torch.inference_mode():
        return work(*arguments)


class RankThreads:
    """A thread for each rank. ``shards``: the group of the ranks, by rank."""

    def __init__(self, threads: list[ThreadPoolExecutor], store_file: str) -> None:
        self._threads = threads
        size = len(threads)
        self.shards = self.call(
            lambda rank: Shard(
                rank, size, RankGroup(rank, size, store_file=store_file, device=CPU, batch_invariant=True)
            )
        )

    def call(self, work: Callable[[int], T]) -> list[T]:
        """Call ``work`` with each rank, and return the results."""
        futures = [thread.submit(_run, work, rank) for rank, thread in enumerate(self._threads)]
        return [future.result() for future in futures]


@contextmanager
def _started(num_threads: int) -> Iterator[tuple[list[ThreadPoolExecutor], str]]:
    """Start threads, and yield them with the path of a store file."""
    interval = sys.getswitchinterval()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stack.callback(sys.setswitchinterval, interval)
        sys.setswitchinterval(_SWITCH_S)
        yield [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(num_threads)], str(Path(folder) / "ranks")


@contextmanager
def rank_threads(num_ranks: int) -> Iterator[RankThreads]:
    """Start a thread for each rank."""
    with _started(num_ranks) as (threads, store_file):
        yield RankThreads(threads, store_file)


@contextmanager
def ranked_world(settings: Settings, num_ranks: int, kind: type[AnyWorld] = World) -> Iterator[AnyWorld]:
    """A world with several ranks. Rank 0 is in this thread, and the services of other ranks are in other threads."""
    config = read_config(Path(settings.model.path))
    assert config is not None
    models.build(config, options())  # msgspec may not prepare a type in several threads at once
    with _started(num_ranks - 1) as (threads, store_file):

        def settings_of(rank: int) -> Settings:
            ranks = RankSettings(size=num_ranks, rank=rank, store_file=store_file)
            return replace(settings, runner=replace(settings.runner, ranks=ranks))

        services: list[RankService] = []
        handled: list[Future[Any]] = []

        def send(message: RankStep | RankAdapter | Control) -> None:
            for future in [future for future in handled if future.done()]:
                handled.remove(future)
                future.result()
            for thread, service in zip(threads, services, strict=True):
                handled.append(thread.submit(_run, service.handle, [message], 0.0))

        building = [
            thread.submit(_run, lambda rank: RankService(build(settings_of(rank), lambda _: None)), rank)
            for rank, thread in enumerate(threads, 1)
        ]
        world = kind(settings_of(0), send)
        services += [future.result() for future in building]
        yield world
        for future in handled:
            future.result()
