"""Small conveniences over a stream: join it, or yield its text as it comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from aioengine.engine import AsyncEngine
    from aioengine.params import SamplingParams
    from aioengine.sync import Engine


def stream_and_merge(
    llm: Engine, prompt: str, sampling_params: SamplingParams | Mapping[str, object] | None = None
) -> str:
    """Stream one answer and return its whole text."""
    return "".join(chunk["text"] for chunk in llm.generate(prompt, sampling_params, stream=True))


async def async_stream_and_merge(
    llm: AsyncEngine | Engine, prompt: str, sampling_params: SamplingParams | Mapping[str, object] | None = None
) -> AsyncIterator[str]:
    """Stream one answer and yield its new text, chunk by chunk; joined, the pieces are the whole text."""
    async with llm.async_generate(prompt, sampling_params, stream=True) as stream:
        async for chunk in stream:
            if chunk["text"]:
                yield chunk["text"]


def trim_overlap(existing_text: str, new_chunk: str) -> str:
    """The part of ``new_chunk`` that does not repeat the end of ``existing_text``.

    For text from elsewhere, whose pieces overlap. Chunks of this engine never do: they say where they start
    (``text_offset``), while comparing text takes an honest repetition for an overlap.
    """
    for length in range(min(len(existing_text), len(new_chunk)), 0, -1):
        if existing_text.endswith(new_chunk[:length]):
            return new_chunk[length:]
    return new_chunk
