"""Plain decoding and speculation on a GPU, by turns, with random weights: milliseconds a token.

    python -m benchmarks.gpu.speculation --models /tmp/bench-models
    python -m benchmarks.gpu.speculation --models /tmp/bench-models --cases draft --rows 1 --profile

draft     model b and a draft model of one layer, which is always accepted: 4 drafts, 512 tokens in
eagle3    model b and an EAGLE-3 head, which uses the model's output head: 4 drafts, 512 tokens in. This output head is
          zero, so both always choose the same token, and all drafts are accepted
ngram     model a repeats its last token, and n-grams are always accepted: 4 drafts, 512 tokens in
new-a     model a, temperature 1: nothing repeats, and n-grams propose nothing
new-b     the same with model b

Each line has the medians of both engines, the factor, the numbers of accepted and proposed drafts, and whether both
engines gave the same tokens. (Without deterministic mode, they may differ.)
``--profile`` adds the parts of a step from torch's trace: milliseconds of the host in each part, and of the device.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from aioengine import AsyncEngine
from benchmarks.gpu import step_profile
from benchmarks.gpu.models import MODELS, write_folder

SHORT, LONG = 16, 144
WARM_UP_S = 0.7
PROFILED_TOKENS, MORE_TOKENS = 9000, 1500
NUM_KERNELS = 9
NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_steps": 4}


class Case(NamedTuple):
    """A model, the arguments of speculation, and its workload.

    first_zeroed: ``o_proj`` and ``down_proj`` are zero in this and all later layers; None: in no layer.
    has_zero_head: the output head is zero.
    """

    model: str
    arguments: dict[str, Any]
    first_zeroed: int | None
    temperature: float
    rows: tuple[int, ...]
    has_zero_head: bool = False


CASES = {
    "draft": Case("b", {"speculative_algorithm": "STANDALONE", "speculative_num_steps": 4}, 1, 0.0, (1, 32)),
    "eagle3": Case("b", {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 4}, None, 0.0, (1, 32), True),
    "ngram": Case("a", NGRAM, 0, 0.0, (1, 32)),
    "new-a": Case("a", NGRAM, None, 1.0, (1,)),
    "new-b": Case("b", NGRAM, None, 1.0, (1, 8, 32, 128, 256)),
}


def draft_folder(folder: Path) -> Path:
    """Write the config of a draft model or head of one layer. Dummy weights depend on their names: the layer of a draft
    model is the first layer of the model.
    """
    target = folder.with_name(f"{folder.name}-draft")
    target.mkdir(exist_ok=True)
    config = {**json.loads((folder / "config.json").read_text(encoding="utf-8")), "num_hidden_layers": 1}
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return target


async def zero_layers(engine: AsyncEngine, config: dict[str, Any], first: int) -> None:
    """Remove the effect of the layers from ``first`` on."""
    hidden = config["hidden_size"]
    sizes = {
        "self_attn.o_proj": config["num_attention_heads"] * config["head_dim"],
        "mlp.down_proj": config["intermediate_size"],
    }
    zeros = {name: torch.zeros(hidden, size, dtype=torch.bfloat16) for name, size in sizes.items()}
    for layer in range(first, config["num_hidden_layers"]):
        await set_weights(engine, {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in zeros.items()})


async def set_weights(engine: AsyncEngine, tensors: dict[str, torch.Tensor]) -> None:
    outcome = await engine.update_weights_from_tensor(tensors)
    if not outcome.success:
        raise RuntimeError(outcome.message)


class Times:
    """What was measured on an engine."""

    def __init__(self, engine: AsyncEngine, temperature: float) -> None:
        self.engine = engine
        self.token_ms: list[float] = []
        self.token_ids: list[list[list[int]]] = []
        self._temperature = temperature

    async def measure(self, rows: int, seed: int) -> None:
        """Add the milliseconds a token of ``rows`` requests, without their prompts."""
        rng = random.Random(seed)
        prompts = [[rng.randint(0, 10_000) for _ in range(512)] for _ in range(rows)]
        short_s, _ = await self._generate(prompts, SHORT)
        long_s, token_ids = await self._generate(prompts, LONG)
        self.token_ms.append((long_s - short_s) / (LONG - SHORT) * 1000)
        self.token_ids.append(token_ids)

    async def _generate(self, prompts: list[list[int]], num_tokens: int) -> tuple[float, list[list[int]]]:
        await self.engine.flush_cache()
        started = time.perf_counter()
        answers = await self.engine.async_generate(
            input_ids=prompts, sampling_params=[self.params(num_tokens, row) for row in range(len(prompts))]
        )
        return time.perf_counter() - started, [answer["output_ids"] for answer in answers]

    def params(self, num_tokens: int, row: int) -> dict[str, Any]:
        return {"max_new_tokens": num_tokens, "temperature": self._temperature, "ignore_eos": True, "seed": row}

    async def profile(self, rows: int) -> str:
        """Return the parts of a step of ``rows`` requests."""
        rng = random.Random(0)
        prompts = [[rng.randint(0, 10_000) for _ in range(512)] for _ in range(rows)]
        params = [self.params(PROFILED_TOKENS if rows == 1 else MORE_TOKENS, row) for row in range(rows)]
        running = asyncio.create_task(self.engine.async_generate(input_ids=prompts, sampling_params=params))
        await asyncio.sleep(WARM_UP_S)
        with tempfile.TemporaryDirectory() as folder:
            await self.engine.start_profile(folder, num_steps=step_profile.NUM_TRACED)
            await asyncio.sleep(WARM_UP_S)
            path = await self.engine.stop_profile()
            parts, kernels = step_profile.traced_parts(path), top_kernels(path)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        shown = "  ".join(f"{name} {value:.3f}" for name, value in parts.items())
        return f"{shown}\n{kernels}"


def top_kernels(path: str) -> str:
    """Return the wall time of a step in a trace, and the kernels that take the most time of a step."""
    with gzip.open(path) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    steps = [event for event in events if event.get("cat") == "user_annotation" and event["name"].startswith("step ")]
    starts = sorted(event["ts"] for event in steps)
    num_steps = max(len(starts) - 1, 1)
    lines = [f"         wall {(starts[-1] - starts[0]) / 1000 / num_steps:.3f} ms a step" if starts else ""]
    spent: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") in {"kernel", "gpu_memcpy", "gpu_memset"}:
            spent[event["name"][:70]].append(event["dur"] / 1000)
    for name, times in sorted(spent.items(), key=lambda item: -sum(item[1]))[:NUM_KERNELS]:
        lines.append(f"         {sum(times) / num_steps:.3f} ms, {len(times) / num_steps:.1f} calls of {name}")
    return "\n".join(lines)


async def run(name: str, options: argparse.Namespace) -> None:
    case = CASES[name]
    config: dict[str, Any] = MODELS[case.model]
    folder = write_folder(options.models, case.model)
    arguments = dict(case.arguments)
    if arguments["speculative_algorithm"] != "NGRAM":
        arguments["speculative_draft_model_path"] = str(draft_folder(folder))
    rows = [count for count in case.rows if options.rows is None or count in options.rows]
    shared: dict[str, Any] = {
        "load_format": "dummy",
        "max_total_tokens": 2100 * max(rows) + 16_384,
        **options.arguments,
    }
    engines = AsyncEngine(str(folder), **shared), AsyncEngine(str(folder), **shared, **arguments)
    started = time.perf_counter()
    await asyncio.gather(*(engine.start() for engine in engines))
    print(f"{name}: started in {time.perf_counter() - started:.1f} s", flush=True)
    try:
        for engine in engines:
            if case.first_zeroed is not None:
                await zero_layers(engine, config, case.first_zeroed)
            if case.has_zero_head:
                zeros = torch.zeros(config["vocab_size"], config["hidden_size"], dtype=torch.bfloat16)
                await set_weights(engine, {"lm_head.weight": zeros})
        for count in rows:
            await compare(name, engines, case, count, options)
    finally:
        for engine in engines:
            await engine.shutdown()


async def compare(
    name: str, engines: tuple[AsyncEngine, AsyncEngine], case: Case, rows: int, options: argparse.Namespace
) -> None:
    """Print a line for this number of rows."""
    plain, drafting = (Times(engine, case.temperature) for engine in engines)
    before = engines[1].stats()
    for repeat in range(options.repeat + 1):
        for times in (plain, drafting):
            await times.measure(rows, repeat)
    after = engines[1].stats()
    plain_ms, draft_ms = (statistics.median(times.token_ms[1:]) for times in (plain, drafting))
    proposed, accepted = (after[key] - before[key] for key in ("num_proposed_drafts", "num_accepted_drafts"))
    print(
        f"{name:6} rows {rows:4}: plain {plain_ms:.3f} ms, drafts {draft_ms:.3f} ms, factor {plain_ms / draft_ms:.3f}, "
        f"accepted {accepted} of {proposed}, equal {plain.token_ids == drafting.token_ids}, "
        f"all {[round(ms, 3) for ms in drafting.token_ms]}",
        flush=True,
    )
    if options.profile:
        for title, times in (("plain", plain), ("drafts", drafting)):
            print(f"       {title:6}: {await times.profile(rows)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder for the model folders")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rows", type=int, nargs="+", help="only these numbers of rows")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--arguments", type=json.loads, default={}, help="more arguments of both engines, as JSON")
    parser.add_argument("--profile", action="store_true", help="the parts of a step")
    options = parser.parse_args()
    for name in options.cases:
        asyncio.run(run(name, options))


if __name__ == "__main__":
    main()
