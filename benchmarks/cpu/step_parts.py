"""The parts of a decode step on a CPU: time, share and operator calls, beside the limits of the machine.

    python -m benchmarks.cpu.step_parts --models /tmp/bench-models [--model small] [--rows 1 32] [--quantization int8]

Scheduler and runner run in one process, with random weights and greedy rows. For each number of rows it prints:

- the time of a step, the CPU time of the main thread in it, and the time of all its matmuls alone in the same order
  (minimum and median)
- the time to read the weights and the KV cache at the rate at which all threads read memory
- the calls of Python functions, and of C functions from Python
- for each part of the runner: operator calls from Python, operator calls in all (with the calls that operators make),
  and the smallest CPU time of the main thread, with about 0.5 us for each look at the clock

Counts of calls do not depend on the load of the machine, and CPU time depends less on it than the time of a step.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from aioengine.api.args import engine_config
from aioengine.attention.fused import FusedAttention
from aioengine.attention.torch import TorchAttention
from aioengine.child_process.host import keep_freed_memory
from aioengine.kernels import gated_linear
from aioengine.layers import attention as attention_layers
from aioengine.layers.embedding import EmbeddingTable
from aioengine.layers.linear import Linear
from aioengine.layers.norm import RMSNorm
from aioengine.layers.rope import RotaryEmbedding
from aioengine.model_files.model_folder import find_facts
from aioengine.models._decoder import DecoderModel
from aioengine.protocol.messages import Limits, Sampling, Submit, TextRules
from aioengine.runner.build import build
from aioengine.runner.inputs import InputBuilder
from aioengine.runner.model_runner import ModelRunner
from aioengine.runner.rows import RowTable
from aioengine.runner.sampling.sampler import Sampler
from aioengine.scheduler.scheduler import Scheduler
from aioengine.settings.machine import device_facts
from aioengine.settings.resolve import resolve
from benchmarks.cpu.models import QWEN25_05B, TINY, write_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.autograd.profiler_util import FunctionEvent

MODELS = {"small": QWEN25_05B, "tiny": TINY}
ENDLESS = 1 << 20
NUM_CACHED = 128
NUM_WARM = 4
READ_BYTES = 512 << 20
STEP = "other work of a step"
PARTS: list[tuple[object, str, str]] = [
    (ModelRunner, "launch", STEP),
    (ModelRunner, "collect", "collect"),
    (InputBuilder, "columns_of", "inputs"),
    (InputBuilder, "find_wrong_ids", "inputs"),
    (InputBuilder, "build", "inputs"),
    (FusedAttention, "prepare", "attention inputs"),
    (TorchAttention, "prepare", "attention inputs"),
    (EmbeddingTable, "__call__", "embedding"),
    (RotaryEmbedding, "tables", "rotary tables"),
    (RMSNorm, "__call__", "norms"),
    (RMSNorm, "of_sum", "norms"),
    (attention_layers, "rotate_heads", "rotation and KV write"),
    (FusedAttention, "attend", "attention"),
    (TorchAttention, "attend", "attention"),
    (gated_linear, "activate_and_mul", "activation"),
    (DecoderModel, "compute_logits", "head"),
    (Sampler, "sample", "sampling"),
    (RowTable, "write_tokens", "store tokens"),
]
"""Owner, name of the function, and the part of the step to which its time belongs without inner parts."""


class Clock:
    """Measures the parts of steps.

    Attributes:
        seconds: part -> seconds of the current step.
        matmuls: the linear layers and inputs [T, D] of the current step, in order.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.matmuls: list[tuple[Callable[..., object], tuple[object, ...]]] = []
        self.is_on = self.is_profiling = False
        self._inner = [0.0]
        for owner, name, part in PARTS:
            setattr(owner, name, self._timed(getattr(owner, name), part))
        Linear.__call__ = self._timed(Linear.__call__, None)  # type: ignore[method-assign]

    def _timed(self, function: Callable[..., object], part: str | None) -> Callable[..., object]:
        """Return the function with a clock. part: None for a linear layer, whose part is named after its tensors."""

        @functools.wraps(function)
        def timed(*args: object, **options: object) -> object:
            if not self.is_on:
                return function(*args, **options)
            name = part
            if isinstance(args[0], Linear):
                name = f"matmul of {' and '.join(args[0].sizes)}"
            if part is None or part == "head":
                self.matmuls.append((function, args))
            assert name is not None
            if self.is_profiling:
                with record_function(f"part {name}"):
                    return function(*args, **options)
            self._inner.append(0.0)
            started = time.thread_time()
            result = function(*args, **options)
            seconds = time.thread_time() - started
            self.seconds[name] += seconds - self._inner.pop()
            self._inner[-1] += seconds
            return result

        return timed


