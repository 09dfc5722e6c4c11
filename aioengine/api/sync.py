"""Engine: the engine for scripts, threads and notebooks. It runs an event loop in its own thread."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator
from functools import partial, wraps
from inspect import getdoc, signature
from typing import Any, Concatenate, NoReturn, ParamSpec, Self, TypeVar, Unpack, cast

from aioengine.api import jobs, map_items
from aioengine.api.answers import Answer, BatchOutput, Chunk, Embedding, Ranking
from aioengine.api.engine import AsyncEngine, BaseEngine
from aioengine.api.signatures import Chat, Encode, Generate, Method, Rerank, Score
from aioengine.api.stream import Generation
from aioengine.errors import EngineClosedError, EngineDeadError
from aioengine.frontend import callers, info
from aioengine.frontend.calls.observers import Observer
from aioengine.frontend.calls.reader import EndOfOutput, Reader
from aioengine.frontend.engine_parts import Blueprint
from aioengine.frontend.frontend import STOP_TIMEOUT_S, Frontend
from aioengine.frontend.info import Health
from aioengine.frontend.intake.request_options import PlainRequestOptions, Sampled
from aioengine.frontend.intake.score import ScoreResult
from aioengine.frontend.portal import Portal
from aioengine.frontend.startup import start_frontend


class ChunkIterator(Iterator["Chunk"]):
    """An iterator over the chunks of a stream. A second ``for`` continues after the last chunk that was read.

    ``close`` aborts the request, and so does leaving the loop and dropping the iterator.
    """

    def __init__(self, reader: Reader, owner: object) -> None:
        """``owner``: the engine, which must live as long as this iterator."""
        self._reader = reader
        self._owner = owner

    def __reduce__(self) -> NoReturn:
        raise TypeError("a stream cannot be copied or pickled because it belongs to its engine; copy its chunks")

    @property
    def rid(self) -> str:
        """The id of the call."""
        return self._reader.call.rid

    def __repr__(self) -> str:
        return f"<ChunkIterator {self.rid!r} {self._reader.state}>"

    def __next__(self) -> Chunk:
        while True:
            try:
                chunk = self._reader.take()
            except EndOfOutput:
                raise StopIteration from None
            except BaseException as error:
                self._reader.leave_if_interrupted(error)
                raise
            if chunk is not None:
                return chunk
            wait_for_news(self._reader)

    def abort(self) -> None:
        """End the request with reason ``abort``. Its output so far can still be read."""
        self._reader.abort()

    def close(self) -> None:
        """Stop reading, and abort the request if it is not finished. May be called after the end, and twice."""
        self._reader.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def wait_for_news(reader: Reader) -> None:
    """Block this thread until there may be new output. An interrupt during the wait ends the reader."""
    until_news = threading.Lock()  # locked until the engine releases it
    until_news.acquire()
    if not reader.wait(until_news.release, blocks=True):
        return
    try:
        until_news.acquire()
    except BaseException:
        reader.leave()
        raise


SyncGenerate = Generate[Answer, BatchOutput, BatchOutput[Answer | Exception], ChunkIterator]
SyncChat = Chat[Answer, BatchOutput, BatchOutput[Answer | Exception], ChunkIterator]
SyncEncode = Encode[Embedding, BatchOutput[Embedding], BatchOutput[Embedding | Exception]]
SyncRerank = Rerank[BatchOutput[Ranking], BatchOutput[Ranking | Exception]]
SyncScore = Score[ScoreResult, ScoreResult[list[float] | Exception]]

Options = ParamSpec("Options")
Result = TypeVar("Result")


def _on_loop(
    method: Callable[Concatenate[AsyncEngine, Options], Coroutine[object, None, Result]], returned: str = ""
) -> Callable[Concatenate[Engine, Options], Result]:
    """Return the synchronous form of a coroutine method: run it on the engine's loop, and wait for its result.

    Of ``self``, the method uses only ``_frontend_here()``, which both engines have. returned: the type of the result
    for ``help``, if the method is not declared with ``async``.
    """

    @wraps(method)
    def call(self: Any, /, *arguments: Options.args, **options: Options.kwargs) -> Result:
        self._frontend_here().check_can_wait(blocks=True)
        result: Result = self._portal.call(method(self, *arguments, **options))
        return result

    return _described(call, method, returned)


def _waiting(method: Callable[..., object]) -> Any:
    """Return the synchronous form of a method that returns a ``Generation``: its answer, or its chunks."""

    @wraps(method)
    def call(self: Any, /, *arguments: object, **options: object) -> object:
        return self._wait(method(self, *arguments, **options))

    return _described(call, method, "Answer | BatchOutput | ChunkIterator")


def _described(call: Method, method: Callable[..., object], returned: str) -> Method:
    if returned:
        call.__dict__["__signature__"] = signature(method).replace(return_annotation=returned)
    call.__name__ = method.__name__.removeprefix("async_")
    call.__qualname__ = f"Engine.{call.__name__}"
    call.__doc__ = f"Call ``AsyncEngine.{method.__name__}`` and wait for the result.\n\n{getdoc(method)}"
    return call


class Engine(BaseEngine):
    """An LLM inference engine for synchronous code. It runs an event loop in its own thread.

    The constructor starts the engine. The end of a ``with`` block, ``shutdown()`` or the end of the program shut it
    down; after that, every call raises ``EngineClosedError``. It belongs to the process that created it. Any number of
    threads may call it at the same time. Its ``async_`` methods can be awaited on any event loop. Without
    ``model_path`` it runs the small demo model of the package. ``help(EngineArguments)`` describes all arguments.

    Raises:
        TypeError: an argument does not exist, or a value has the wrong type.
        ValueError: a value is out of range, or the model cannot be served.
        EngineStartupError: a process could not start. No process or file is left behind.
    """

    def _init(self, prepare: Callable[[], Blueprint], progress: bool | None, model_name: str) -> None:
        self._model_name = model_name
        self._observers: list[Observer] = []
        self._pid = os.getpid()
        engine_loop = _EngineLoop()
        self._portal = engine_loop.portal
        # before the start, so that an exception leaves no process
        self._finalizer = weakref.finalize(self, engine_loop.end)
        try:
            self._frontend = engine_loop.start(partial(start_frontend, prepare, progress, self._observers))
        except BaseException:
            try:
                self._finalizer()
            except BaseException:  # a second interrupt; the finalizer runs only once
                engine_loop.end()
                raise
            raise

    # ------------------------------------------------------------ life

    def shutdown(self) -> None:
        """End the processes within seconds. Waiting calls raise ``EngineClosedError``. May be called twice."""
        self._finalizer()
        self._portal.join(STOP_TIMEOUT_S)  # another thread may be shutting it down

    def __enter__(self) -> Self:
        self._frontend_here()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        finalizer: weakref.finalize[..., Engine] | None = self.__dict__.get("_finalizer")
        if finalizer is not None and finalizer.alive and os.getpid() == self._pid:
            warnings.warn(
                "an Engine was not shut down; use `with` or shutdown()", ResourceWarning, stacklevel=1, source=self
            )

    def _frontend_here(self) -> Frontend:
        if os.getpid() != self._pid:
            raise callers.forked(self._pid)
        if not self._finalizer.alive:
            raise callers.closed()
        return self._frontend

    _frontend_anywhere = _frontend_here

    # ------------------------------------------------------------ generate

    generate = cast("SyncGenerate", _waiting(BaseEngine.async_generate))
    chat = cast("SyncChat", _waiting(BaseEngine.async_chat))
    encode = cast("SyncEncode", _waiting(BaseEngine.async_encode))
    rerank = cast("SyncRerank", _waiting(BaseEngine.async_rerank))
    beam_search = _on_loop(AsyncEngine.async_beam_search)
    score = cast("SyncScore", _on_loop(cast("Any", BaseEngine.async_score)))

    def _wait(self, generation: Generation[Answer]) -> Answer | BatchOutput | ChunkIterator:
        reader = generation._reader  # pyright: ignore[reportPrivateUsage]
        if reader.call.is_stream:
            return ChunkIterator(reader, self)
        try:
            while (result := reader.result()) is None:
                wait_for_news(reader)
        except BaseException:
            reader.leave()
            raise
        return result

    def attach(self, rid: str, from_offset: int = 0) -> ChunkIterator:
        """Continue a stream after its reader left, as ``AsyncEngine.attach``."""
        frontend = self._frontend_here()
        return ChunkIterator(frontend.attachments.attach(rid, from_offset, frontend), self)

    def map(
        self,
        prompts: Iterable[jobs.Item],
        sampling_params: Sampled | None = None,
        *,
        ordered: bool = True,
        window: int | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        return_exceptions: bool = True,
        progress: bool | None = None,
        **options: Unpack[PlainRequestOptions],
    ) -> jobs.AnswerIterator:
        """Answer any number of prompts, as ``AsyncEngine.map``. Items are read on the thread that reads the rows."""
        frontend = self._frontend_here()
        frontend.check_can_wait(blocks=True)
        answers = map_items.ItemAnswers(self, sampling_params, cast("Any", options))
        job = answers.job(prompts, ordered, window, checkpoint, return_exceptions, progress)
        return jobs.AnswerIterator(prompts, job, self._portal.call, frontend.loop)

    # ------------------------------------------------------------ sessions

    open_session = _on_loop(AsyncEngine.open_session, "str")
    close_session = _on_loop(AsyncEngine.close_session)

    # ------------------------------------------------------------ control

    def admit(self) -> None:
        """Wait in a first-come-first-served queue until the engine has capacity for a call.

        The capacity is reserved for the next call of this thread, for one second at most.

        Raises:
            EngineDrainingError, EngineClosedError, EngineDeadError: no call will be accepted.
        """
        self._frontend_here().check_can_wait(blocks=True)
        self._portal.call(self._frontend_here().caller_queue.wait(threading.get_ident()))

    flush_cache = _on_loop(AsyncEngine.flush_cache)
    load_lora_adapter = _on_loop(AsyncEngine.load_lora_adapter)
    load_lora_adapter_from_tensors = _on_loop(AsyncEngine.load_lora_adapter_from_tensors)
    unload_lora_adapter = _on_loop(AsyncEngine.unload_lora_adapter)
    list_lora_adapters = _on_loop(AsyncEngine.list_lora_adapters)
    pause_generation = _on_loop(AsyncEngine.pause_generation)
    continue_generation = _on_loop(AsyncEngine.continue_generation)
    update_weights_from_disk = _on_loop(AsyncEngine.update_weights_from_disk)
    update_weights_from_tensor = _on_loop(AsyncEngine.update_weights_from_tensor)
    begin_weight_update = _on_loop(AsyncEngine.begin_weight_update)
    end_weight_update = _on_loop(AsyncEngine.end_weight_update)
    get_weights_by_name = _on_loop(AsyncEngine.get_weights_by_name)
    init_weights_update_group = _on_loop(AsyncEngine.init_weights_update_group)
    update_weights_from_distributed = _on_loop(AsyncEngine.update_weights_from_distributed)
    destroy_weights_update_group = _on_loop(AsyncEngine.destroy_weights_update_group)
    release_memory_occupation = _on_loop(AsyncEngine.release_memory_occupation)
    resume_memory_occupation = _on_loop(AsyncEngine.resume_memory_occupation)
    selfcheck = _on_loop(AsyncEngine.selfcheck)
    freeze_gc = _on_loop(AsyncEngine.freeze_gc)
    start_profile = _on_loop(AsyncEngine.start_profile)
    stop_profile = _on_loop(AsyncEngine.stop_profile)
    drain = _on_loop(AsyncEngine.drain)
    get_server_info = _on_loop(AsyncEngine.get_server_info)
    get_model_info = _on_loop(AsyncEngine.get_model_info)

    # ------------------------------------------------------------ state

    def health(self) -> Health:
        """Return the state of the engine and of its processes. May be called at any time."""
        state = "closed" if os.getpid() != self._pid else self._frontend.state
        return info.health(state, self._frontend.parts.processes.process_states())

    def get_all_child_pids(self) -> list[int]:
        """Return the process ids of the engine's live processes."""
        return info.child_pids(self._frontend.parts.processes.process_states(), self._frontend.images)


