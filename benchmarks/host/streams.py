"""The wire and the streams without a model: what a token costs in each process, and what streaming costs in throughput.

    python -m benchmarks.host.streams [--streams 1000] [--output 128] [--repeats 3] [--json] [--observed]

Real processes with a fake runner. First the steps are far enough apart that every stream reads every token by itself,
and the CPU time of each process is divided by the tokens (the scheduler's holds the fake runner's own part). Then the
steps are 10 ms apart, and the same requests are run streaming and as whole answers, in turns: a machine that others use
too gives one run in a few much less time than the next.

With ``--observed``, only the costs are measured: without observers, and with metrics and with traces of 1 % of the
requests, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import asdict, dataclass

import psutil
import uvloop

from aioengine.api.engine import AsyncEngine
from aioengine.testing.fake_engine import FakeSetup

PROMPT_TOKENS = 16
WIDE_STEP_S = 0.06
NARROW_STEP_S = 0.01
LOOPS = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


@dataclass
class Costs:
    """Microseconds of CPU for each token, by process, while every chunk is one token or nearly so."""

    frontend_us: float
    detokenizer_us: float
    scheduler_us: float
    tokens_per_chunk: float
    tokens: int


@dataclass
class Throughput:
    """Output tokens per second at one step every 10 ms, medians. ``device``: what the fake device could give.

    ``ratio``: of a streaming run to the whole answers before it; with the least and the most over the repeats.
    """

    streaming: float
    whole: float
    ratio: float
    ratio_min: float
    ratio_max: float
    device: float
    tokens_per_chunk: float


def engine(streams: int, output: int, step_s: float) -> AsyncEngine:
    """Return an engine in which all requests fit at once."""
    pages = streams * (PROMPT_TOKENS + output + 32) // 16 + streams
    setup = FakeSetup(
        step_time_s=step_s, processes=True, context_length=4096, num_pages=pages, max_running=streams, chunk_tokens=8192
    )
    return AsyncEngine.from_blueprint(setup.blueprint)


def prompt(number: int) -> list[int]:
    """Return a prompt. No two have a common beginning."""
    return [number % 250, number // 250, *range(PROMPT_TOKENS - 2)]


async def read(running: AsyncEngine, number: int, output: int) -> int:
    """Read one stream. Return the number of chunks."""
    params = {"max_new_tokens": output, "ignore_eos": True}
    num_chunks = num_tokens = 0
    async for chunk in running.async_generate(input_ids=prompt(number), sampling_params=params, stream=True):
        num_chunks += 1
        num_tokens += len(chunk["output_ids"])
    assert num_tokens == output
    return num_chunks


async def read_whole(running: AsyncEngine, number: int, output: int) -> int:
    """Wait for an answer. Return 1, like ``read`` for one chunk."""
    params = {"max_new_tokens": output, "ignore_eos": True}
    answer = await running.async_generate(input_ids=prompt(number), sampling_params=params)
    assert len(answer["output_ids"]) == output
    return 1


def cpu_seconds(running: AsyncEngine) -> dict[str, float]:
    """Return the CPU time of each process until now."""
    used = {"frontend": time.process_time()}
    for process in running.health()["processes"]:
        times = psutil.Process(process["pid"]).cpu_times()
        used[process["role"]] = times.user + times.system
    return used


def observe(running: AsyncEngine) -> None:
    """Add metrics, and traces of 1 % of the requests."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    from aioengine.metrics import engine_collector
    from aioengine.tracing import instrument

    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(0.01)))
    provider.add_span_processor(BatchSpanProcessor(InMemorySpanExporter()))
    engine_collector(running)
    instrument(running, provider)


async def measure_observers(streams: int, output: int, repeats: int) -> None:
    """Print the CPU time of a token without observers and with them."""
    found: dict[str, list[Costs]] = {"plain": [], "observed": []}
    for name in ("plain", "observed") * repeats:
        found[name].append(await measure_costs(streams, output, is_observed=name == "observed"))
    for role in ("frontend_us", "detokenizer_us", "scheduler_us"):
        plain, observed = ([getattr(costs, role) for costs in found[name]] for name in found)
        print(f"CPU us/token {role.removesuffix('_us'):12}", end="")
        for name, values in (("plain", plain), ("observed", observed)):
            print(f"   {name} {statistics.median(values):6.2f} ({min(values):.2f} to {max(values):.2f})", end="")
        more = (statistics.median(observed) - statistics.median(plain)) * output
        print(f"   {more:+.0f} us/request")


async def measure_costs(streams: int, output: int, *, is_observed: bool = False) -> Costs:
    async with engine(streams, output, WIDE_STEP_S) as running:
        if is_observed:
            observe(running)
        await read(running, 0, 4)
        before = cpu_seconds(running)
        chunks = await asyncio.gather(*(read(running, number, output) for number in range(streams)))
        after = cpu_seconds(running)
    num_tokens = streams * output
    micros = {role: round((after[role] - before[role]) / num_tokens * 1e6, 2) for role in after}
    return Costs(
        micros["frontend"], micros["detokenizer"], micros["scheduler"], round(num_tokens / sum(chunks), 2), num_tokens
    )


async def measure_throughput(streams: int, output: int, repeats: int) -> Throughput:
    rates: dict[str, list[float]] = {"whole": [], "streaming": []}
    per_chunk = 0.0
    async with engine(streams, output, NARROW_STEP_S) as running:
        for name, reader in (("whole", read_whole), ("streaming", read)) * repeats:
            started = time.monotonic()
            chunks = await asyncio.gather(*(reader(running, number, output) for number in range(streams)))
            rates[name].append(streams * output / (time.monotonic() - started))
            per_chunk = streams * output / sum(chunks)
            await running.flush_cache()
    ratios = [round(one / other, 3) for one, other in zip(rates["streaming"], rates["whole"], strict=True)]
    return Throughput(
        streaming=round(statistics.median(rates["streaming"])),
        whole=round(statistics.median(rates["whole"])),
        ratio=statistics.median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        device=round(streams / NARROW_STEP_S),
        tokens_per_chunk=round(per_chunk, 2),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--output", type=int, default=128, help="tokens for each stream")
    parser.add_argument("--loop", choices=LOOPS, default="uvloop", help="the event loop of the user's process")
    parser.add_argument("--repeats", type=int, default=3, help="runs streaming and whole, in turns")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--observed", action="store_true", help="compare with metrics and traces")
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=LOOPS[arguments.loop]) as runner:
        if arguments.observed:
            runner.run(measure_observers(arguments.streams, arguments.output, arguments.repeats))
            return
        costs = runner.run(measure_costs(arguments.streams, arguments.output))
        throughput = runner.run(measure_throughput(arguments.streams, arguments.output, arguments.repeats))
    if arguments.json:
        print(json.dumps({"streams": arguments.streams, "costs": asdict(costs), "throughput": asdict(throughput)}))
        return
    print(f"{arguments.streams} streams of {arguments.output} tokens on {arguments.loop}")
    print(f"CPU us/token   frontend {costs.frontend_us:6.2f}   detokenizer {costs.detokenizer_us:6.2f}", end="")
    print(f"   scheduler {costs.scheduler_us:6.2f}   ({costs.tokens_per_chunk} tokens a chunk)")
    print(f"tokens/s at 10 ms a step   streaming {throughput.streaming:,.0f}   whole {throughput.whole:,.0f}", end="")
    print(f"   ratio {throughput.ratio:.3f} ({throughput.ratio_min:.3f} to {throughput.ratio_max:.3f})", end="")
    print(f"   (device {throughput.device:,.0f})")


if __name__ == "__main__":
    main()
