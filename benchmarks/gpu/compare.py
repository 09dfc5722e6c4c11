"""Workloads on this checkout and on another one in turns, on one GPU: which is slower?

    git worktree add /tmp/before COMMIT
    python -m benchmarks.gpu.compare /tmp/before --models /tmp/bench-models --model a --rows W1 W3 W4
    python -m benchmarks.gpu.compare /tmp/before --models /tmp/bench-models --model b --rows W6 --rounds 3
    python -m benchmarks.gpu.compare . --models /tmp/bench-models --model b --rows W2 W3 W6 \\
        --arguments '{"quantization": "fp8"}' '{"quantization": "int4"}' '{"kv_cache_dtype": "fp8_e4m3"}'

The engines run on the same GPU: one of the other checkout, and one of this checkout for each of ``--arguments``. They
are measured in turns, and the order changes from round to round. A workload runs once a round, and the first round does
not count. The program prints the ratios of each round as it ends, then medians with minimum and maximum, and the ratios
of the medians. All engines run this checkout's workloads through the public API.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import IO, Any

HERE = Path(__file__).parents[2]
POOL_TOKENS = {"a": 430_000, "b": 200_000}
"""Of each engine's KV pool, so that both have the same: enough for all rows, and two pools fit into 140 GB."""

Figures = dict[str, list[float]]


async def serve(folder: Path, model: str, arguments: dict[str, Any]) -> None:
    """Run the workloads that standard input names, one a line; print the figures of each as a line of JSON."""
    from benchmarks.gpu.workloads import WORKLOADS, AioEngine, Bench

    out = sys.stdout
    with redirect_stdout(sys.stderr):
        engine = AioEngine()
        await engine.start(folder, {"max_total_tokens": POOL_TOKENS[model], **arguments})
        print(json.dumps({}), file=out, flush=True)
        while row := (await asyncio.to_thread(sys.stdin.readline)).strip():
            bench = Bench(engine, runs_once=True)
            await WORKLOADS[row][1](bench)
            print(json.dumps(bench.figures), file=out, flush=True)
        await engine.close()


def serve_from(checkout: Path, folder: Path, model: str, arguments: dict[str, Any]) -> None:
    """Run ``serve`` with the package of a checkout and the workloads of this one."""
    import aioengine

    assert Path(aioengine.__file__).is_relative_to(checkout), f"{checkout} has no package aioengine"
    # This folder is on no search path: the engine's processes would import the package of this checkout.
    benchmarks = sys.modules["benchmarks"] = ModuleType("benchmarks")
    benchmarks.__path__ = [str(HERE / "benchmarks")]
    import uvloop

    uvloop.run(serve(folder, model, arguments))


class Served:
    """A process with an engine of a checkout."""

    def __init__(self, checkout: Path, folder: Path, model: str, arguments: dict[str, Any]) -> None:
        command = [sys.executable, __file__, str(checkout), "--models", str(folder), "--model", model, "--serve"]
        command += ["--arguments", json.dumps(arguments)]
        paths = [str(checkout), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self.figures: Figures = {}
        self.process = subprocess.Popen(
            command, cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.read()  # it has started

    def run(self, row: str, *, counts: bool) -> None:
        stdin = self.process.stdin
        assert stdin is not None
        print(row, file=stdin, flush=True)
        for name, values in self.read().items():
            if counts:
                self.figures.setdefault(f"{row} {name}", []).append(statistics.median(values))

    def read(self) -> Figures:
        stdout: IO[str] | None = self.process.stdout
        assert stdout is not None
        if not (line := stdout.readline()):
            raise RuntimeError(f"the engine ended with status {self.process.wait()}; its error is above")
        found: Figures = json.loads(line)
        return found

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def shown(values: list[float]) -> str:
    return f"{statistics.median(values):11.3f} ({min(values):.3f} to {max(values):.3f})"


def ratios(other: Figures, this: list[Figures]) -> str:
    """Return the ratios of the last round."""
    return ", ".join(
        f"{name} {' '.join(f'{figures[name][-1] / values[-1]:.4f}' for figures in this)}"
        for name, values in other.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="folder of the other checkout")
    parser.add_argument("--models", type=Path, required=True, help="folder for the model folders")
    parser.add_argument("--model", choices=list(POOL_TOKENS), default="a")
    parser.add_argument("--rows", nargs="+", default=["W1", "W3", "W4"])
    parser.add_argument("--rounds", type=int, default=5, help="that count, behind one that warms up")
    parser.add_argument(
        "--arguments", nargs="+", type=json.loads, default=[{}], help="of an engine of this checkout, as JSON"
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve_from(options.other, options.models, options.model, *options.arguments)
        return
    from benchmarks.gpu.models import write_folder

    folder = write_folder(options.models, options.model)
    with ExitStack() as stack:
        served: list[Served] = []
        for checkout, arguments in [(options.other.resolve(), {}), *((HERE, each) for each in options.arguments)]:
            served.append(Served(checkout, folder, options.model, arguments))
            stack.callback(served[-1].close)
        for turn in range(options.rounds + 1):
            for row in options.rows:
                for each in served[:: -1 if turn % 2 else 1]:
                    each.run(row, counts=turn > 0)
            if turn:
                print(f"round {turn}: {ratios(served[0].figures, [each.figures for each in served[1:]])}", flush=True)
        for name, before in served[0].figures.items():
            print(f"{name:36} other {shown(before)}")
            for arguments, each in zip(options.arguments, served[1:], strict=True):
                ratio = statistics.median(each.figures[name]) / statistics.median(before)
                print(f"{json.dumps(arguments):>36} this  {shown(each.figures[name])}   ratio {ratio:.4f}")


if __name__ == "__main__":
    main()
