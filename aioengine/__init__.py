"""aioengine: an asyncio-native LLM inference engine that you import.

    from aioengine import AsyncEngine

    async with AsyncEngine(model_path="...") as engine:
        answer = await engine.async_generate("Once upon a time", {"max_new_tokens": 64})
        async for chunk in engine.async_generate("Once upon a time", stream=True):
            print(chunk["text"], end="", flush=True)

``Engine`` is the same for synchronous code. README.md in this folder explains the code. Importing this package is
cheap: public names are imported when they are first used, torch never.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aioengine.api.answers import (
        Answer,
        BatchOutput,
        Chunk,
        ChunkInfo,
        Embedding,
        FinishReason,
        MetaInfo,
        Ranking,
        Timings,
    )
    from aioengine.api.engine import AsyncEngine
    from aioengine.api.jobs import AnswerIterator, AsyncAnswerIterator, JobRow, RowFailure
    from aioengine.api.params import SamplingParams
    from aioengine.api.selfcheck import TokenDifference
    from aioengine.api.signatures import EngineArguments
    from aioengine.api.stream import Generation, Stream
    from aioengine.api.sync import ChunkIterator, Engine
    from aioengine.errors import (
        EngineClosedError,
        EngineDeadError,
        EngineDrainingError,
        EngineError,
        EngineOverloadedError,
        EngineStalledError,
        EngineStartupError,
        RequestError,
        RequestTooLargeError,
        UnknownParameterError,
        UnsupportedSchemaError,
        WrongLoopError,
    )
    from aioengine.frontend.calls.observers import FinishedRequest
    from aioengine.frontend.controls import Outcome, ProfileOptions
    from aioengine.frontend.info import Health, ModelInfo, __version__
    from aioengine.frontend.intake.pool_requests import EncodeOptions, PoolOptions
    from aioengine.frontend.intake.request_options import ChatOptions, RequestOptions
    from aioengine.frontend.intake.score import ScoreOptions, ScoreResult
    from aioengine.frontend.loaded_adapters import AdapterResult
    from aioengine.settings.planning import Plan, plan
    from aioengine.utils import async_stream_and_merge, stream_and_merge, trim_overlap

_HOMES = {
    "aioengine.api.answers": "Answer BatchOutput Chunk ChunkInfo Embedding FinishReason MetaInfo Ranking Timings",
    "aioengine.api.engine": "AsyncEngine",
    "aioengine.api.jobs": "AnswerIterator AsyncAnswerIterator JobRow RowFailure",
    "aioengine.api.params": "SamplingParams",
    "aioengine.api.selfcheck": "TokenDifference",
    "aioengine.api.signatures": "EngineArguments",
    "aioengine.api.stream": "Generation Stream",
    "aioengine.api.sync": "ChunkIterator Engine",
    "aioengine.frontend.calls.observers": "FinishedRequest",
    "aioengine.frontend.controls": "Outcome ProfileOptions",
    "aioengine.frontend.info": "Health ModelInfo __version__",
    "aioengine.frontend.intake.pool_requests": "EncodeOptions PoolOptions",
    "aioengine.frontend.intake.request_options": "ChatOptions RequestOptions",
    "aioengine.frontend.intake.score": "ScoreOptions ScoreResult",
    "aioengine.frontend.loaded_adapters": "AdapterResult",
    "aioengine.settings.planning": "Plan plan",
    "aioengine.utils": "async_stream_and_merge stream_and_merge trim_overlap",
}
"""Module -> its public names. Public names without an entry are errors."""

__all__ = [
    "AdapterResult", "Answer", "AnswerIterator", "AsyncAnswerIterator", "AsyncEngine", "BatchOutput", "ChatOptions",
    "Chunk", "ChunkInfo", "ChunkIterator", "Embedding", "EncodeOptions", "Engine", "EngineArguments",
    "EngineClosedError", "EngineDeadError", "EngineDrainingError", "EngineError", "EngineOverloadedError",
    "EngineStalledError", "EngineStartupError", "FinishReason", "FinishedRequest", "Generation", "Health", "JobRow",
    "MetaInfo", "ModelInfo", "Outcome", "Plan", "PoolOptions", "ProfileOptions", "Ranking", "RequestError",
    "RequestOptions", "RequestTooLargeError", "RowFailure", "SamplingParams", "ScoreOptions", "ScoreResult", "Stream",
    "Timings", "TokenDifference", "UnknownParameterError", "UnsupportedSchemaError", "WrongLoopError", "__version__",
    "async_stream_and_merge", "plan", "stream_and_merge", "trim_overlap",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name in __all__:
        home = next((home for home, names in _HOMES.items() if name in names.split()), "aioengine.errors")
        value: object = getattr(import_module(home), name)
        globals()[name] = value
        return value
    from aioengine.api.foreign_names import OUR_WAY, no_attribute  # only for errors

    error = no_attribute(f"module {__name__!r}", name)
    caller = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    if name in OUR_WAY and caller.f_code.co_name == "_handle_fromlist":
        # For "from aioengine import LLM", Python replaces an AttributeError by an ImportError without its text.
        raise ImportError(str(error), name=__name__)
    raise error


def __dir__() -> list[str]:
    return __all__
