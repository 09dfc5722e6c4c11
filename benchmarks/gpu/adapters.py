"""LoRA adapters on a GPU (workload F4): what they cost in a decode step, and what copying them costs the steps beside.

    python -m benchmarks.gpu.adapters --models /tmp/bench-models --model b --batches 1 32 128
    python -m benchmarks.gpu.adapters --models /tmp/bench-models --model a --requests

Eight adapters of rank 16 on all seven projections; request i uses adapter i mod 8. Prints, for each batch, milliseconds
a step without adapters and with them, by turns, and the share of the rate that is left. Then the 50th and the 99th
percentile of the times of steps, without and with adapters that are read and placed beside them.

With ``--requests``, through the public API: W1 or W2 without adapters and with them, by turns, in output tokens per
second, on this engine and without adapters on one that has no places for them; then 1,000 names over 50 folders of rank
8 through 8 places.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from aioengine import AsyncEngine
from aioengine.api.args import engine_config
from aioengine.model_files.adapter_folder import CONFIG, TENSORS
from aioengine.model_files.model_folder import find_facts
from aioengine.protocol.messages import Adapter
from aioengine.runner.build import build
from aioengine.scheduler.scheduler import Scheduler
from aioengine.settings.config import LoraSettings
from aioengine.settings.machine import device_facts
from aioengine.settings.resolve import resolve
from benchmarks.gpu.models import MODELS, write_folder
from benchmarks.gpu.steps import Steps, finish, run

if TYPE_CHECKING:
    from concurrent.futures import Future

    from aioengine.runner.lora.reading import PackedAdapter
    from aioengine.runner.model_runner import ModelRunner
    from aioengine.runner.ticket import Ticket
    from aioengine.scheduler.plan import StepPlan, StepResult

NUM_ADAPTERS = 8
_NUM_RANDOM = 1 << 24


def write_adapters(folder: Path, model: str, *, count: int = NUM_ADAPTERS, rank: int = 16) -> list[Path]:
    """Write folders of adapters with random numbers for model "a" or "b", as peft does. Existing ones are kept."""
    paths = [folder / f"{model}-adapters-{rank}" / str(number) for number in range(count)]
    generator = torch.Generator().manual_seed(0)
    numbers = (torch.randn(_NUM_RANDOM, generator=generator) * 0.01).bfloat16()
    shapes = _shapes(model, rank)
    for path in paths:
        if (path / CONFIG).exists():
            continue
        path.mkdir(parents=True, exist_ok=True)
        numbers = numbers.roll(999_983)
        first, tensors = 0, dict[str, torch.Tensor]()
        for name, (rows, columns) in shapes.items():
            first = (first + 7919) % (_NUM_RANDOM - rows * columns)
            tensors[name] = numbers[first : first + rows * columns].view(rows, columns).clone()
        save_file(tensors, path / TENSORS)
        targets = sorted({name.split(".")[-3] for name in shapes})
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets, "bias": "none"}
        (path / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    return paths


def _shapes(model: str, rank: int) -> dict[str, tuple[int, int]]:
    config = MODELS[model]
    sizes = {name: value for name, value in config.items() if isinstance(value, int)}
    outer, inner, head = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    query, kv = sizes["num_attention_heads"] * head, sizes["num_key_value_heads"] * head
    linears = {
        "self_attn.q_proj": (query, outer),
        "self_attn.k_proj": (kv, outer),
        "self_attn.v_proj": (kv, outer),
        "self_attn.o_proj": (outer, query),
        "mlp.gate_proj": (inner, outer),
        "mlp.up_proj": (inner, outer),
        "mlp.down_proj": (outer, inner),
    }
    found: dict[str, tuple[int, int]] = {}
    for layer in range(sizes["num_hidden_layers"]):
        for name, (num_outputs, num_inputs) in linears.items():
            stem = f"base_model.model.model.layers.{layer}.{name}"
            found[f"{stem}.lora_A.weight"] = rank, num_inputs
            found[f"{stem}.lora_B.weight"] = num_outputs, rank
    return found


class AdapterRunner:
    """A runner whose requests use adapter ``uid`` mod ``num_adapters``; 0: none of them uses one."""

    def __init__(self, runner: ModelRunner, num_adapters: int) -> None:
        self._runner = runner
        self._num_adapters = num_adapters

    def launch(self, plan: StepPlan) -> Ticket:
        for row in plan.new_rows:
            row.adapter_slot = row.uid % self._num_adapters + 1 if self._num_adapters else 0
        return self._runner.launch(plan)

    def collect(self, ticket: Ticket) -> StepResult:
        return self._runner.collect(ticket)


async def offline(engine: AsyncEngine, lora_path: list[str | None] | None) -> float:
    """Return the output tokens per second of W1 or W2; request i uses adapter i mod their number."""
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    counts = [random.randint(100, 1024) for _ in range(256)]
    params = [{"max_new_tokens": count, "temperature": 0.6, "ignore_eos": True} for count in counts]
    names = None if lora_path is None else [lora_path[i % len(lora_path)] for i in range(256)]
    for _ in range(100):
        if await engine.flush_cache():
            break
        await asyncio.sleep(0.02)
    started = time.perf_counter()
    answers = await engine.async_generate(input_ids=prompts, sampling_params=params, lora_path=names)
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == counts
    return sum(counts) / (time.perf_counter() - started)


async def through_requests(models: Path, model: str) -> None:
    folder, folders = write_folder(models, model), [str(path) for path in write_adapters(models, model)]
    engine = AsyncEngine(str(folder), load_format="dummy")
    async with engine:
        await offline(engine, None)
        plain = [await offline(engine, None) for _ in range(2)]
    print(f"no places for adapters: {max(plain):.0f} tok/s", flush=True)
    engine = AsyncEngine(
        str(folder), load_format="dummy", enable_lora=True, lora_paths=folders, max_loras_per_batch=NUM_ADAPTERS
    )
    async with engine:
        await offline(engine, [*folders])
        rates: dict[str, list[float]] = {"unused": [], "used": []}
        for _ in range(2):
            rates["unused"].append(await offline(engine, None))
            rates["used"].append(await offline(engine, [*folders]))
    unused, used = (max(values) for values in rates.values())
    print(f"places that are not used: {unused:.0f} tok/s ({unused / max(plain):.3f})", flush=True)
    print(f"{NUM_ADAPTERS} adapters: {used:.0f} tok/s ({used / unused:.3f} of the rate without)", flush=True)
    await many_names(models, model)


async def many_names(models: Path, model: str, *, num_names: int = 1000, num_folders: int = 50) -> None:
    """Use ``num_names`` names, four requests each, in a random order, 256 at a time."""
    folders = write_adapters(models, model, count=num_folders, rank=8)
    engine = AsyncEngine(
        str(write_folder(models, model)), load_format="dummy", enable_lora=True, max_lora_rank=16,
        lora_target_modules="all", max_loras_per_batch=NUM_ADAPTERS, max_loaded_loras=num_folders,
    )  # fmt: skip
    async with engine:
        names = [f"tenant-{number}" for number in range(num_names)]
        for number, name in enumerate(names):
            result = await engine.load_lora_adapter(name, str(folders[number % num_folders]))
            if not result.success:
                raise RuntimeError(result.error_message)
        chosen = [*names] * 4
        random.Random(0).shuffle(chosen)
        places = asyncio.Semaphore(256)
        params = {"max_new_tokens": 16, "temperature": 0.6, "ignore_eos": True}

        async def one(number: int, name: str) -> int:
            async with places:
                prompt = [(number * 7919 + place * 31) % 10_000 for place in range(64)]
                answer = await engine.async_generate(input_ids=prompt, sampling_params=params, lora_path=name)
            return answer["meta_info"]["completion_tokens"]

        started = time.perf_counter()
        counts = await asyncio.gather(*(one(number, name) for number, name in enumerate(chosen)))
        seconds = time.perf_counter() - started
    lost = sum(count != 16 for count in counts)
    print(
        f"{num_names} names over {num_folders} folders: {len(chosen)} requests in {seconds:.1f} s, {lost} lost",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--model", choices=["a", "b"], default="b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--cached", type=int, default=512)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--max-rank", type=int, default=16)
    parser.add_argument("--requests", action="store_true", help="through the public API")
    options = parser.parse_args()
    if options.requests:
        asyncio.run(through_requests(options.models, options.model))
        return
    config = engine_config(str(write_folder(options.models, options.model)), {"load_format": "dummy"})
    settings = resolve(config, find_facts(config.model), device_facts())
    lora = LoraSettings(num_slots=NUM_ADAPTERS, max_rank=options.max_rank)
    settings = replace(settings, runner=replace(settings.runner, lora=lora))
    folders = write_adapters(options.models, options.model, rank=options.rank)
    runner = build(settings, lambda _: None)
    print(f"started: {runner.facts}", flush=True)
    place(runner, folders)
    num_pages = int(runner.facts["num_pages"])

    def steps_of(batch: int, num_adapters: int, first_uid: int) -> Steps:
        scheduler = Scheduler(settings.scheduler, num_pages=num_pages, page_size=settings.memory.page_size)
        steps = Steps(AdapterRunner(runner, num_adapters), scheduler)  # type: ignore[arg-type]
        run(steps, batch, num_cached=options.cached, num_steps=100, first_uid=first_uid)
        return steps

    for batch in options.batches:
        times: dict[int, list[float]] = {0: [], NUM_ADAPTERS: []}
        launches: dict[int, list[float]] = {0: [], NUM_ADAPTERS: []}
        for number in range(3):
            for num_adapters in times:
                steps = steps_of(batch, num_adapters, 10_000 * (2 * number + (num_adapters > 0)))
                times[num_adapters].append(statistics.median(steps.parts["wall"]))
                launches[num_adapters].append(statistics.median(steps.parts["launch"]))
                finish(steps)
        without, used = (statistics.median(values) for values in times.values())
        host = [statistics.median(values) for values in launches.values()]
        print(
            f"batch {batch:4}: {without:.3f} ms without, {used:.3f} with adapters: {without / used:.3f} of the rate; "
            f"launch {host[0]:.3f} and {host[1]:.3f} ms",
            flush=True,
        )
    for is_loading in (False, True, False, True):
        scheduler = Scheduler(settings.scheduler, num_pages=num_pages, page_size=settings.memory.page_size)
        beside(runner, scheduler, folders[-1], is_loading=is_loading)


def place(runner: ModelRunner, folders: list[Path]) -> None:
    """Load the adapters of folders into the slots from 1 on."""
    for slot, folder in enumerate(folders, 1):
        started = time.perf_counter()
        host = runner.adapters.read(Adapter(slot, folder.name, str(folder), ""))
        read = time.perf_counter()
        runner.adapters.place(slot, host).result()
        if slot == len(folders):
            placed = time.perf_counter()
            print(
                f"an adapter of {host.num_bytes >> 20} MiB: read in {1000 * (read - started):.0f} ms, placed in "
                f"{1000 * (placed - read):.0f} ms",
                flush=True,
            )


class LoadingSteps(Steps):
    """Between its steps it places the adapters that a thread reads, again and again, in a slot that nobody uses."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, folder: Path) -> None:
        super().__init__(AdapterRunner(runner, NUM_ADAPTERS - 1), scheduler)  # type: ignore[arg-type]
        self._of = runner
        self._adapter = Adapter(1, folder.name, str(folder), "")
        self._read: list[PackedAdapter] = []
        self._placed: Future[None] | None = None
        self.num_placed = 0
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self._work)

    def step(self) -> None:
        super().step()
        if self._read and (self._placed is None or self._placed.done()):
            self._placed = self._of.adapters.place(NUM_ADAPTERS, self._read.pop())
            self.num_placed += 1

    def _work(self) -> None:
        while not self.is_over.is_set():
            host = self._of.adapters.read(self._adapter)
            while self._read and not self.is_over.is_set():
                time.sleep(0.001)
            self._read.append(host)


def beside(runner: ModelRunner, scheduler: Scheduler, folder: Path, *, is_loading: bool) -> None:
    """Print the times of decode steps, with an adapter that is read and placed again and again or without."""
    steps = LoadingSteps(runner, scheduler, folder)
    if is_loading:
        steps.thread.start()
    run(steps, 32, num_cached=128, num_steps=600, first_uid=90_000)
    steps.is_over.set()
    if is_loading:
        steps.thread.join()
    wall = sorted(steps.parts["wall"])
    p50, p99, most = (wall[min(int(len(wall) * share), len(wall) - 1)] for share in (0.5, 0.99, 1.0))
    print(
        f"32 rows, {steps.num_placed} adapters placed: a step p50 {p50:.3f} ms, p99 {p99:.3f}, most {most:.3f}",
        flush=True,
    )
    finish(steps)


if __name__ == "__main__":
    main()
