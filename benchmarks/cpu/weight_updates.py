"""New weights under running streams: the pause of the streams, and a storm of updates whose tokens are checked.

    python -m benchmarks.cpu.weight_updates
    python -m benchmarks.cpu.weight_updates --updates 200 --streams 64 --kills 20
    python -m benchmarks.cpu.weight_updates --model FOLDER --device cuda      # the pauses only
    python -m benchmarks.cpu.weight_updates --shape a --device cuda           # random weights of this shape

The first lines have the time to release and resume memory, and on a GPU the memory that is left, beside the memory of
a process that has only a CUDA context. The next lines have the longest pause of the streams, in ms, during an update of
each kind, beside their usual longest pause. "in place" pauses the engine before, so streams keep their KV. The others
compute it again.

A folder without weights gets random ones, which the engine does not read from files. With ``--shape a``, they are
written to files first.

The storm updates a tiny random model again and again, by turns from disk, by tensor, and by tensors in several calls.
Meanwhile streams run, and the scheduler process is killed now and then. Every token is computed again by transformers,
with the version that its answer names. A wrong token or a lost stream ends the program with an error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from aioengine import AsyncEngine, plugins
from aioengine.families._tensors import checkpoint_tensors
from aioengine.model_files.model_folder import DEMO_MODEL
from benchmarks.gpu.models import MODELS, write_folder
from tests.kit.waiting import until
from tests.kit.weight_versions import ARGUMENTS, GREEDY, Reference, save_version

if TYPE_CHECKING:
    from torch import Tensor

NUM_VERSIONS = 4
NUM_TOKENS = 100


def random_weights(folder: Path, device: str) -> dict[str, Tensor]:
    """Return random tensors [...] in bf16 for the model in a folder: name -> tensor."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    family = plugins.load("families", plugins.file_name(config["model_type"]))
    specs = checkpoint_tensors(family.read(config))
    generator = torch.Generator(device).manual_seed(0)
    return {
        name: torch.randn(spec.shape, dtype=torch.bfloat16, device=device, generator=generator).mul_(0.02)
        for name, spec in specs.items()
    }


