"""What the options of a request cost: 256 streams of 128 tokens in and 128 out, with each option and without, by turns.

    python -m benchmarks.gpu.request_options --models /tmp/bench-models
    python -m benchmarks.gpu.request_options --folder MODEL --streams 8 --num-new 32

Tokens a second; "embeddings" has prompts of 128 vectors in place of token ids. Then the time of a first token behind
2,000 tokens that are cached, of a request with all tokens and of a turn of a session; and the time of a beam search of
width 4, beside four samples of one request. Structured output and logprobs have programs of their own. ``--folder``:
another model folder, on any device.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aioengine import AsyncEngine
from benchmarks.gpu.models import write_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

PROCESSOR = "benchmarks.gpu.request_options:Favour"
NUM_PROMPT = 128
HISTORY = 2000


class Favour:
    """A logits processor that makes one token of each row likelier."""

    def apply(self, logits: Tensor, params: list[dict[str, Any]]) -> Tensor:
        for row, each in zip(logits, params, strict=True):
            row[each["token"]] += each["by"]
        return logits


class Prices:
    """An engine, and the requests whose prices are measured on it."""

    def __init__(self, engine: AsyncEngine, width: int, options: argparse.Namespace) -> None:
        self._engine = engine
        self._draw = random.Random(0)
        self._num_streams = options.streams
        self._repeat = options.repeat
        self._params = {"max_new_tokens": options.num_new, "temperature": 0.6, "ignore_eos": True}
        self._vectors = np.random.default_rng(0).standard_normal((NUM_PROMPT, width), dtype=np.float32)

    def ids(self, num: int) -> list[int]:
        return [self._draw.randrange(100, 3000) for _ in range(num)]

    async def rates(self) -> None:
        """Measure the tokens per second of each option, in turns."""
        favour = {"custom_params": {"token": 7, "by": 1.0}}
        options: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
            "without": ({}, dict),
            "300 biases": ({"logit_bias": {str(token): 0.5 for token in range(300)}}, dict),
            "1,000 allowed tokens": ({"allowed_token_ids": list(range(100, 1100))}, dict),
            "20 bad words": ({"bad_words": [f"word{number}" for number in range(20)]}, dict),
            "logits processor": (favour, lambda: {"custom_logit_processor": PROCESSOR}),
            'hidden states, "last"': ({}, lambda: {"return_hidden_states": "last"}),
            "hidden states, all": ({}, lambda: {"return_hidden_states": True}),
            "embeddings": ({}, lambda: {"input_embeds": self._vectors}),
            "a cache salt each": ({}, lambda: {"cache_salt": str(self._draw.random())}),
        }
        found: dict[str, list[float]] = {name: [] for name in options}
        for turn in range(-1, self._repeat):
            for name, (params, make) in options.items():
                rate = await self._rate({**self._params, **params}, make)
                if turn >= 0:
                    found[name].append(rate)
        plain = statistics.median(found["without"])
        for name, rates in found.items():
            rate = statistics.median(rates)
            spread = f"({min(rates):,.0f} to {max(rates):,.0f})"
            print(f"{name:<22} {rate:,.0f} {spread} tok/s, {rate / plain:.2f} of plain", flush=True)

    async def _rate(self, params: dict[str, Any], make: Callable[[], dict[str, Any]]) -> float:
        await self._engine.flush_cache()
        started = time.perf_counter()
        counts = await asyncio.gather(*(self._stream(params, make()) for _ in range(self._num_streams)))
        return sum(counts) / (time.perf_counter() - started)

    async def _stream(self, params: dict[str, Any], options: dict[str, Any]) -> int:
        prompt = {} if "input_embeds" in options else {"input_ids": self.ids(NUM_PROMPT)}
        count = 0
        async for chunk in self._engine.async_generate(**prompt, sampling_params=params, stream=True, **options):
            count = chunk["meta_info"]["completion_tokens"]
        return count

    async def turns(self) -> None:
        """Measure first tokens after a cached history: given whole, and as the next turn of a session."""
        one = {"max_new_tokens": 1, "temperature": 0}
        whole: list[float] = []
        turns: list[float] = []
        for _ in range(8 * self._repeat):
            history, new = self.ids(HISTORY), self.ids(16)
            await self._engine.async_generate(input_ids=history, sampling_params=one)
            started = time.perf_counter()
            await self._engine.async_generate(input_ids=history + new, sampling_params=one)
            whole.append(1000 * (time.perf_counter() - started))
            session = await self._engine.open_session()
            first = self._engine.async_generate(
                input_ids=self.ids(HISTORY), sampling_params=one, session_params={"id": session}
            )
            await first
            started = time.perf_counter()
            await self._engine.async_generate(
                input_ids=new, sampling_params=one, session_params={"id": session, "rid": first.rid}
            )
            turns.append(1000 * (time.perf_counter() - started))
            await self._engine.close_session(session)
        print(
            f"first token behind {HISTORY:,} cached ones: {_ms(whole)}; as a turn of a session: {_ms(turns)}",
            flush=True,
        )

    async def beams(self) -> None:
        """Measure a beam search of width 4, and four samples."""
        searches: list[float] = []
        samples: list[float] = []
        for _ in range(self._repeat + 1):
            prompt = self.ids(NUM_PROMPT)
            started = time.perf_counter()
            await self._engine.async_generate(input_ids=prompt, sampling_params={**self._params, "n": 4})
            samples.append(1000 * (time.perf_counter() - started))
            started = time.perf_counter()
            await self._engine.async_beam_search(
                prompt, beam_width=4, max_new_tokens=self._params["max_new_tokens"], ignore_eos=True
            )
            searches.append(1000 * (time.perf_counter() - started))
        print(f"four samples: {_ms(samples[1:])}; a beam search of width 4: {_ms(searches[1:])}", flush=True)


def _ms(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f}) ms"


async def main(options: argparse.Namespace) -> None:
    folder = options.folder or write_folder(options.models, "a")
    width = json.loads((folder / "config.json").read_text(encoding="utf-8"))["hidden_size"]
    load_format = "dummy" if options.folder is None else "auto"
    async with AsyncEngine(str(folder), load_format=load_format, logits_processors=[PROCESSOR]) as engine:
        prices = Prices(engine, width, options)
        await prices.rates()
        await prices.turns()
        await prices.beams()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("/tmp/bench-models"))
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--num-new", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    asyncio.run(main(parser.parse_args()))