class Steps:
    """A scheduler and a runner in one process."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler) -> None:
        self.runner = runner
        self.scheduler = scheduler

    def step(self) -> tuple[float, float]:
        """Run a step. Return the seconds of the runner, and the CPU seconds of the main thread in it."""
        plan = self.scheduler.schedule(0.0)
        assert plan is not None, "no request is left"
        started, cpu_started = time.perf_counter(), time.thread_time()
        result = self.runner.collect(self.runner.launch(plan))
        seconds = time.perf_counter() - started, time.thread_time() - cpu_started
        self.scheduler.apply(result, 0.0)
        return seconds

    def open(self, num_rows: int, vocab_size: int, first_uid: int) -> None:
        """Submit requests of ``NUM_CACHED`` tokens, and compute their prompts and a few decode steps."""
        for uid in range(first_uid, first_uid + num_rows):
            prompt = [(uid * 7919 + place * 31) % (vocab_size - 2) for place in range(NUM_CACHED)]
            sampling = Sampling(uid, temperature=0.0)
            self.scheduler.requests.submit(Submit(uid, prompt, sampling, Limits(ENDLESS), TextRules()))
        running = self.scheduler.requests.running
        while len(running) < num_rows or any(request.num_computed < NUM_CACHED for request in running):
            self.step()
        for _ in range(NUM_WARM):
            self.step()

    def close(self) -> None:
        """Drop all requests."""
        self.scheduler.requests.forget_all()
        while (plan := self.scheduler.schedule(0.0)) is not None:
            self.scheduler.apply(self.runner.collect(self.runner.launch(plan)), 0.0)


def read_rate() -> float:
    """Return the bytes per second that all threads read from memory: the best of several reductions."""
    numbers = torch.ones(READ_BYTES // 4)
    rates = []
    for reduce in (torch.sum, torch.amax, functools.partial(torch.dot, numbers)):
        for _ in range(5):
            started = time.perf_counter()
            reduce(numbers)
            rates.append(READ_BYTES / (time.perf_counter() - started))
    return max(rates)


def part_of(event: FunctionEvent) -> str | None:
    """Return the part in which an operator ran; None: outside of a step."""
    outer = event.cpu_parent
    while outer is not None and not outer.name.startswith("part "):
        outer = outer.cpu_parent
    return None if outer is None else outer.name.removeprefix("part ")


def count_calls(steps: Steps, clock: Clock) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Return the operator calls of a step by part: from Python, and in all; and the calls from Python by operator."""
    clock.is_on = clock.is_profiling = True
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        steps.step()
    clock.is_on = clock.is_profiling = False
    direct: Counter[str] = Counter()
    total: Counter[str] = Counter()
    operators: Counter[str] = Counter()
    for event in profiled.events() or []:
        part = part_of(event)
        if part is not None and "::" in event.name:
            total[part] += 1
            if event.cpu_parent.name.startswith("part "):
                direct[part] += 1
                operators[f"{part}: {event.name}"] += 1
    return direct, total, operators


def count_python_calls(steps: Steps) -> Counter[str]:
    """Return the calls of a step by kind: of Python functions ("call"), and of C functions from Python ("c_call")."""
    kinds: Counter[str] = Counter()
    plan = steps.scheduler.schedule(0.0)
    assert plan is not None, "no request is left"
    sys.setprofile(lambda frame, kind, _argument: kinds.update((kind,) if frame.f_code.co_name != "timed" else ()))
    result = steps.runner.collect(steps.runner.launch(plan))
    sys.setprofile(None)
    steps.scheduler.apply(result, 0.0)
    return kinds


