"""The calls of ``map``: the arguments of its items, and their answers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterable, Iterable, Mapping, Sized
from functools import partial
from typing import Any, Unpack, cast

import msgspec

from aioengine.api import checks
from aioengine.api.answers import Answer
from aioengine.api.jobs import ROW_ERRORS, AsyncAnswerIterator, Item, Job, Row, failure
from aioengine.api.journal import Journal
from aioengine.errors import EngineClosedError, EngineOverloadedError
from aioengine.frontend.frontend import Frontend
from aioengine.frontend.intake.request_options import PlainRequestOptions, Sampled
from aioengine.frontend.intake.requests import generate_request
from aioengine.frontend.progress import RowBar


def map(
    self: Any,
    prompts: Iterable[Item] | AsyncIterable[Item],
    sampling_params: Sampled | None = None,
    *,
    ordered: bool = True,
    window: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    return_exceptions: bool = True,
    progress: bool | None = None,
    **options: Unpack[PlainRequestOptions],
) -> AsyncAnswerIterator:
    """Answer any number of prompts. Iterate over the result (``async for``) to get the answers, with their ``index``.

    An item is a text, a list of token ids, or a dict of keyword arguments of ``async_generate`` (of ``async_chat``, if
    it has ``messages``). ``sampling_params`` and ``options`` apply to all items. The parameters of an item replace them
    one by one; a ``SamplingParams`` object replaces all shared sampling parameters. Items are read as rows are
    returned, so the memory does not depend on their number.

    ordered: return rows in the order of the items; False: as they end.
    window: maximum number of items whose rows were not returned yet (default: twice ``max_running_requests``).
    checkpoint: a file for the rows, as JSON lines, with a journal beside it (``.journal``). If the files exist, their
        rows are returned and not computed again. They must belong to the same items and parameters.
    return_exceptions: the row of a wrong or failed item has an ``error`` instead of an answer. False: raise it.
    progress: a bar on stderr. None: only if stderr is a terminal.

    Leaving the iterator aborts the items in flight: ``aclose()``, the end of ``async with``, an exception while
    waiting, or dropping the last reference. Overload only delays a job.

    Raises:
        TypeError, ValueError: an argument is wrong. EngineClosedError, WrongLoopError: the engine cannot be used here.

    Iterating raises EngineError if the engine ends, ValueError if the checkpoint belongs to another job, OSError if it
    cannot be written, and all exceptions of ``prompts``.
    """
    answers = ItemAnswers(self, sampling_params, cast("Mapping[str, object]", options))
    return AsyncAnswerIterator(prompts, answers.job(prompts, ordered, window, checkpoint, return_exceptions, progress))


class ItemAnswers:
    """Answers items with the sampling parameters and options that they share.

    Attributes:
        parameters: everything that determines the answers, except the items.
        default_window: twice the number of requests that can run, so that items wait in the scheduler when others end.
    """

    def __init__(self, engine: Any, sampling_params: Sampled | None, options: Mapping[str, object]) -> None:
        """Raises TypeError or ValueError if an argument is wrong."""
        frontend: Frontend = engine._frontend_here()
        if options.get("rid") is not None:
            raise ValueError("rid belongs to one item: give items as dicts with a rid")
        request = generate_request("-", sampling_params, None, stream=False, options=options)
        if request.gives_batch:
            raise ValueError(f"n must be 1 for all items of a job, got {request.num_samples}")
        self._engine = engine
        self._params = request.params[0]
        self._options = options
        settings = frontend.parts.settings
        self.default_window = 2 * settings.scheduler.max_running
        self.parameters = {
            "model": settings.model.path,
            "weight_version": frontend.weights.loaded.version,
            "sampling_params": self._params,
            "options": options,
        }

    async def answer(self, item: Item) -> Answer:
        """Return the answer for an item. While the engine is overloaded, try again.

        Raises:
            ValueError, TypeError: the item is wrong. RequestError: it failed. EngineOverloadedError: with
                ``refuse_late``. Other exceptions: the engine has ended.
        """
        arguments = self._arguments(item)
        call = self._engine.async_chat if "messages" in arguments else self._engine.async_generate
        while True:
            try:
                answer: Answer | list[Answer] = await call(**arguments)
                break
            except EngineOverloadedError as error:
                if arguments.get("refuse_late"):
                    raise
                await asyncio.sleep(error.retry_after)
        if isinstance(answer, list):
            raise ValueError("an item of a job has one answer: give one prompt, and n=1")
        if answer["meta_info"]["finish_reason"] == "shutdown":
            raise EngineClosedError("the engine was shut down before the job was finished")
        return answer

    def _arguments(self, item: Item) -> dict[str, Any]:
        """Return the keyword arguments of the call for an item. Raises ValueError if it asks for a stream."""
        if isinstance(item, Mapping):
            own = item.get("sampling_params")
            if isinstance(own, Mapping):
                own = {**msgspec.to_builtins(self._params), **cast("Mapping[str, object]", own)}
            if item.get("stream"):
                raise ValueError("an item of a job is answered as a whole; leave out stream")
            return {**self._options, **item, "sampling_params": self._params if own is None else own}
        name = "prompt" if isinstance(item, str) else "input_ids"
        return {**self._options, name: item, "sampling_params": self._params}

    def job(
        self,
        prompts: object,
        is_ordered: object,
        window: object,
        checkpoint: str | os.PathLike[str] | None,
        returns_exceptions: object,
        progress: bool | None,
    ) -> Job:
        """Return the job of ``map``. Raises TypeError or ValueError if an argument is wrong."""
        if isinstance(prompts, str | bytes | Mapping):
            raise checks.wrong_type("prompts", "an iterable of prompts", cast("object", prompts))
        parameters = self.parameters | {"return_exceptions": checks.switch("return_exceptions", returns_exceptions)}
        bar = RowBar(len(prompts) if isinstance(prompts, Sized) else None, progress)

        async def answer(index: int, item: Item) -> Row:
            try:
                row = await self.answer(item)
            except ROW_ERRORS as error:
                if not returns_exceptions:
                    raise
                return {"index": index, "error": failure(error)}
            bar.add_tokens(row["meta_info"]["completion_tokens"])
            return {"index": index, **row}

        return Job(
            answer,
            bar,
            window=self.default_window if window is None else checks.whole("window", window, 1),
            is_ordered=checks.switch("ordered", is_ordered),
            open_journal=None if checkpoint is None else partial(Journal, checkpoint, parameters),
        )
