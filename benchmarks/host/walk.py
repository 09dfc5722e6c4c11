"""The files and functions of the package that one request runs through until its first chunk.

    python -m benchmarks.host.walk [--functions] [--json]

The whole engine runs in this process, without torch and without sockets (``aioengine.testing.fake_engine``). A first
request warms it up; what every one of the next requests calls is the walk, in the order of the first calls. The files
that stand in for the model, the processes and the sockets are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import aioengine
from aioengine.testing.fake_engine import fake_async_engine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from aioengine import AsyncEngine

PACKAGE = Path(aioengine.__file__).parent
STAND_INS = ("testing/", "supervision/launchers/inline.py", "transport/local.py")
REPEATS = 5

Walk = dict[str, list[str]]
"""File -> its functions, one entry for each call."""


class Recorder:
    """Notes the calls of the package's functions in every thread that starts after ``install``, while it is on."""

    def __init__(self) -> None:
        self.walk: Walk = {}
        self.is_on = False

    def install(self) -> None:
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def remove(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if not self.is_on or event != "call":
            return
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(PACKAGE):
            self.walk.setdefault(file.relative_to(PACKAGE).as_posix(), []).append(frame.f_code.co_qualname)


async def measure() -> Walk:
    """Return the walk of one request, without the stand-ins."""
    recorder = Recorder()
    recorder.install()  # before the engine starts its threads
    try:
        async with fake_async_engine() as engine:
            await first_chunk(engine, recorder)
            walks = [await first_chunk(engine, recorder) for _ in range(REPEATS)]
    finally:
        recorder.remove()
    # Timers that happen to run out (statistics, heartbeats) are not in every walk.
    common = set.intersection(*map(set, walks))
    return {file: calls for file, calls in walks[-1].items() if file in common and not file.startswith(STAND_INS)}


async def first_chunk(engine: AsyncEngine, recorder: Recorder) -> Walk:
    """Return the calls from ``async_generate`` to its first chunk."""
    recorder.walk = {}
    recorder.is_on = True
    stream = engine.async_generate("Once upon a time", {"max_new_tokens": 4}, stream=True)
    async for _ in stream:
        recorder.is_on = False
    return recorder.walk


def lines(walk: Walk, *, with_functions: bool) -> Iterator[str]:
    for file, calls in walk.items():
        yield f"{len(calls):4}  {file}"
        if with_functions:
            yield from (f"          {name}" for name in dict.fromkeys(calls))
    yield f"{sum(map(len, walk.values()))} calls in {len(walk)} files"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--functions", action="store_true", help="the functions of each file too")
    parser.add_argument("--json", action="store_true", help="file -> calls, as JSON")
    arguments = parser.parse_args()
    walk = asyncio.run(measure())
    print(json.dumps(walk) if arguments.json else "\n".join(lines(walk, with_functions=arguments.functions)))


if __name__ == "__main__":
    main()
