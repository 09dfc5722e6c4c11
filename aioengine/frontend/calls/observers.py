"""Observers: callbacks of the program that get each finished request."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, NamedTuple, TypeAlias, cast

from aioengine.api.answers import ChunkInfo, MetaInfo
from aioengine.api.params import SamplingParams
from aioengine.frontend.calls.call import Call, CallRow
from aioengine.supervision.tasks import post

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


class Observers:
    """Calls the observers with each finished request, in the next iteration of the loop.

    One callback of the loop reports all requests that have ended until it runs.
    """

    def __init__(self, observers: list[Observer], loop: asyncio.AbstractEventLoop, model_path: str) -> None:
        self._observers = observers
        self._loop = loop
        self._model_path = model_path
        self._finished: list[tuple[contextvars.Context, FinishedRequest]] = []

    def watch(self, call: Call) -> None:
        """Report the rows of a call when they end. Observers run in a copy of the current context."""
        if self._observers:
            call.on_row_end = partial(self._add, contextvars.copy_context(), time.time() - time.monotonic())

    def _add(
        self,
        context: contextvars.Context,
        clock_offset: float,
        row: CallRow,
        info: ChunkInfo,
        error: BaseException | None,
    ) -> None:
        """Report a row that has ended. clock_offset: seconds to add to a monotonic time to get unix time."""
        request, prompt_index = row.call.request, row.prompt_index
        is_checked = prompt_index < len(request.prompts)  # a row may end before its arguments are checked
        operation: Operation = "chat" if request.name == "messages" else "generate"
        if request.pooled is not None:
            operation = "rerank" if request.pooled.gives_scores else "encode"
        finished = FinishedRequest(
            operation=operation,
            called_at=clock_offset + row.call.called_at,
            meta_info=cast("MetaInfo", info.copy()),
            error=error,
            model_path=self._model_path,
            lora_path=request.adapters.of_prompts.of(prompt_index)
            if request.adapters is not None and is_checked
            else None,
            sampling_params=request.params_of(prompt_index) if is_checked else SamplingParams(),
            is_stream=request.is_stream,
            trace_headers=request.trace_headers,
        )
        self._finished.append((context, finished))
        if len(self._finished) == 1:
            post(self._loop, self._report)

    def _report(self) -> None:
        finished, self._finished = self._finished, []
        for context, request in finished:
            for observer in self._observers:
                try:
                    context.run(observer, request)
                except (Exception, asyncio.CancelledError) as error:
                    self._loop.call_exception_handler({"message": f"observer {observer!r} failed", "exception": error})
