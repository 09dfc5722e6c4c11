"""Observers: callbacks of the program that get each finished request."""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, cast

from aioengine.api.params import SamplingParams
from aioengine.supervision.tasks import post

if TYPE_CHECKING:
    import asyncio

    from aioengine.api.answers import MetaInfo
    from aioengine.frontend.calls.call import Call, CallRow
    from aioengine.protocol.messages import End

Operation: TypeAlias = Literal["generate", "chat", "encode", "rerank"]


class FinishedRequest(NamedTuple):
    """A request that has ended: one sample of one prompt.

    Attributes:
        operation: "generate", "chat", "encode" or "rerank". (``score`` and beam search make several of these calls.)
        called_at: unix time of the call, in seconds.
        meta_info: as in the answer. Without ``error``, a request whose reader left has the finish reason "abort".
        error: the exception that it raised or that is in its place in a batch; None: it has an answer.
        model_path, lora_path: the model, and the name of its adapter (None: the base model).
        sampling_params: as given, with defaults. is_stream: whether the call had ``stream=True``.
        trace_headers: ``external_trace_header`` of the call, with names in lower case.
    """

    operation: Operation
    called_at: float
    meta_info: MetaInfo
    error: BaseException | None
    model_path: str
    lora_path: str | None
    sampling_params: SamplingParams
    is_stream: bool
    trace_headers: Mapping[str, str]


Observer = Callable[[FinishedRequest], object]


def report_rows(
    call: Call, observers: list[Observer], loop: asyncio.AbstractEventLoop, model_path: str
) -> Callable[[CallRow, End, BaseException | None], None]:
    """Return ``Call.on_row_end``, which calls the observers in the next iteration of the loop.

    They run in a copy of the context in which this function is called.
    """
    context = contextvars.copy_context()
    called_at = time.time() - time.monotonic() + call.called_at

    def report(row: CallRow, end: End, error: BaseException | None) -> None:
        request, prompt = call.request, row.prompt
        is_checked = prompt < len(request.prompts)
        operation: Operation = "chat" if request.name == "messages" else "generate"
        if request.pooled is not None:
            operation = "rerank" if request.pooled.gives_scores else "encode"
        finished = FinishedRequest(
            operation=operation,
            called_at=called_at,
            meta_info=cast("MetaInfo", row.final_info(end)),
            error=error,
            model_path=model_path,
            lora_path=request.adapters.of_prompts.of(prompt) if request.adapters is not None and is_checked else None,
            sampling_params=request.params_of(prompt) if is_checked else SamplingParams(),
            is_stream=request.is_stream,
            trace_headers=request.trace_headers,
        )
        for observer in observers:
            post(loop, context.run, observer, finished)

    return report
