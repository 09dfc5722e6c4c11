"""Two streams at the same time, and one that is aborted by its id."""

import asyncio

from aioengine import AsyncEngine


async def tell(engine: AsyncEngine, prompt: str) -> None:
    text = ""
    async for chunk in engine.async_generate(prompt, {"temperature": 0, "max_new_tokens": 40}, stream=True):
        assert chunk["text_offset"] == len(text)  # no gap and no overlap
        text += chunk["text"]
        print(f"{prompt!r} so far: {text!r}")


async def main() -> None:
    async with AsyncEngine() as engine:
        await asyncio.gather(tell(engine, "The capital of France is"), tell(engine, "Hello, my name is"))

        stream = engine.async_generate("Once upon a time", {"max_new_tokens": None, "ignore_eos": True}, stream=True)
        asyncio.get_running_loop().call_later(0.5, engine.abort_request, stream.rid)
        async for chunk in stream:
            last = chunk
        print(f"ended by {last['meta_info']['finish_reason']}, {last['meta_info']['completion_tokens']} tokens")


asyncio.run(main())