class Pauses:
    """The times at which streams get chunks."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def read(self, stream: Any) -> None:
        last = None
        async for _ in stream:
            now = time.monotonic()
            if last is not None:
                self.longest_s = max(self.longest_s, now - last)
            last = now

    def take_ms(self) -> float:
        """Return the longest pause since the last call."""
        longest_s, self.longest_s = self.longest_s, 0.0
        return 1000 * longest_s


def has_files(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def stored_tensors(folder: Path, device: str) -> dict[str, Tensor]:
    return {
        name: tensor.to(device) for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()
    }


def context_bytes() -> int:
    """Return the memory on the GPU of a process with torch that does nothing."""
    before = free_bytes()
    code = "import torch; torch.ones(1, device='cuda'); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        size = before - free_bytes()
        process.communicate(b"\n")
    return size


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]


async def measure_pauses(folder: Path, device: str, num_streams: int) -> None:
    """Print the pauses of the streams during updates with the same weights."""
    pauses = Pauses()
    tensors = stored_tensors(folder, device) if has_files(folder) else random_weights(folder, device)
    kinds = ("disk", "tensors") if has_files(folder) else ("tensors",)
    options: dict[str, Any] = {"device": device, "enable_memory_saver": True, "max_running_requests": num_streams}
    options["load_format"] = "auto" if has_files(folder) else "dummy"
    params = {"temperature": 1.0, "ignore_eos": True, "max_new_tokens": 1000 if device == "cpu" else 20_000}
    context = context_bytes() if device == "cuda" else 0
    before = free_bytes() if device == "cuda" else 0
    async with AsyncEngine(model_path=str(folder), **options) as engine:
        for tags in ("kv_cache", "cuda_graph", "weights", None):
            await measure_release(engine, tags, before, context)
        streams = [engine.async_generate("Once upon", params, stream=True) for _ in range(num_streams)]
        readers = [asyncio.create_task(pauses.read(stream)) for stream in streams]
        await until(lambda: engine.stats()["num_steps"] > 10)
        await asyncio.sleep(2.0)
        print(f"usual: {pauses.take_ms():.0f} ms")
        for is_in_place in (True, False):
            for kind in kinds:
                if is_in_place:
                    await engine.pause_generation("in_place")
                if kind == "disk":
                    result = await engine.update_weights_from_disk(folder)
                else:
                    result = await engine.update_weights_from_tensor(tensors)
                assert result, result.message
                await engine.continue_generation()
                await asyncio.sleep(2.0)
                print(f"{kind}{', in place' if is_in_place else ''}: {pauses.take_ms():.0f} ms")
        assert not any(reader.done() for reader in readers), "the streams have ended too early"
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def measure_release(engine: AsyncEngine, tags: str | None, before: int, context: int) -> None:
    """Print the times of a release and a resume. before: free memory before the engine; 0: there is no GPU."""
    shown = tags or "all"
    start = time.perf_counter()
    await engine.release_memory_occupation(tags)
    released = time.perf_counter()
    if before:
        used = before - free_bytes()
        print(f"{shown} released: {used / 2**30:.2f} GiB are used; a context needs {context / 2**30:.2f}")
    resuming = time.perf_counter()
    await engine.resume_memory_occupation(tags)
    resumed = time.perf_counter()
    print(f"release {shown}: {1000 * (released - start):.0f} ms; resume: {1000 * (resumed - resuming):.0f} ms")


class Storm:
    """Streams, updates and kills of one engine."""

    def __init__(self, folders: dict[str, Path], seed: int) -> None:
        """folders: of the checkpoints, by version."""
        self._random = random.Random(seed)
        self._folders = folders
        self._tensors = {name: stored_tensors(folder, "cpu") for name, folder in folders.items()}
        self._reference = Reference(folders)
        self._is_over = False
        self.num_answers = self.num_tokens = self.num_mixed = 0

    async def ask(self, engine: AsyncEngine) -> None:
        """Ask for answers, and check them, until the storm is over."""
        while not self._is_over:
            prompt = [self._random.randrange(300) for _ in range(self._random.randrange(1, 60))]
            params = {**GREEDY, "max_new_tokens": self._random.randrange(1, NUM_TOKENS)}
            answer = await engine.async_generate(input_ids=prompt, sampling_params=params, return_logprob=True)
            versions = await asyncio.to_thread(self._reference.check, prompt, answer)
            self.num_answers += 1
            self.num_tokens += len(answer["output_ids"])
            self.num_mixed += len(versions) > 1

    async def update(self, engine: AsyncEngine, kind: int) -> None:
        """Load a random version. If a kill interrupts an update by tensors, it is repeated."""
        version = self._random.choice([*self._folders])
        while True:
            if kind == 0:
                result: Any = await engine.update_weights_from_disk(self._folders[version], weight_version=version)
            elif kind == 1:
                tensors = self._tensors[version]
                result = await engine.update_weights_from_tensor(tensors, weight_version=version)
            elif not await engine.begin_weight_update():
                result = False
            else:
                for name, tensor in self._tensors[version].items():
                    await engine.update_weights_from_tensor({name: tensor})  # ``end`` is refused if one failed
                result = await engine.end_weight_update(weight_version=version)
            if result:
                return
            await asyncio.sleep(0.05)

    async def run(self, num_updates: int, num_streams: int, num_kills: int) -> None:
        options: dict[str, Any] = {"enable_weights_cpu_backup": True, "max_restarts": 10 * num_kills + 3}
        folder = str(self._folders["default"])
        async with AsyncEngine(model_path=folder, **ARGUMENTS, **options) as engine:
            askers = [asyncio.create_task(self.ask(engine)) for _ in range(num_streams)]
            kills = set(self._random.sample(range(num_updates), min(num_kills, num_updates)))
            for number in range(num_updates):
                updating = asyncio.create_task(self.update(engine, number % 3))
                if number in kills:
                    await asyncio.sleep(self._random.random() / 5)
                    states = engine.health()["processes"]
                    for pid in (state["pid"] for state in states if state["role"] == "scheduler" and state["alive"]):
                        os.kill(pid, signal.SIGKILL)
                await updating
                await asyncio.sleep(self._random.random() / 10)
            self._is_over = True
            await asyncio.gather(*askers)
            stats = engine.stats()
        print(
            f"{num_updates} updates, {stats['num_restarts']} restarts: {self.num_answers} answers with "
            f"{self.num_tokens} tokens are as the reference computes them, {self.num_mixed} of several versions"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="folder whose updates are timed")
    parser.add_argument("--shape", choices=MODELS, help="instead of --model: the shape of a model with random weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = options.model
    if options.shape:
        model = write_folder(Path(tempfile.gettempdir()) / "bench-models", options.shape)
        if options.shape == "a" and not has_files(model):
            save_file(random_weights(model, options.device), model / "model.safetensors")
    asyncio.run(measure_pauses(model, options.device, options.streams))
    if options.device == "cpu":
        with tempfile.TemporaryDirectory() as folder:
            folders = {name: Path(folder) / name for name in ("default", *(f"v{i}" for i in range(1, NUM_VERSIONS)))}
            for seed, path in enumerate(folders.values()):
                save_version(path, seed)
            asyncio.run(Storm(folders, options.seed).run(options.updates, options.streams, options.kills))


if __name__ == "__main__":
    main()
