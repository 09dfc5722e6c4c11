"""What logprobs and structured output cost on a CPU: rows C2 and C3 of ``workloads`` with them and without, by turns.

    python -m benchmarks.cpu.request_options --models /tmp/bench-models
    python -m benchmarks.cpu.request_options --models /tmp/bench-models --num-new 16 --prompt 512 --repeat 5

decode  32 concurrent requests of 64 to 256 tokens, 64 out, greedy: output tokens per second. The prompts are in the
        prefix cache, so the time is that of the decode steps. Without; with the logprobs of the chosen tokens; with
        the top 5 beside them; with a regex that leaves many tokens in each place; with a JSON schema, of whose text
        some is given (those tokens are not computed one by one).
prompt  one prompt of 2048 tokens, 1 out: prompt tokens per second, with logprobs of the whole prompt

CPU seconds are those of the engine's processes: they say more than the rate where the machine has other work.
``of plain``: the median of the CPU time without over that with the option, by turns.
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
from benchmarks.schemas import list_schema

Options = dict[str, Any]
Kinds = dict[str, tuple[Options, Options]]
"""Sampling parameters and keyword arguments of the call."""

CHOSEN: Options = {"return_logprob": True}
TOP_5: Options = {"return_logprob": True, "top_logprobs_num": 5}
DECODES: Kinds = {
    "plain": ({}, {}),
    "chosen": ({}, CHOSEN),
    "top 5": ({}, TOP_5),
    "regex": ({"regex": "[a-z ]{1000,}"}, {}),
    "schema": ({"json_schema": list_schema(0)}, {}),
}
PROMPTS: Kinds = {
    "plain": ({}, {}),
    "chosen": ({}, {**CHOSEN, "logprob_start_len": 0}),
    "top 5": ({}, {**TOP_5, "logprob_start_len": 0}),
}


def cpu_s(engine: Engine) -> float:
    """Return the CPU time of the engine's processes until now."""
    times = [psutil.Process(pid).cpu_times() for pid in engine.get_all_child_pids()]
    return sum(each.user + each.system for each in times)


def measure(
    engine: Engine, prompts: list[list[int]], num_new: int, kind: tuple[Options, Options]
) -> tuple[float, float]:
    """Return wall time and CPU time of a call, in seconds."""
    sampling, options = kind
    params = {"temperature": 0, "ignore_eos": True, **sampling}
    if num_new > 1:
        engine.generate(input_ids=prompts, sampling_params={**params, "max_new_tokens": 1})
    else:
        engine.flush_cache()
    used_s, started = cpu_s(engine), time.perf_counter()
    engine.generate(input_ids=prompts, sampling_params={**params, "max_new_tokens": num_new}, **options)
    return time.perf_counter() - started, cpu_s(engine) - used_s


def compare(engine: Engine, name: str, kinds: Kinds, lengths: list[int], num_new: int, repeat: int) -> None:
    """Print a line for each kind. With ``num_new`` 1 the prompts are measured, else what follows them."""
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for turn in range(-1, repeat):
        draw = random.Random(turn)
        prompts = [[draw.randrange(4000) for _ in range(length)] for length in lengths]
        for kind, options in kinds.items():
            figures = measure(engine, prompts, num_new, options)
            if turn >= 0:  # the first is the warm-up
                found[kind].append(figures)
    num_tokens = sum(lengths) if num_new == 1 else num_new * len(lengths)
    for kind, figures in found.items():
        rate = num_tokens / statistics.median(wall_s for wall_s, _ in figures)
        ratios = [plain_s / own_s for (_, plain_s), (_, own_s) in zip(found["plain"], figures, strict=True)]
        own_s = statistics.median(own_s for _, own_s in figures)
        print(
            f"{name:6} {kind:6} {rate:9.1f} tok/s   CPU {own_s:7.2f} s   "
            f"of plain {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
            flush=True,
        )


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
        lengths = [draw.randint(64, 256) for _ in range(32)]
        compare(engine, "decode", DECODES, lengths, options.num_new, options.repeat)
        compare(engine, "prompt", PROMPTS, [options.prompt], 1, options.repeat)


if __name__ == "__main__":
    main()
