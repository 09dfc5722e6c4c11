"""GPU workloads W1 to W6 and F1 on random weights, through the public API, on this engine and others if installed.

    python -m benchmarks.gpu.workloads --models /tmp/bench-models --json results.json  # everything
    python -m benchmarks.gpu.workloads --models /tmp/bench-models --rows W3 W4 --model a
    python -m benchmarks.gpu.workloads --models /tmp/bench-models --engines aioengine vllm sglang
    python -m benchmarks.gpu.workloads --models /tmp/bench-models --model a --rows --profile  # only the split of a step

W1 / W2  256 requests, 100 to 1024 tokens in and out, temperature 0.6: output tokens per second (model a / b)
W3       one stream, 128 in, 256 out, greedy: ms per token; wall time of one token after 1024 and 8192 new ones
W4       256 and 1024 streams in one asyncio process, 128 in, 256 out, text on: rate, latencies, CPU seconds
W5       256 requests that share 2048 tokens and have 128 of their own, 64 out: seconds (model b)
F1       logprobs: 256 streams of W4 without, with those of chosen tokens, with the top 5; 8 prompts of 4096 tokens,
         one token out, without, with the top 1 and top 5 of the prompt; by turns: tokens per second (model a)
W6       decode at batch 1 to 256 over 512 cached tokens: 128 steps, tokens per second (model b)

Model a has the shape of Qwen3-0.6B, b that of Llama-3.1-8B. The prefix cache is emptied before each counted run. Every
engine gets the same prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import uvloop

from benchmarks.gpu import step_profile
from benchmarks.gpu.engines import ENGINES, AioEngine, Engine, Ids, Output, version
from benchmarks.gpu.models import write_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

Figures = dict[str, float]


def ids(rng: random.Random, count: int) -> Ids:
    return [rng.randint(0, 10_000) for _ in range(count)]


@dataclass
class Bench:
    """An engine and what was measured on it: name of a figure -> its values. ``runs_once``: as ``runs`` says."""

    engine: Engine
    runs_once: bool = False
    figures: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    num_prompts: int = 0

    def add(self, name: str, value: float) -> None:
        self.figures.setdefault(name, []).append(value)

    def runs(self, count: int) -> range:
        """Return the numbers of the runs of a workload; number 0 warms up and does not count. With ``runs_once`` there
        is only one run, which counts, because others ran before it.
        """
        return range(1, 2) if self.runs_once else range(count)

    def rng(self) -> random.Random:
        self.num_prompts += 1
        return random.Random(1000 + self.num_prompts)

    async def empty_cache(self) -> None:
        for _ in range(100):
            if await self.engine.empty_cache():
                return
            await asyncio.sleep(0.02)
        raise RuntimeError("the prefix cache could not be emptied")

    async def generate(self, prompts: list[Ids], outputs: list[Output]) -> float:
        """Return the seconds for all prompts together."""
        await self.empty_cache()
        started = time.perf_counter()
        counts = await self.engine.generate(prompts, outputs)
        elapsed = time.perf_counter() - started
        wanted = [output.num_tokens for output in outputs]
        if counts != wanted:
            raise RuntimeError(f"expected {wanted[:5]}... tokens, got {counts[:5]}...")
        return elapsed


def offline_requests(seed: int) -> tuple[list[Ids], list[Output]]:
    """Return the prompts of W1, and their outputs."""
    rng = random.Random(seed)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    return prompts, [Output(rng.randint(100, 1024)) for _ in range(256)]


async def offline(bench: Bench) -> None:
    for number in bench.runs(3):
        prompts, outputs = offline_requests(0 if number else 1)
        seconds = await bench.generate(prompts, outputs)
        if number:
            bench.add("offline tok/s", sum(output.num_tokens for output in outputs) / seconds)


async def one_stream(bench: Bench) -> None:
    for _ in range(4):
        await bench.empty_cache()
        stream = bench.engine.stream(ids(bench.rng(), 128), Output(256, 0.0))
        arrivals = [time.perf_counter() async for _ in stream]
        bench.add("one stream ms/token", (arrivals[-1] - arrivals[0]) / 255 * 1000)
    bench.figures["one stream ms/token"].pop(0)  # the warm-up
    for length in (1024, 8192):
        for number in range(6):
            prompt = ids(bench.rng(), length)
            seconds = await bench.generate([prompt], [Output(1, 0.0)])
            if number:
                bench.add(f"TTFT {length} ms", seconds * 1000)


async def _stream(
    bench: Bench, prompt: Ids, started: float, firsts: list[float], gaps: list[float], *, num_top: int | None = None
) -> int:
    count, before = 0, 0.0
    async for chunk in bench.engine.stream(prompt, Output(256, num_top=num_top)):
        now = time.perf_counter()
        if count:
            gaps.append(now - before)
        else:
            firsts.append(now - started)
        before = now
        count += bench.engine.num_new(chunk, count)
    return count


def cpu_seconds() -> float:
    """Return the CPU time of this process and its descendants."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


