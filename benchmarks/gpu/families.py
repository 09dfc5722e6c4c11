"""Shapes of mixtures of experts, of latent attention, of windows and of hybrids, beside the limits of the device.

    python -m benchmarks.gpu.families --models /tmp/bench-models [--shapes a3b oss] [--layers 8 16] [--kernels]

Prints for each shape a decode step of each number of rows (fewer where more have no pages), and a prompt until its
first token: milliseconds a step, of these the host's, the limit (``limits``; of experts those count that tokens of such
a step really went through), by what to read and by what to compute, and the share that the limit has. The weights are
random and made on the device.

``--layers`` takes shapes of fewer layers, which starts faster. With two numbers, times are those of all layers: what
the second has more than the first, as often as it takes. They must be multiples of 4 (6 for gemma).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from aioengine import plugins
from aioengine.api.args import engine_config
from aioengine.layers import experts as expert_layers
from aioengine.model_files.model_folder import find_facts
from aioengine.processes.scheduler_process import page_windows
from aioengine.protocol.messages import Limits, Sampling, Submit, TextRules
from aioengine.runner.build import build
from aioengine.scheduler.scheduler import Scheduler
from aioengine.settings.machine import device_facts
from aioengine.settings.page_groups import PageGroups
from aioengine.settings.resolve import resolve
from benchmarks.gpu import limits
from benchmarks.gpu.models import MODELS
from benchmarks.gpu.steps import NUM_WARM, Steps, finish, prompts, run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioengine.families._config import DecoderConfig
    from aioengine.kernels.expert_types import ChosenExperts
    from aioengine.runner.model_runner import ModelRunner
    from aioengine.settings.config import Settings

SHAPES = "a3b", "oss", "gemma", "lite", "next"
NUM_STEPS = 60
MORE_TOKENS = 300
"""Tokens of the prompt that joins rows whose experts are counted: more than graphs of decode steps have rows."""
MORE_STEPS = 12
"""More than what follows those that are measured."""
NUM_KERNELS = 10
NAME_LENGTH = 24


@dataclass(frozen=True, slots=True)
class Case:
    """Rows of a decode step behind ``num_before`` positions, or a prompt of ``num_new`` tokens."""

    num_rows: int
    num_new: int
    num_before: int

    def __str__(self) -> str:
        return f"{self.num_rows:4} rows" if self.num_before else f"{self.num_new} tokens"


@dataclass(frozen=True, slots=True)
class Measured:
    """Milliseconds of a step, and of the host's part of it (0: not known); its rows; experts hit in a layer."""

    total: float
    host: float
    num_rows: int
    num_hit: float

    def deeper(self, other: Measured, factor: float) -> Measured:
        """Extrapolate to a model with ``factor`` times as many more layers as ``other`` has more."""
        total, host = (a + (b - a) * factor for a, b in ((self.total, other.total), (self.host, other.host)))
        return replace(other, total=total, host=host)


