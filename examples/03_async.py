"""Many independent requests on one event loop; the engine computes them together."""

import asyncio

from aioengine import AsyncEngine

COUNTRIES = ["France", "Italy", "Japan", "Norway", "Egypt", "Peru"]


async def main() -> None:
    async with AsyncEngine() as engine:
        params = {"temperature": 0, "max_new_tokens": 16}
        answers = await asyncio.gather(*(engine.async_generate(f"The capital of {c} is", params) for c in COUNTRIES))
        for country, answer in zip(COUNTRIES, answers, strict=True):
            print(f"{country}:{answer['text']}")

        # At the deadline, the text so far is the answer. No exception is raised.
        answer = await engine.async_generate(
            "Once upon a time", {"max_new_tokens": None, "ignore_eos": True}, timeout=0.5
        )
        print(f"stopped by {answer['meta_info']['finish_reason']} after {len(answer['output_ids'])} tokens")


asyncio.run(main())
