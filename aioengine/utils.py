"""Helpers for the text of streams: join it, yield its pieces, or remove overlaps of pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from aioengine.api.answers import Chunk
    from aioengine.api.engine import AsyncEngine
    from aioengine.api.params import SamplingParams
    from aioengine.api.sync import Engine


def stream_and_merge(
    llm: Engine, prompt: str, sampling_params: SamplingParams | Mapping[str, object] | None = None
) -> str:
    """Stream one answer and return its whole text.

    Raises ValueError if there are several answers, because their chunks are interleaved.
    """
    with llm.generate(prompt, sampling_params, stream=True) as stream:
        return "".join(_text_of_the_only_answer(chunk) for chunk in stream)


async def async_stream_and_merge(
    llm: AsyncEngine | Engine, prompt: str, sampling_params: SamplingParams | Mapping[str, object] | None = None
) -> AsyncIterator[str]:
    """Stream one answer and yield the text of each chunk. The joined pieces are the whole text.

    Raises ValueError if there are several answers, because their chunks are interleaved.
    """
    async with llm.async_generate(prompt, sampling_params, stream=True) as stream:
        async for chunk in stream:
            if text := _text_of_the_only_answer(chunk):
                yield text


def _text_of_the_only_answer(chunk: Chunk) -> str:
    if "index" in chunk:
        raise ValueError(
            "there is more than one answer (several prompts, or n above 1), and their chunks are interleaved"
        )
    return chunk["text"]


def trim_overlap(existing_text: str, new_chunk: str) -> str:
    """Return ``new_chunk`` without the part that repeats the end of ``existing_text``.

    Use it for text from other sources, whose pieces overlap. Chunks of this engine do not overlap; they have a
    ``text_offset``. This function compares only text, so it also removes a repetition that is no overlap.
    """
    for length in range(min(len(existing_text), len(new_chunk)), 0, -1):
        if existing_text.endswith(new_chunk[:length]):
            return new_chunk[length:]
    return new_chunk
