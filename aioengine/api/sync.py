"""Engine: the engine for scripts, threads and notebooks. It runs an event loop in its own thread."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, cast

from aioengine.api import signatures
from aioengine.api.engine import EngineFace
from aioengine.errors import EngineClosedError, EngineDeadError
from aioengine.frontend import callers, info
from aioengine.frontend.calls.reader import EndOfOutput
from aioengine.frontend.frontend import STOP_TIMEOUT_S
from aioengine.frontend.intake import requests
from aioengine.frontend.intake.pool_requests import encode_request, rerank_request
from aioengine.frontend.loaded_adapters import UNLOAD_TIMEOUT_S
from aioengine.frontend.portal import Portal
from aioengine.frontend.progress import ProgressBars
from aioengine.frontend.startup import start_frontend

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import PurePath
    from types import TracebackType
    from typing import NoReturn, Self, Unpack

    from aioengine.api.answers import Answer, BatchOutput, Chunk, Embedding, Ranking
    from aioengine.api.signatures import Chat, Encode, Generate, Rerank, Score
    from aioengine.frontend.calls.reader import Reader
    from aioengine.frontend.controls import Outcome, PauseMode, ProfileOptions
    from aioengine.frontend.frontend import Frontend
    from aioengine.frontend.info import Health, ModelInfo
    from aioengine.frontend.intake.pool_requests import EncodeOptions, Pairs, PoolOptions
    from aioengine.frontend.intake.request_options import (
        BatchIds,
        BatchSampled,
        ChatOptions,
        Conversations,
        GenerateOptions,
        Ids,
        Prompt,
        Texts,
        TokenIds,
    )
    from aioengine.frontend.intake.requests import CallRequest
    from aioengine.frontend.intake.score import ScoreOptions, ScoreResult
    from aioengine.frontend.loaded_adapters import AdapterResult
    from aioengine.frontend.startup import Blueprint
    from aioengine.protocol.messages import Progress


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
        return self._reader.rid

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

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def wait_for_news(reader: Reader) -> None:
    """Block this thread until there may be new output. An interrupt during the wait ends the reader."""
    gate = threading.Lock()
    gate.acquire()
    if not reader.wait(gate.release, blocks=True):
        return
    try:
        gate.acquire()
    except BaseException:
        reader.leave()
        raise


if TYPE_CHECKING:
    SyncGenerate = Generate[Answer, BatchOutput, BatchOutput[Answer | Exception], ChunkIterator]
    SyncChat = Chat[Answer, BatchOutput, BatchOutput[Answer | Exception], ChunkIterator]
    SyncEncode = Encode[Embedding, BatchOutput[Embedding], BatchOutput[Embedding | Exception]]
    SyncRerank = Rerank[BatchOutput[Ranking], BatchOutput[Ranking | Exception]]
    SyncScore = Score[ScoreResult, ScoreResult[list[float] | Exception]]


def _generate(method: Callable[..., object]) -> SyncGenerate:
    return cast("SyncGenerate", method)


def _chat(method: Callable[..., object]) -> SyncChat:
    return cast("SyncChat", method)


def _encode(method: Callable[..., object]) -> SyncEncode:
    return cast("SyncEncode", method)


def _rerank(method: Callable[..., object]) -> SyncRerank:
    return cast("SyncRerank", method)


def _score(method: Callable[..., object]) -> SyncScore:
    return cast("SyncScore", method)


class Engine(EngineFace):
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
        self._pid = os.getpid()
        bars = ProgressBars(progress)
        run = _EngineLoop()
        self._portal = run.portal
        self._finalizer = weakref.finalize(self, run.end)  # before the start, so that an exception leaves no process
        try:
            self._frontend = run.start(prepare, bars.show)
        except BaseException:
            try:
                self._finalizer()
            except BaseException:  # a second interrupt; the finalizer runs only once
                run.end()
                raise
            raise
        finally:
            bars.close()

    # ------------------------------------------------------------ life

    def shutdown(self) -> None:
        """End the processes within seconds. Waiting calls raise ``EngineClosedError``. May be called twice."""
        self._finalizer()
        if not self._frontend.is_interrupted:
            self._portal.join(STOP_TIMEOUT_S)  # another thread may be shutting it down

    def __enter__(self) -> Self:
        self._running()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def __del__(self) -> None:
        finalizer: weakref.finalize[..., Engine] | None = self.__dict__.get("_finalizer")
        if finalizer is not None and finalizer.alive and os.getpid() == self._pid:
            warnings.warn("an Engine was not shut down", ResourceWarning, stacklevel=1, source=self)

    def _running(self) -> Frontend:
        callers.refuse_fork(self._pid)
        if not self._finalizer.alive:
            raise callers.closed()
        return self._frontend

    _anywhere = _running

    def _blocking(self) -> Frontend:
        """Return the running frontend for a call that waits; raise an error if waiting here would block its loop."""
        self._running().check_waiting(blocks=True)
        return self._frontend

    # ------------------------------------------------------------ generate

    @_generate
    def generate(
        self,
        prompt: Prompt | None = None,
        sampling_params: BatchSampled | None = None,
        input_ids: Ids | None = None,
        *,
        stream: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> Answer | BatchOutput | ChunkIterator:
        """Generate text for a prompt (text or token ids) or a batch (a list of prompts), and wait for the answer.

        With ``stream=True``, return an iterator over the chunks immediately. Arguments and errors are those of
        ``AsyncEngine.async_generate``. Ctrl-C aborts only this call.
        """
        return self._wait(
            partial(requests.generate_request, prompt, sampling_params, input_ids, stream=stream, options=options)
        )

    @_chat
    def chat(
        self,
        messages: Conversations,
        sampling_params: BatchSampled | None = None,
        *,
        stream: bool = False,
        **options: Unpack[ChatOptions],
    ) -> Answer | BatchOutput | ChunkIterator:
        """Answer a conversation, or a list of conversations, as ``AsyncEngine.async_chat``."""
        return self._wait(partial(requests.chat_request, messages, sampling_params, stream=stream, options=options))

    @_encode
    def encode(
        self, prompt: Prompt | None = None, *, input_ids: Ids | None = None, **options: Unpack[EncodeOptions]
    ) -> Answer | BatchOutput | ChunkIterator:
        """Embed a text (or token ids), or a list of texts, as ``AsyncEngine.async_encode``."""
        return self._wait(partial(encode_request, prompt, input_ids, options))

    @_rerank
    def rerank(
        self,
        query: str | Pairs,
        documents: Texts | None = None,
        *,
        top_n: int | None = None,
        **options: Unpack[PoolOptions],
    ) -> Answer | BatchOutput | ChunkIterator:
        """Score how well documents answer a query, as ``AsyncEngine.async_rerank``."""
        return self._wait(partial(rerank_request, query, documents, top_n, options))

    def _wait(self, make_request: Callable[[], CallRequest]) -> Answer | BatchOutput | ChunkIterator:
        reader = self._running().open(make_request)
        if reader.is_stream:
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
        frontend = self._running()
        return ChunkIterator(frontend.attachments.attach(rid, from_offset, frontend), self)

    def beam_search(
        self,
        prompt: str | TokenIds,
        beam_width: int = 4,
        max_new_tokens: int = 64,
        length_penalty: float = 1.0,
        **sampling: object,
    ) -> BatchOutput:
        """Return the best outputs for one prompt by beam search, as ``AsyncEngine.async_beam_search``."""
        self._blocking()
        return self._portal.call(self.async_beam_search(prompt, beam_width, max_new_tokens, length_penalty, **sampling))

    @_score
    def score(
        self,
        query: str | TokenIds | None = None,
        items: str | Texts | TokenIds | BatchIds | None = None,
        label_token_ids: TokenIds | BatchIds | None = None,
        **options: Unpack[ScoreOptions],
    ) -> ScoreResult | ScoreResult[list[float] | Exception]:
        """Return the probabilities of labels after ``query + item``, as ``AsyncEngine.async_score``."""
        self._blocking()
        return self._portal.call(self.async_score(query, items, label_token_ids, **options))

    # ------------------------------------------------------------ sessions

    @signatures.own_arguments
    def open_session(
        self,
        capacity_of_str_len: int = 0,
        session_id: str | None = None,
        streaming: bool = False,
        timeout: float | None = None,
    ) -> str:
        """Open a session and return its id, as ``AsyncEngine.open_session``."""
        return self._running().sessions.open(capacity_of_str_len, session_id, streaming, timeout)

    def close_session(self, session_id: str) -> None:
        """Close a session, as ``AsyncEngine.close_session``."""
        self._running().sessions.close(session_id)

    # ------------------------------------------------------------ control

    def admit(self) -> None:
        """Wait in a first-come-first-served queue until the engine has capacity for a call.

        The capacity is reserved for the next call of this thread, for one second at most.

        Raises:
            EngineDrainingError, EngineClosedError, EngineDeadError: no call will be accepted.
        """
        self._portal.call(self._blocking().overload.wait(threading.get_ident()))

    def flush_cache(self) -> Outcome:
        """Empty the prefix cache, as ``AsyncEngine.flush_cache``."""
        return self._portal.call(self._blocking().controls.order("flush_cache"))

    @signatures.own_arguments
    def load_lora_adapter(self, lora_name: str, lora_path: str | PurePath, pinned: bool = False) -> AdapterResult:
        """Load a LoRA adapter, as ``AsyncEngine.load_lora_adapter``."""
        return self._portal.call(self._blocking().adapters.load(lora_name, lora_path, pinned))

    @signatures.own_arguments
    def unload_lora_adapter(self, lora_name: str, timeout: float = UNLOAD_TIMEOUT_S) -> AdapterResult:
        """Unload a LoRA adapter after its last request, as ``AsyncEngine.unload_lora_adapter``."""
        return self._portal.call(self._blocking().adapters.unload(lora_name, timeout))

    def list_lora_adapters(self) -> AdapterResult:
        """Return the loaded adapters, as ``AsyncEngine.list_lora_adapters``."""
        return self._running().adapters.list()

    def pause_generation(self, mode: PauseMode = "abort") -> Outcome:
        """Stop computing until ``continue_generation``, as ``AsyncEngine.pause_generation``."""
        return self._portal.call(self._blocking().controls.pause(mode))

    def continue_generation(self) -> Outcome:
        """Continue after ``pause_generation``."""
        return self._portal.call(self._blocking().controls.order("continue"))

    def freeze_gc(self) -> None:
        """Exclude all present objects from garbage collection, as ``AsyncEngine.freeze_gc``."""
        self._portal.call(self._blocking().controls.freeze_gc())

    def start_profile(
        self, output_dir: str | os.PathLike[str] | None = None, **options: Unpack[ProfileOptions]
    ) -> None:
        """Start torch's profiler in the scheduler process, as ``AsyncEngine.start_profile``."""
        self._portal.call(self._blocking().controls.start_profile(output_dir, options))

    def stop_profile(self) -> str:
        """End the trace and write it, as ``AsyncEngine.stop_profile``."""
        return self._portal.call(self._blocking().controls.stop_profile())

    @signatures.own_arguments
    def drain(self, timeout: float | None = None) -> bool:
        """Refuse new calls and wait for all requests, as ``AsyncEngine.drain``."""
        return self._portal.call(self._blocking().drain(timeout))

    # ------------------------------------------------------------ state

    def health(self) -> Health:
        """Return the state of the engine and of its processes. May be called at any time."""
        state = "closed" if os.getpid() != self._pid else self._frontend.state
        return info.health(state, self._frontend.parts.processes.processes())

    def get_all_child_pids(self) -> list[int]:
        """Return the process ids of the engine's live processes."""
        return info.child_pids(self._frontend.parts.processes.processes(), self._frontend.images)

    def get_server_info(self) -> dict[str, object]:
        """Return the settings, the device, the memory and the scheduler's state."""
        return self._portal.call(self._blocking().server_info())

    def get_model_info(self) -> ModelInfo:
        """Return facts about the served model."""
        frontend = self._running()
        return info.model_info(frontend.parts.settings, frontend.weight_version)