async def streams(bench: Bench) -> None:
    for num_streams in (256, 1024):
        for number in bench.runs(3):
            await bench.empty_cache()
            rng = bench.rng()
            prompts = [ids(rng, 128) for _ in range(num_streams)]
            firsts: list[float] = []
            gaps: list[float] = []
            tree, own, started = cpu_seconds(), time.process_time(), time.perf_counter()
            counts = await asyncio.gather(*(_stream(bench, prompt, started, firsts, gaps) for prompt in prompts))
            seconds = time.perf_counter() - started
            own, tree = time.process_time() - own, cpu_seconds() - tree
            if counts != [256] * num_streams:
                raise RuntimeError(f"streams of {min(counts)} to {max(counts)} tokens, not 256")
            if not number:
                continue
            thousands = sum(counts) / 1000
            for name, value in {
                "tok/s": sum(counts) / seconds,
                "TTFT p50 ms": percentile(firsts, 0.5) * 1000,
                "TTFT p99 ms": percentile(firsts, 0.99) * 1000,
                "gap p50 ms": percentile(gaps, 0.5) * 1000,
                "gap p99 ms": percentile(gaps, 0.99) * 1000,
                "frontend CPU s/1k": own / thousands,
                "tree CPU s/1k": tree / thousands,
            }.items():
                bench.add(f"{num_streams} streams {name}", value)


async def logprobs(bench: Bench) -> None:
    for number in range(4):
        for name, num_top in (("without", None), ("chosen", 0), ("top 5", 5)):
            await bench.empty_cache()
            rng = bench.rng()
            prompts = [ids(rng, 128) for _ in range(256)]
            started = time.perf_counter()
            streams = (_stream(bench, prompt, started, [], [], num_top=num_top) for prompt in prompts)
            counts = await asyncio.gather(*streams)
            if number:
                bench.add(f"256 streams {name} tok/s", sum(counts) / (time.perf_counter() - started))
    for number in range(4):
        for name, num_top in (("without", None), ("top 1", 1), ("top 5", 5)):
            rng = bench.rng()
            prompts = [ids(rng, 4096) for _ in range(8)]
            seconds = await bench.generate(prompts, [Output(1, 0.0, num_top, of_prompt=True)] * 8)
            if number:
                bench.add(f"prompts {name} tok/s", 8 * 4096 / seconds)


async def shared_prefix(bench: Bench) -> None:
    for number in bench.runs(3):
        rng = bench.rng()
        shared = ids(rng, 2048)
        prompts = [[*shared, *ids(rng, 128)] for _ in range(256)]
        seconds = await bench.generate(prompts, [Output(64)] * 256)
        if number:
            bench.add("shared prefix s", seconds)


async def sweep(bench: Bench) -> None:
    for batch in (1, 8, 32, 128, 256):
        for number in bench.runs(4):
            rng = bench.rng()
            prompts = [ids(rng, 512) for _ in range(batch)]
            short = await bench.generate(prompts, [Output(16)] * batch)
            long = await bench.generate(prompts, [Output(144)] * batch)
            if number:
                bench.add(f"decode batch {batch} tok/s", batch * 128 / (long - short))


