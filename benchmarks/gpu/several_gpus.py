"""Workloads on two GPUs: a model divided between them (``tp_size=2``), and a copy of it on each (``dp_size=2``).

    python -m benchmarks.gpu.several_gpus --models /tmp/bench-models --json results.json
    python -m benchmarks.gpu.several_gpus --models /tmp/bench-models --rows replicas

ranks     ``tp_size=2``, model b: W2, W3 and W6 of ``benchmarks.gpu.workloads``
replicas  ``dp_size=2`` and one GPU, model a, in turns: W1 (two GPUs get the requests of seeds 0 and 2, one only those
          of seed 0) and W4. Reports tokens per second, and the CPU time of the user's process.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import uvloop

from benchmarks.gpu.compare import POOL_TOKENS
from benchmarks.gpu.engines import AioEngine
from benchmarks.gpu.models import write_folder
from benchmarks.gpu.workloads import WORKLOADS, Bench, offline_requests, run, streams, summary, write_results

ROUNDS = 3
"""Including the warm-up."""


async def ranks(models: Path) -> dict[str, object]:
    engine = AioEngine()
    await engine.start(write_folder(models, "b"), {"tp_size": 2})
    try:
        return {row: await run(row, WORKLOADS[row][1], Bench(engine)) for row in ("W2", "W3", "W6")}
    finally:
        await engine.close()


async def replicas(models: Path) -> dict[str, object]:
    folder = write_folder(models, "a")
    benches = {"one": Bench(AioEngine(), runs_once=True), "two": Bench(AioEngine(), runs_once=True)}
    for (name, bench), arguments in zip(benches.items(), ({"base_gpu_id": 0}, {"dp_size": 2}), strict=True):
        await bench.engine.start(folder, {"max_total_tokens": POOL_TOKENS["a"], **arguments})
        print(f"{name}: started", flush=True)
    try:
        for number in range(ROUNDS):
            for name, bench in list(benches.items())[:: -1 if number % 2 else 1]:
                prompts, outputs = offline_requests(0)
                if name == "two":
                    more_prompts, more_outputs = offline_requests(2)
                    prompts, outputs = prompts + more_prompts, outputs + more_outputs
                started = time.process_time()
                seconds = await bench.generate(prompts, outputs)
                cpu_seconds, count = time.process_time() - started, sum(output.num_tokens for output in outputs)
                bench.add("W1 tok/s", count / seconds)
                bench.add("W1 frontend CPU us a token", cpu_seconds / count * 1e6)
                await streams(bench)
                if not number:  # the warm-up
                    bench.figures.clear()
    finally:
        for bench in benches.values():
            await bench.engine.close()
    for name, bench in benches.items():
        for key, values in bench.figures.items():
            found = summary(values)
            print(f"{name} {key:36} {found['median']:12.3f}   ({found['min']:.3f} to {found['max']:.3f})", flush=True)
    return {name: {key: summary(values) for key, values in bench.figures.items()} for name, bench in benches.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder for the model folders")
    parser.add_argument("--rows", nargs="+", choices=["ranks", "replicas"], default=["ranks", "replicas"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, object] = {}
    if "ranks" in options.rows:
        results["ranks"] = uvloop.run(ranks(options.models))
    if "replicas" in options.rows:
        results["replicas"] = uvloop.run(replicas(options.models))
    if options.json:
        write_results(options.json, results)


if __name__ == "__main__":
    main()
