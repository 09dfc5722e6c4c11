"""Steps of transformers' own code beside those of ours: the shape of Llama-3.1-8B with the same weights, by turns.

    python -m benchmarks.gpu.fallback --models /tmp/bench-models [--layers 8]

Both models are in one process, each with its runner, CUDA graphs and KV pool; requests do not leave it. Prints, for a
prompt and for decode steps of each number of rows, the milliseconds of both (medians of ``--rounds``, one after the
other) and their ratio. With fewer layers than 32 the parts outside the blocks count for more.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aioengine.api.args import engine_config
from aioengine.model_files.model_folder import find_facts
from aioengine.runner.build import build
from aioengine.scheduler.scheduler import Scheduler
from aioengine.settings.config import OWN, TRANSFORMERS
from aioengine.settings.machine import device_facts
from aioengine.settings.resolve import resolve
from benchmarks.gpu.models import LARGE
from benchmarks.gpu.steps import Steps, finish, prompts, run

if TYPE_CHECKING:
    from aioengine.runner.model_runner import ModelRunner
    from aioengine.settings.config import Settings

NUM_LAYERS: Final = 32
CACHED: Final = 512
"""Positions of a row before the decode steps."""
NUM_STEPS: Final = 60


class Measured:
    """A model that one of the two implementations computes."""

    def __init__(self, folder: Path, implementation: str, *, max_rows: int, attention: str) -> None:
        arguments: dict[str, object] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "model_impl": implementation,
            "max_running_requests": max_rows,
            "max_total_tokens": max_rows * (CACHED + 2 * NUM_STEPS),
            "context_length": 8192,
            "attention_backend": attention,
        }
        config = engine_config(str(folder), arguments)
        self._settings: Settings = resolve(config, find_facts(config.model), device_facts())
        self.runner: ModelRunner = build(self._settings, lambda _: None)

    def _steps(self) -> Steps:
        settings, num_pages = self._settings, self.runner.facts["num_pages"]
        assert isinstance(num_pages, int)
        scheduler = Scheduler(settings.scheduler, num_pages=num_pages, page_size=settings.memory.page_size)
        return Steps(self.runner, scheduler)

    def decode_ms(self, num_rows: int) -> float:
        """Return the milliseconds of a step of ``num_rows`` rows."""
        steps = self._steps()
        run(steps, num_rows, num_cached=CACHED, num_steps=NUM_STEPS, first_uid=0)
        found = statistics.median(steps.parts["wall"])
        finish(steps)
        return found

    def prompt_ms(self, length: int) -> float:
        """Return the milliseconds from a prompt to its first token."""
        return prompts(self._steps(), length, 1)


def write_model(folder: Path, num_layers: int) -> Path:
    """Write the folder of a model of this many layers, without weights."""
    target = folder / f"large-{num_layers}"
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps({**LARGE, "num_hidden_layers": num_layers}), encoding="utf-8")
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="a folder to write config files to")
    parser.add_argument("--layers", type=int, default=NUM_LAYERS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--attention", default="auto", help="attention_backend")
    options = parser.parse_args()
    folder = write_model(options.models, options.layers)
    rows: list[int] = options.rows
    both = [Measured(folder, name, max_rows=max(rows), attention=options.attention) for name in (OWN, TRANSFORMERS)]
    for name, each in zip((OWN, TRANSFORMERS), both, strict=True):
        facts = each.runner.facts
        print(f"{name}: graphs {facts.get('cuda_graph_sizes', 'none')}, {facts['attention_backend']}", flush=True)
    kinds = [("decode", num_rows) for num_rows in rows] + [("prompt", options.prompt)]
    for kind, size in kinds:
        found: list[list[float]] = [[], []]
        for _ in range(options.rounds):
            for each, times in zip(both, found, strict=True):
                times.append(each.decode_ms(size) if kind == "decode" else each.prompt_ms(size))
        own, foreign = map(statistics.median, found)
        spread = " ".join(f"{min(times):.3f}..{max(times):.3f}" for times in found)
        print(f"{kind} {size:5}: {own:8.3f} {foreign:8.3f} ms, ratio {foreign / own:.3f} ({spread})", flush=True)


if __name__ == "__main__":
    main()