class Shape:
    """One of ``MODELS`` with some of its layers, in a runner."""

    def __init__(self, config: dict[str, object], folder: Path, options: argparse.Namespace) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        most = max(*options.rows, 1)
        arguments = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "attention_backend": options.attention,
            "chunked_prefill_size": max(options.prompt, most),
            "max_running_requests": most + 1,
            "cuda_graph_max_bs": most,
            "disable_radix_cache": True,
        }
        wanted = engine_config(str(folder), arguments)
        self._settings: Settings = resolve(wanted, find_facts(wanted.model), device_facts())
        self._num_cached: int = options.cached
        started = time.perf_counter()
        self.runner: ModelRunner = build(self._settings, lambda _: None)
        self.built_s = time.perf_counter() - started

    def steps(self) -> Steps:
        num_pages = int(self.runner.facts["num_pages"])
        page_size = self._settings.memory.page_size
        windows = page_windows(self.runner.facts)
        scheduler = Scheduler(self._settings.scheduler, num_pages=num_pages, page_size=page_size, windows=windows)
        return Steps(self.runner, scheduler)

    def decode(self, num_rows: int, *, prints_kernels: bool) -> Measured:
        """Measure a step of ``num_rows`` rows, or of as many as have pages at once."""
        steps = self.steps()
        num_rows = min(num_rows, max(self._max_rows(), 1))
        run(steps, num_rows, num_cached=self._num_cached, num_steps=NUM_STEPS, first_uid=0)
        median = {name: statistics.median(values) for name, values in steps.parts.items()}
        if prints_kernels:
            with profiled(5):
                for _ in range(5):
                    steps.step()
        hits = self._hits_of_rows(steps, num_rows)
        finish(steps)
        return Measured(median["wall"], median["wall"] - median["collect"], num_rows, hits)

    def _max_rows(self) -> int:
        """Return the number of rows that have pages until the last step of ``decode``. While others are filled, one row
        gets a token per step.
        """
        memory, num_pages = self._settings.memory, int(self.runner.facts["num_pages"])
        groups = PageGroups(windows=page_windows(self.runner.facts) or (None,), page_size=memory.page_size)
        num_steps = NUM_WARM + NUM_STEPS + MORE_STEPS
        chunk_tokens = self._settings.scheduler.chunk_tokens
        num_pages -= groups.num_groups * -(-chunk_tokens // memory.page_size)  # of the chunk that is computed
        most = 0
        while True:
            num_filling = -(-(most + 1) * self._num_cached // chunk_tokens)
            if (most + 1) * groups.pages_for(self._num_cached + num_filling + num_steps) > num_pages:
                return most
            most += 1

    def prompt(self, num_tokens: int, *, prints_kernels: bool) -> Measured:
        """Measure a prompt until its first token."""
        total = prompts(self.steps(), num_tokens, 1)
        if prints_kernels:
            with profiled(4):
                prompts(self.steps(), num_tokens, 1)  # of four prompts
        with self._without_graphs(), routed() as seen:
            prompts(self.steps(), num_tokens, 1)
        hits = [count(chosen) for chosen in seen if len(chosen.experts) == num_tokens]
        return Measured(total, 0.0, 1, statistics.fmean(hits) if hits else 0.0)

    def _hits_of_rows(self, steps: Steps, num_rows: int) -> float:
        """Return the experts that the rows use, from a step with another prompt, which runs without a graph."""
        uid = 1 << 20
        limit = Limits(1)
        steps.scheduler.requests.submit(Submit(uid, [7] * MORE_TOKENS, Sampling(uid), limit, TextRules()))
        with self._without_graphs(), routed() as seen:
            for _ in range(3):
                steps.step()
        hits = [count(chosen, num_rows) for chosen in seen if len(chosen.experts) > num_rows]
        return statistics.fmean(hits) if hits else 0.0

    @contextmanager
    def _without_graphs(self) -> Iterator[None]:
        """Launch steps with prompts kernel by kernel."""
        graphs, self.runner.prompt_graphs = self.runner.prompt_graphs, None
        try:
            yield
        finally:
            self.runner.prompt_graphs = graphs

    def close(self) -> None:
        self.runner.close()
        del self.runner
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def routed() -> Iterator[list[ChosenExperts]]:
    """Yield a list that gets the chosen experts of each layer in each step of the body."""
    seen: list[ChosenExperts] = []
    route = expert_layers.route

    def noted(*arguments: object) -> ChosenExperts:
        seen.append(route(*arguments))  # type: ignore[arg-type]
        return seen[-1]

    expert_layers.route = noted  # type: ignore[assignment]
    try:
        yield seen
    finally:
        expert_layers.route = route


def count(chosen: ChosenExperts, num_tokens: int | None = None) -> int:
    """Return the number of experts that the first tokens use."""
    return len(chosen.experts[:num_tokens].unique())


@contextmanager
def profiled(num_steps: int) -> Iterator[None]:
    """Print the kernels that take longest: microseconds a step, how often they run, their names; they may overlap."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield
        torch.cuda.synchronize()
    found = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    lines = [
        f"{event.self_device_time_total / num_steps:.0f} us {event.count / num_steps:.0f} x "
        f"{event.key.removeprefix('void ')[:NAME_LENGTH]}"
        for event in found[:NUM_KERNELS]
    ]
    print("    " + ", ".join(lines), flush=True)


def measured(name: str, num_layers: int, cases: list[Case], options: argparse.Namespace) -> list[Measured]:
    """Measure each of ``cases``."""
    shape = Shape({**MODELS[name], "num_hidden_layers": num_layers}, options.models / f"{name}-{num_layers}", options)
    facts = shape.runner.facts
    backend, gigabytes = facts["attention_backend"], int(facts["weights_bytes"]) / 1e9
    print(f"  {num_layers} layers, {gigabytes:.1f} GB, built in {shape.built_s:.1f} s, {backend}", flush=True)
    found = [
        shape.decode(case.num_rows, prints_kernels=options.kernels)
        if case.num_before
        else shape.prompt(case.num_new, prints_kernels=options.kernels)
        for case in cases
    ]
    shape.close()
    return found


def line(case: Case, found: Measured, config: DecoderConfig) -> str:
    """Return a row of the table."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    case = replace(case, num_rows=found.num_rows)
    step = limits.Step(case.num_rows, case.num_new, case.num_before, found.num_hit)
    limit = limits.limits(config, step, limits.peaks_of(name))
    reading, computing = limit.reading * 1000, limit.computing * 1000
    experts = "" if config.experts is None else f", {found.num_hit:.1f} of {config.experts.num_experts} experts"
    host = f" (host {found.host:.2f})" if found.host else ""
    share = limit.seconds * 1000 / found.total
    return f"  {case}: {found.total:8.3f} ms{host}, limit {reading:.3f} / {computing:.3f}, share {share:.3f}{experts}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="a folder for config files")
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=SHAPES)
    parser.add_argument("--layers", type=int, nargs="+", help="one or two numbers; all layers else")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--cached", type=int, default=1024, help="positions before a decode step")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--kernels", action="store_true", help="the device's time by kernel in decode steps")
    parser.add_argument("--attention", default="auto", help="attention_backend")
    options = parser.parse_args()
    cases = [*(Case(num_rows, 1, options.cached) for num_rows in options.rows), Case(1, options.prompt, 0)]
    for name in options.shapes:
        started = time.perf_counter()
        print(name, flush=True)
        all_layers = MODELS[name]["num_hidden_layers"]
        assert isinstance(all_layers, int)
        layers = options.layers or [all_layers]
        found = measured(name, layers[0], cases, options)
        num_layers = layers[0]
        if len(layers) > 1:
            factor = (all_layers - layers[0]) / (layers[1] - layers[0])
            more = measured(name, layers[1], cases, options)
            found = [few.deeper(many, factor) for few, many in zip(found, more, strict=True)]
            num_layers = all_layers
        model_type = str(MODELS[name]["model_type"])
        config = plugins.load("families", model_type).read({**MODELS[name], "num_hidden_layers": num_layers})
        for case, each in zip(cases, found, strict=True):
            print(line(case, each, config), flush=True)
        print(f"  {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
