"""Score on a GPU: 100 items of 20 tokens behind a query of 2,000, the shape of Llama-3.1-8B with random weights, bf16.

    python -m benchmarks.gpu.score --models /tmp/bench-models
    python -m benchmarks.gpu.score --folder MODEL --items 10 --query 200 --repeat 3

The time of one call of ``score``, and of one prompt with as many tokens as query and items have together, which is the
least that has to be computed; token ids, new ones each run. ``--folder``: another model folder, on any device.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

from aioengine import Engine
from benchmarks.gpu.models import write_folder

if TYPE_CHECKING:
    from collections.abc import Callable

ITEM_TOKENS = 20
LABELS = [11, 12]


def seconds(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def ids(draw: random.Random, num: int) -> list[int]:
    return [draw.randrange(100, 3000) for _ in range(num)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, help="folder for the model's config and tokenizer")
    parser.add_argument("--folder", type=Path, help="of a model with weights, in place of --models")
    parser.add_argument("--items", type=int, default=100)
    parser.add_argument("--query", type=int, default=2000, help="tokens of the query")
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args()
    if (options.models is None) == (options.folder is None):
        parser.error("give one of --models and --folder")
    folder = options.folder or write_folder(options.models, "b")
    with Engine(folder, load_format="auto" if options.folder else "dummy") as engine:
        scores: list[float] = []
        prompts: list[float] = []
        for turn in range(-1, options.repeat):
            draw = random.Random(turn)
            query, items = ids(draw, options.query), [ids(draw, ITEM_TOKENS) for _ in range(options.items)]
            whole = ids(draw, options.query + options.items * ITEM_TOKENS)
            score_s = seconds(lambda query=query, items=items: engine.score(query, items, LABELS))
            prompt_s = seconds(
                lambda whole=whole: engine.generate(input_ids=whole, sampling_params={"max_new_tokens": 1})
            )
            if turn >= 0:  # the first is the warm-up
                scores.append(score_s)
                prompts.append(prompt_s)
    score_ms, prompt_ms = 1000 * statistics.median(scores), 1000 * statistics.median(prompts)
    print(f"{options.items} items: {score_ms:.1f} ms   one prompt of as many tokens: {prompt_ms:.1f} ms")
    print(f"ratio {score_ms / prompt_ms:.2f}")


if __name__ == "__main__":
    main()