class _EngineLoop:
    """The loop and the frontend of an Engine. It does not refer to the Engine, which can therefore be collected.

    Attributes:
        frontend: set when the start has succeeded.
    """

    def __init__(self) -> None:
        self.portal = Portal("aioengine", callers.closed, self._on_loop_ended)
        self.frontend: Frontend | None = None
        self._pid = os.getpid()

    def start(self, start: Callable[[], Coroutine[Any, Any, Frontend]]) -> Frontend:
        async def start_here() -> Frontend:
            self.frontend = await start()
            return self.frontend

        self.portal.start()
        return self.portal.call(start_here())

    def end(self) -> None:
        """Shut down, for ``shutdown``, at the end of the program and for collected engines. Does nothing in a fork."""
        if os.getpid() != self._pid:
            return
        frontend = self.frontend
        try:
            if frontend is not None:  # otherwise closing the loop cancels the start
                self._stop(frontend)
        finally:
            self.portal.close()

    def _stop(self, frontend: Frontend) -> None:
        try:
            if self.portal.is_current:  # waiting for the loop here would be a deadlock
                frontend.close_now()
            else:
                self.portal.call(frontend.stop(), STOP_TIMEOUT_S + 1)
        except EngineClosedError:  # the loop has ended already, and its thread does the rest
            return
        except TimeoutError:
            frontend.close_now()
        except BaseException:  # an interrupt; there is no second call
            frontend.close_now()
            raise

    def _on_loop_ended(self) -> None:
        """End open calls and child processes, on the loop's thread, if the loop ended without a shutdown."""
        if self.frontend is not None:
            reason = "the engine's event loop was ended from outside"
            self.frontend.close_now(EngineDeadError("frontend", pid=self._pid, reason=reason))