def times_of_parts(steps: Steps, clock: Clock, num_steps: int) -> dict[str, float]:
    """Return the smallest microseconds of each part."""
    times: dict[str, list[float]] = defaultdict(list)
    clock.is_on = True
    for _ in range(num_steps):
        clock.seconds.clear()
        clock.matmuls.clear()
        steps.step()
        for part, seconds in clock.seconds.items():
            times[part].append(seconds * 1e6)
    clock.is_on = False
    return {part: min(values) for part, values in times.items()}


def replay_matmuls(clock: Clock) -> float:
    """Run the matmuls of the last timed step alone. Return the seconds."""
    started = time.perf_counter()
    with torch.inference_mode():
        for function, args in clock.matmuls:
            function(*args)
    return time.perf_counter() - started


def measure(steps: Steps, clock: Clock, options: argparse.Namespace, rate: float) -> None:
    python = count_python_calls(steps)
    direct, total, operators = count_calls(steps, clock)
    parts = times_of_parts(steps, clock, options.steps)
    walls: list[float] = []
    cpu: list[float] = []
    matmuls: list[float] = []
    for _ in range(options.steps):
        seconds, cpu_seconds = steps.step()
        walls.append(seconds * 1e3)
        cpu.append(cpu_seconds * 1e3)
        matmuls.append(replay_matmuls(clock) * 1e3)
    num_bytes = steps.runner.facts["weights_bytes"]
    assert isinstance(num_bytes, int)
    limit = num_bytes / rate * 1e3
    print(
        f"  step {min(walls):.3f} ms (median {statistics.median(walls):.3f}), CPU {min(cpu):.3f} "
        f"({statistics.median(cpu):.3f}); matmuls alone {min(matmuls):.3f} "
        f"({statistics.median(matmuls):.3f}); reading the weights {limit:.3f} at {rate / 1e9:.1f} GB/s, "
        f"{limit / min(walls):.2f} of the step"
    )
    print(f"  {python['call']} calls of Python functions, {python['c_call']} of C functions")
    print(f"  {'part':<40}{'calls':>8}{'in all':>8}{'us':>10}")
    for part, microseconds in sorted(parts.items(), key=lambda entry: -entry[1]):
        print(f"  {part:<40}{direct[part]:>8}{total[part]:>8}{microseconds:>10.1f}")
    print(f"  {'sum':<40}{direct.total():>8}{total.total():>8}{sum(parts.values()):>10.1f}", flush=True)
    if options.operators:
        for name, count in sorted(operators.items(), key=lambda entry: (entry[0].partition(":")[0], -entry[1])):
            print(f"    {count:>6}  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder for the config files, written when missing")
    parser.add_argument("--model", choices=[*MODELS], nargs="+", default=[*MODELS])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--quantization", choices=["int8", "int4"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--operators", action="store_true", help="print the calls by operator")
    options = parser.parse_args()
    keep_freed_memory()
    clock = Clock()
    for name in options.model:
        folder = write_config(options.models / f"{name}-config", MODELS[name])
        arguments: dict[str, object] = {"device": "cpu", "dtype": options.dtype, "load_format": "dummy"}
        arguments["quantization"] = options.quantization
        arguments |= {"context_length": 2048, "max_running_requests": sum(options.rows)}
        config = engine_config(str(folder), arguments | {"max_total_tokens": sum(options.rows) * 512})
        settings = resolve(config, find_facts(config.model), device_facts())
        runner = build(settings, lambda _: None)
        num_pages = runner.facts["num_pages"]
        assert isinstance(num_pages, int)
        rate = read_rate()
        for number, num_rows in enumerate(options.rows):
            scheduler = Scheduler(settings.scheduler, num_pages=num_pages, page_size=settings.memory.page_size)
            steps = Steps(runner, scheduler)
            print(f"{name}, {num_rows} rows, {options.dtype}, {torch.get_num_threads()} threads")
            steps.open(num_rows, MODELS[name].vocab_size, 10_000 * number)
            measure(steps, clock, options, rate)
            steps.close()


if __name__ == "__main__":
    main()
