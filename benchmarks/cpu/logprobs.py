"""What logprobs cost on a CPU: rows C2 and C3 of ``workloads`` without, with those of chosen tokens, with the top 5.

    python -m benchmarks.cpu.logprobs --models /tmp/bench-models
    python -m benchmarks.cpu.logprobs --models /tmp/bench-models --num-new 16 --prompt 512 --repeat 5

decode  32 concurrent requests of 64 to 256 tokens, 64 out, greedy: output tokens per second
prompt  one prompt of 2048 tokens, 1 out: prompt tokens per second, with logprobs of the whole prompt

The three take turns. CPU seconds are those of the engine's processes: they say more than the rate where the machine has
other work. ``of plain``: the median of the CPU time without logprobs over that with them, by turns.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

import psutil

from aioengine import Engine
from benchmarks.cpu.models import QWEN25_05B, TINY, write_model

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chosen": {"return_logprob": True},
    "top 5": {"return_logprob": True, "top_logprobs_num": 5},
}


def cpu_s(engine: Engine) -> float:
    """CPU time of the engine's processes so far."""
    times = [psutil.Process(pid).cpu_times() for pid in engine.get_all_child_pids()]
    return sum(each.user + each.system for each in times)


def measure(engine: Engine, prompts: list[list[int]], num_new: int, options: dict[str, Any]) -> tuple[float, float]:
    """Wall time and CPU time of a call, in seconds."""
    engine.flush_cache()
    used_s, started = cpu_s(engine), time.perf_counter()
    params = {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True}
    engine.generate(input_ids=prompts, sampling_params=params, **options)
    return time.perf_counter() - started, cpu_s(engine) - used_s


def compare(engine: Engine, name: str, lengths: list[int], num_new: int, repeat: int) -> None:
    """Print a line for each kind."""
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    is_of_prompt = name == "prompt"
    for turn in range(-1, repeat):
        draw = random.Random(turn)
        prompts = [[draw.randrange(4000) for _ in range(length)] for length in lengths]
        for kind, options in KINDS.items():
            more = {"logprob_start_len": 0} if options and is_of_prompt else {}
            figures = measure(engine, prompts, num_new, {**options, **more})
            if turn >= 0:  # the first is the warm-up
                found[kind].append(figures)
    num_tokens = sum(lengths) if is_of_prompt else num_new * len(lengths)
    for kind, figures in found.items():
        rate = num_tokens / statistics.median(wall_s for wall_s, _ in figures)
        pairs = zip(found["plain"], figures, strict=True)
        ratio = statistics.median(plain_s / own_s for (_, plain_s), (_, own_s) in pairs)
        own_s = statistics.median(own_s for _, own_s in figures)
        print(f"{name:6} {kind:6} {rate:9.1f} tok/s   CPU {own_s:7.2f} s   of plain {ratio:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder for the model, written when missing")
    parser.add_argument("--tiny", action="store_true", help="the model of row C5")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--num-new", type=int, default=64, help="output tokens of each request")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the one prompt")
    options = parser.parse_args()
    config, folder = (TINY, options.models / "tiny") if options.tiny else (QWEN25_05B, options.models / "qwen2.5-0.5b")
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    with Engine(write_model(folder, config), dtype=options.dtype) as engine:
        compare(engine, "decode", [draw.randint(64, 256) for _ in range(32)], options.num_new, options.repeat)
        compare(engine, "prompt", [options.prompt], 1, options.repeat)


if __name__ == "__main__":
    main()
