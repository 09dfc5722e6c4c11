"""Where the time of a decode step goes: scheduler and runner in one process, without wire and text.

    python -m benchmarks.gpu.steps --models /tmp/bench-models --model a --batches 1 32 256 [--kernels]

Prints, for each batch, milliseconds a step: wall, and of it what the host spends in schedule, launch, and collect
(waiting for the device included) and apply. ``--kernels`` adds the device's time by kernel, from torch's profiler.
``--prompts`` adds the time of prompts until all have their first token.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from aioengine.api.args import engine_config
from aioengine.model_files.model_folder import find_facts
from aioengine.protocol.messages import Limits, Sampling, Submit, TextRules
from aioengine.runner.build import build
from aioengine.scheduler.scheduler import Scheduler
from aioengine.settings.machine import device_facts
from aioengine.settings.resolve import resolve
from benchmarks.gpu.models import MODELS, write_folder

if TYPE_CHECKING:
    from aioengine.runner.model_runner import ModelRunner
    from aioengine.scheduler.plan import StepPlan, StepResult

ENDLESS = 1 << 20
"""More tokens than any of the programs here waits for."""
NUM_WARM = 8
"""Decode steps of a full batch before those that are measured."""


class Steps:
    """The loop of ``SchedulerCore`` at depth 1, with a clock between its parts."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.parts: dict[str, list[float]] = defaultdict(list)
        self.in_flight: list[tuple[StepPlan, object]] = []

    def step(self) -> None:
        started = time.perf_counter()
        plan = self.scheduler.schedule(0.0)
        scheduled = time.perf_counter()
        if plan is not None:
            self.in_flight.append((plan, self.runner.launch(plan)))
        launched = collected = time.perf_counter()
        if len(self.in_flight) > 1 or plan is None:
            _, ticket = self.in_flight.pop(0)
            result: StepResult = self.runner.collect(ticket)  # type: ignore[arg-type]
            collected = time.perf_counter()
            self.scheduler.apply(result, 0.0)
        ended = time.perf_counter()
        for name, seconds in (
            ("schedule", scheduled - started),
            ("launch", launched - scheduled),
            ("collect", collected - launched),
            ("apply", ended - collected),
            ("wall", ended - started),
        ):
            self.parts[name].append(seconds * 1000)


def run(steps: Steps, batch: int, *, num_cached: int, num_steps: int, first_uid: int) -> None:
    """Fill the batch, then take ``num_steps`` decode steps whose times alone are kept. The rows go on until ``finish``.

    Raises:
        RuntimeError: the pages do not suffice for all rows at once.
    """
    for uid in range(first_uid, first_uid + batch):
        prompt = [(uid * 7919 + place * 31) % 10_000 for place in range(num_cached)]
        sampling, limits = Sampling(uid, temperature=0.6), Limits(ENDLESS)
        steps.scheduler.requests.submit(Submit(uid, prompt, sampling, limits, TextRules()))
    steps.step()
    while steps.in_flight[-1][0].num_tokens > batch or len(steps.in_flight[-1][0].rows) < batch:
        steps.step()
        if steps.scheduler.requests.events.totals.num_preemptions:
            raise RuntimeError(f"{batch} rows of {num_cached} positions do not fit into the pages; take fewer rows")
    for _ in range(NUM_WARM):
        steps.step()
    steps.parts.clear()
    for _ in range(num_steps):
        steps.step()


def finish(steps: Steps) -> None:
    """Drop all requests."""
    steps.scheduler.requests.forget_all()
    _take_all(steps)


def _take_all(steps: Steps) -> None:
    """Step until all requests have ended."""
    while not steps.scheduler.requests.is_idle or steps.in_flight:
        steps.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--model", choices=[*MODELS], default="a")
    parser.add_argument("--prompts", type=int, nargs="*", default=[], help="lengths of prompts of which steps are full")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--cached", type=int, default=512)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--kernels", action="store_true", help="the device's time by kernel")
    parser.add_argument("--running", type=int, help="max_running_requests")
    parser.add_argument("--attention", default="auto", help="attention_backend")
    parser.add_argument("--deterministic", action="store_true", help="enable_deterministic_inference")
    options = parser.parse_args()
    folder = write_folder(options.models, options.model)
    arguments = {"load_format": "dummy", "disable_cuda_graph": options.eager, "max_running_requests": options.running}
    arguments["attention_backend"] = options.attention
    arguments["enable_deterministic_inference"] = options.deterministic
    config = engine_config(str(folder), arguments)
    settings = resolve(config, find_facts(config.model), device_facts())
    started = time.perf_counter()
    runner = build(settings, lambda _: None)
    print(f"built in {time.perf_counter() - started:.1f} s: {runner.facts}", flush=True)
    num_pages = runner.facts["num_pages"]
    assert isinstance(num_pages, int)
    for number, batch in enumerate(options.batches):
        scheduler = Scheduler(settings.scheduler, num_pages=num_pages, page_size=settings.memory.page_size)
        steps = Steps(runner, scheduler)
        run(steps, batch, num_cached=options.cached, num_steps=100, first_uid=10_000 * number)
        parts = "  ".join(f"{name} {statistics.median(values):7.3f}" for name, values in steps.parts.items())
        print(f"batch {batch:4}: {parts}", flush=True)
        if options.kernels:
            kernels(steps)
        finish(steps)
    for length in options.prompts:
        scheduler = Scheduler(settings.scheduler, num_pages=num_pages, page_size=settings.memory.page_size)
        count = max(settings.scheduler.chunk_tokens // length, 1)
        print(f"{count} prompts of {length}: {prompts(Steps(runner, scheduler), length, count):.2f} ms", flush=True)


def prompts(steps: Steps, length: int, count: int) -> float:
    """Return the milliseconds from the first step of ``count`` prompts of ``length`` tokens until all have their first
    token.
    """
    found: list[float] = []
    for repeat in range(4):
        for uid in range(count):
            prompt = [(uid * 7919 + place * 31 + repeat * 1237) % 10_000 for place in range(length)]
            sampling, limits = Sampling(uid, temperature=0.6), Limits(1)
            steps.scheduler.requests.submit(Submit(repeat * count + uid, prompt, sampling, limits, TextRules()))
        started = time.perf_counter()
        _take_all(steps)
        found.append((time.perf_counter() - started) * 1000)
    return statistics.median(found[1:])


def kernels(steps: Steps) -> None:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(10):
            steps.step()
        torch.cuda.synchronize()
    table = profile.key_averages().table(sort_by="self_device_time_total", row_limit=16, max_name_column_width=70)
    sys.stdout.write(table + "\n")


if __name__ == "__main__":
    main()
