"""How fast the weights of an 8B model (16 GB in bf16, four shards) come from the page cache to a GPU.

    python -m benchmarks.gpu.loading --folder /tmp/bench-models [--layers 32] [--sweep] [--json FILE]

The folder gets files of random weights unless they are there. Printed are GB/s:

bus         copies from pinned memory to the GPU
read_N      N threads that only read the files into pinned memory
reading     reading to the GPU, with the check for numbers that are not finite (median of ``--repeat``)
load        ``weights.load``, which also brings the weights into the kernels' form; first_load: the first time
mapped      the first shard, mapped by the safetensors library and copied tensor by tensor
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

from aioengine import models
from aioengine.families._tensors import checkpoint_tensors
from aioengine.families.llama import LlamaFamily
from aioengine.model_files.checkpoint import read_headers
from aioengine.models._base import ModelOptions
from aioengine.runner import weight_reading, weights
from benchmarks.gpu.models import LARGE

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioengine.models._base import Model

NUM_SHARDS = 4
BLOCK = 1 << 28


def write_shards(folder: Path, config: dict[str, object]) -> None:
    """Write the tensors of ``config`` with random numbers, in ``NUM_SHARDS`` files."""
    if len(list(folder.glob("*.safetensors"))) == NUM_SHARDS:
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    block = (torch.randn(BLOCK // 2, device="cuda") * 0.02).to(torch.bfloat16).cpu().view(torch.uint8).numpy()
    shapes = [(name, spec.shape) for name, spec in checkpoint_tensors(LlamaFamily.read(config)).items()]
    share = -(-len(shapes) // NUM_SHARDS)
    parts = [shapes[first : first + share] for first in range(0, len(shapes), share)]

    def write(number: int) -> None:
        header: dict[str, object] = {}
        end = 0
        for name, shape in parts[number]:
            begin, end = end, end + 2 * torch.Size(shape).numel()
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        with (folder / f"model-{number}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for begin in range(0, end, BLOCK):
                file.write(block[: min(BLOCK, end - begin)])

    with ThreadPoolExecutor(NUM_SHARDS) as pool:
        list(pool.map(write, range(NUM_SHARDS)))


def seconds(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def bus_speed() -> float:
    """Return the GB/s of copies of 256 MiB."""
    pinned, there = torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True), torch.empty(BLOCK, device="cuda").byte()
    there.copy_(pinned)
    return 20 * BLOCK / 1e9 / seconds(lambda: [there.copy_(pinned, non_blocking=True) for _ in range(20)])


def read_speed(folder: Path, num_threads: int) -> float:
    """Return the GB/s of reading all files into pinned memory."""
    size = weight_reading.PIECE_BYTES
    buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy() for _ in range(num_threads)]
    files = {path: os.open(path, os.O_RDONLY) for path in sorted(folder.glob("*.safetensors"))}
    places = [(file, begin) for path, file in files.items() for begin in range(0, path.stat().st_size, size)]
    total = sum(path.stat().st_size for path in files)

    def read(thread: int) -> None:
        for file, begin in places[thread::num_threads]:
            os.preadv(file, [buffers[thread]], begin)

    with ThreadPoolExecutor(num_threads) as pool:
        speed = total / 1e9 / seconds(lambda: list(pool.map(read, range(num_threads))))
    for file in files.values():
        os.close(file)
    return speed


def load_speed(model: Model, folder: Path, num_bytes: int) -> float:
    """Return the GB/s of reading all weights again, with their checks."""

    def load() -> None:
        weights.load(model, folder, load_format="safetensors", seed=0, report=lambda done, total: None)

    took = seconds(load)
    model.open_for_loading()
    return num_bytes / 1e9 / took


def reading_speed(model: Model, folder: Path, num_bytes: int) -> float:
    """Return the GB/s of the reading alone, with the check for numbers that are not finite."""
    entries, targets = read_headers(folder, "model."), model.weights()
    return num_bytes / 1e9 / seconds(lambda: weight_reading.read_all(entries, targets, lambda done, total: None))


def mapped_speed(model: Model, folder: Path) -> float:
    """Return the GB/s of the first shard, mapped and copied."""
    path = min(folder.glob("*.safetensors"))
    targets = model.weights()

    def load() -> None:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no dict
                targets[name].tensor.copy_(file.get_tensor(name))

    return path.stat().st_size / 1e9 / seconds(load)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/bench-models"))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--sweep", action="store_true", help="other numbers of threads and sizes of pieces, too")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = LARGE | {"num_hidden_layers": options.layers}
    folder = options.folder / f"loading-{options.layers}"
    print(f"files written in {seconds(lambda: write_shards(folder, config)):.1f} s", flush=True)
    device = torch.device("cuda")
    torch.set_grad_enabled(False)
    model = models.build(config, ModelOptions(dtype=torch.bfloat16, device=device, max_positions=4096))
    num_bytes = sum(entry.num_bytes for entry in read_headers(folder, "model."))
    figures = {"gigabytes": num_bytes / 1e9, "bus": bus_speed()}
    for num_threads in (1, 4, 8, 16):
        figures[f"read_{num_threads}"] = read_speed(folder, num_threads)
    figures["first_load"] = load_speed(model, folder, num_bytes)
    figures["reading"] = statistics.median(reading_speed(model, folder, num_bytes) for _ in range(options.repeat))
    figures["load"] = statistics.median(load_speed(model, folder, num_bytes) for _ in range(options.repeat))
    for name, figure in figures.items():
        print(f"{name:<12}{figure:8.2f}", flush=True)
    if options.sweep:
        for readers in (4, 8, 12, 16):
            for megabytes in (2, 4, 8, 16):
                weight_reading.NUM_READERS, weight_reading.PIECE_BYTES = readers, megabytes << 20
                reading_speed(model, folder, num_bytes)  # allocates its pinned memory
                print(f"{readers} readers, {megabytes} MiB: {reading_speed(model, folder, num_bytes):.2f}", flush=True)
    figures["mapped"] = mapped_speed(model, folder)
    print(f"{'mapped':<12}{figures['mapped']:8.2f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