class _EngineLoop:
    """The loop and the frontend of an Engine. It does not refer to the Engine, which can therefore be collected.

    Attributes:
        frontend: set when the start has succeeded.
    """

    def __init__(self) -> None:
        self.portal = Portal("aioengine", callers.closed, self._on_loop_ended)
        self.frontend: Frontend | None = None
        self._pid = os.getpid()

    def start(self, prepare: Callable[[], Blueprint], on_progress: Callable[[Progress], None]) -> Frontend:
        self.portal.start()
        return self.portal.call(self._start(prepare, on_progress))

    async def _start(self, prepare: Callable[[], Blueprint], on_progress: Callable[[Progress], None]) -> Frontend:
        self.frontend = await start_frontend(prepare, on_progress)
        return self.frontend

    def end(self) -> None:
        """Shut down, for ``shutdown``, at the end of the program and for collected engines. Does nothing in a fork."""
        if os.getpid() != self._pid:
            return
        frontend = self.frontend
        try:
            if frontend is not None:  # otherwise closing the loop cancels the start
                self._stop(frontend)
        finally:
            self.portal.close(waits=frontend is None or not frontend.is_interrupted)

    def _stop(self, frontend: Frontend) -> None:
        try:
            if self.portal.is_current or frontend.is_interrupted:  # waiting for the loop here would be a deadlock
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