WORKLOADS: dict[str, tuple[str, Callable[[Bench], Coroutine[None, None, None]]]] = {
    "W3": ("ab", one_stream),
    "W4": ("a", streams),
    "W1": ("a", offline),
    "W2": ("b", offline),
    "W6": ("b", sweep),
    "W5": ("b", shared_prefix),
    "F1": ("a", logprobs),
}


def torch_device_name() -> str:
    """Return the name of the GPU. Another process reads it, because this one measures a frontend without torch."""
    command = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def summary(values: list[float]) -> Figures:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def write_results(path: Path, results: Mapping[str, object]) -> None:
    """Write the results with the date, the GPU and the versions of packages."""
    packages = ("torch", "triton", "flashinfer-python", "msgspec", "pyzmq", "vllm", "sglang")
    made = {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch_device_name(),
        "versions": {name: found for name in packages if (found := version(name))},
    }
    path.write_text(json.dumps({**results, "made": made}, indent=1, default=str), encoding="utf-8")


async def measure(kind: str, name: str, folder: Path, options: argparse.Namespace) -> dict[str, object]:
    """Measure one engine on one model."""
    engine = ENGINES[kind]()
    started = time.perf_counter()
    await engine.start(folder, options.arguments if kind == "aioengine" else {})
    results: dict[str, object] = {"start s": time.perf_counter() - started}
    print(f"{kind}, model {name}: started in {results['start s']:.1f} s", flush=True)
    try:
        if isinstance(engine, AioEngine):
            results["facts"] = await engine.engine.get_server_info()
        for row in options.rows:
            models, workload = WORKLOADS[row]
            if name in models:
                results[row] = await run(row, workload, Bench(engine))
        if options.profile and isinstance(engine, AioEngine):
            splits = {
                rows: await step_profile.split(engine.engine, num_rows=rows, num_tokens=1500) for rows in (1, 32, 256)
            }
            results["step"] = splits
            print(step_profile.table(splits), flush=True)
    finally:
        await engine.close()
    return results


async def run(row: str, workload: Callable[[Bench], Coroutine[None, None, None]], bench: Bench) -> dict[str, object]:
    try:
        await workload(bench)
    except Exception as error:
        print(f"{row}: {error}", flush=True)
        return {"error": f"{type(error).__name__}: {error}"}
    for key, values in bench.figures.items():
        spread = f"({min(values):.3f} to {max(values):.3f})"
        print(f"{row} {key:32} {statistics.median(values):12.3f}   {spread}", flush=True)
    return {key: summary(values) for key, values in bench.figures.items()}


def table(results: dict[str, dict[str, dict[str, object]]]) -> str:
    """Return the medians: a line for each figure of a workload and model, a column for each engine."""
    medians: dict[str, dict[str, float]] = {}
    for kind, models in results.items():
        for name, rows in models.items():
            for row in WORKLOADS:
                found = rows.get(row)
                figures = found.items() if isinstance(found, dict) else ()
                for key, figure in figures:
                    if isinstance(figure, dict):
                        medians.setdefault(f"{row} {name} {key}", {})[kind] = figure["median"]
    lines = [" " * 44 + "".join(kind.rjust(14) for kind in results)]
    for title, by_kind in medians.items():
        cells = (f"{by_kind[kind]:14.3f}" if kind in by_kind else "-".rjust(14) for kind in results)
        lines.append(title.ljust(44) + "".join(cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder for the model folders")
    parser.add_argument("--model", choices=["a", "b", "ab"], default="ab")
    parser.add_argument("--rows", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=["aioengine"])
    parser.add_argument("--arguments", type=json.loads, default={}, help="arguments of our engine, as JSON")
    parser.add_argument("--profile", action="store_true", help="the split of a step of our engine")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, dict[str, dict[str, object]]] = {}
    for kind in options.engines:
        if kind != "aioengine" and version(ENGINES[kind].package) is None:
            print(f"{kind} is not installed", file=sys.stderr)
            continue
        results[kind] = {}
        for name in options.model:
            if options.profile or any(name in WORKLOADS[row][0] for row in options.rows):
                folder = write_folder(options.models, name)
                results[kind][name] = uvloop.run(measure(kind, name, folder, options))
    print(table(results))
    if options.json:
        write_results(options.json, results)


if __name__ == "__main__":
    main()
