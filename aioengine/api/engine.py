"""AsyncEngine: the engine for one event loop."""

from __future__ import annotations

import threading
import warnings
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, NoReturn, cast

from aioengine.api import signatures
from aioengine.api.answers import Answer
from aioengine.api.args import engine_config
from aioengine.api.foreign_names import no_attribute
from aioengine.api.stream import Generation, Stream
from aioengine.frontend import callers, info
from aioengine.frontend.callers import running_loop
from aioengine.frontend.engine_run import EngineRun
from aioengine.frontend.info import TokenizerNamespace
from aioengine.frontend.intake import requests
from aioengine.frontend.intake.beam_search import beam_search, search_options
from aioengine.frontend.intake.pool_requests import encode_request, rerank_request
from aioengine.frontend.intake.score import ScoreResult, score, score_request
from aioengine.frontend.loaded_adapters import UNLOAD_TIMEOUT_S
from aioengine.frontend.progress import ProgressBars
from aioengine.frontend.sessions.sessions import SessionOpening
from aioengine.frontend.startup import parts_of, start_frontend

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Coroutine
    from pathlib import PurePath
    from types import TracebackType
    from typing import Self, Unpack

    from aioengine.api.answers import BatchOutput
    from aioengine.api.signatures import EngineArguments
    from aioengine.errors import EngineError
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
    from aioengine.frontend.intake.score import ScoreOptions
    from aioengine.frontend.loaded_adapters import AdapterResult
    from aioengine.frontend.startup import Blueprint
    from aioengine.settings.config import EngineConfig
    from aioengine.tokenization.tokenizer import Tokenizer


class EngineFace(ABC):
    """The shared part of both engines: constructors, the six ``async_`` calls, and calls from any thread."""

    _is_bound = False
    """Whether its generations belong to the loop on which it was started."""

    _model_name: str

    @signatures.engine_arguments
    def __init__(self, model_path: str | PurePath | None = None, **arguments: Unpack[EngineArguments]) -> None:
        self._init(*parts_of(engine_config(model_path, arguments)))

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """An engine from an ``EngineConfig``."""
        engine = cls.__new__(cls)
        engine._init(*parts_of(config))
        return engine

    @classmethod
    def from_blueprint(cls, prepare: Callable[[], Blueprint], *, progress: bool | None = False) -> Self:
        """An engine of given parts, as ``aioengine.testing.fake_engine`` makes them."""
        engine = cls.__new__(cls)
        engine._init(prepare, progress, "")
        return engine

    @abstractmethod
    def _init(self, prepare: Callable[[], Blueprint], progress: bool | None, model_name: str) -> None:
        """``prepare`` makes the parts of the engine at its start; ``model_name`` may be empty."""

    @abstractmethod
    def _running(self) -> Frontend:
        """The started engine, for a caller on a thread and loop that may use it."""

    @abstractmethod
    def _anywhere(self) -> Frontend:
        """The started engine, for a caller on any thread."""

    @abstractmethod
    def health(self) -> Health:
        """The state of the engine and of its processes; may be called at any time, from any thread."""

    def __repr__(self) -> str:
        return info.described(type(self).__name__, self._model_name, self.health()["state"])

    if not TYPE_CHECKING:  # type checkers would take it for a sign that every attribute exists

        def __getattr__(self, name: str) -> NoReturn:
            instead, plain = "", name.removeprefix("async_")
            if f"async_{name}" in dir(type(self)):
                instead = f"; await engine.async_{name}(...), or use Engine for synchronous code"
            elif name != plain and plain in dir(type(self)):
                instead = f"; its name is {plain}"
            raise no_attribute(type(self).__name__, name, instead=instead)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an engine cannot be pickled or copied: it owns processes; make one where it is needed")

    @signatures.async_generate
    def async_generate(
        self,
        prompt: Prompt | None = None,
        sampling_params: BatchSampled | None = None,
        input_ids: Ids | None = None,
        *,
        stream: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> Generation[Answer] | Generation[BatchOutput] | Stream:
        """Generate from a prompt or its token ids; a list of either is a batch.

        The request is submitted when this returns. Await the result for the whole answer (a dict; a ``BatchOutput``
        for a batch or ``n`` > 1, which the types do not show for a single prompt), or, with ``stream=True``, iterate
        over its chunks. ``sampling_params`` is a ``SamplingParams`` or a dict of its fields; a batch takes one, or a
        list with one for each prompt. ``options`` are described at ``GenerateOptions``.

        Raises:
            TypeError, ValueError: an argument is wrong.
            EngineOverloadedError, EngineDrainingError, EngineClosedError, EngineDeadError: the engine takes no request.
            WrongLoopError: this is not the event loop of the ``AsyncEngine``.

        Awaiting it raises ``RequestTooLargeError`` where the prompt does not fit, ``RequestError`` where this request
        alone failed, and ``EngineDeadError`` where the engine died.
        """
        return self._open(
            partial(requests.generate_request, prompt, sampling_params, input_ids, stream=stream, options=options)
        )

    @signatures.async_chat
    def async_chat(
        self,
        messages: Conversations,
        sampling_params: BatchSampled | None = None,
        *,
        stream: bool = False,
        **options: Unpack[ChatOptions],
    ) -> Generation[Answer] | Generation[BatchOutput] | Stream:
        """Answer a conversation (dicts with ``role`` and ``content``), put through the model's chat template.

        ``content`` is text, or a list of text parts (``{"type": "text", "text": ...}``): a template that knows parts
        receives them unchanged, any other their joined text.

        A list of conversations is a batch. ``options`` are described at ``ChatOptions``: ``tools``, another template,
        variables for it, and those of ``async_generate``. Everything else is as there. Awaiting it raises ValueError
        where the template refuses the messages, or the model has no template.
        """
        return self._open(partial(requests.chat_request, messages, sampling_params, stream=stream, options=options))

    @signatures.async_encode
    def async_encode(
        self, prompt: Prompt | None = None, *, input_ids: Ids | None = None, **options: Unpack[EncodeOptions]
    ) -> Generation[Answer] | Generation[BatchOutput] | Stream:
        """Turn a text, or its token ids, into a vector; a list of either is a batch.

        Await the result: a dict with ``embedding`` (a numpy array, fp32) and ``meta_info``, or a ``BatchOutput`` of
        them, of which ``outs["embedding"]`` is the list. A model of embeddings pools as its files say, a model that
        generates gives the hidden state of the last token, normalised. ``options`` are described at ``EncodeOptions``.

        Raises:
            TypeError, ValueError: an argument is wrong.
            EngineOverloadedError, EngineDrainingError, EngineClosedError, EngineDeadError: the engine takes no request.
            WrongLoopError: this is not the event loop of the ``AsyncEngine``.

        Awaiting it raises ``RequestTooLargeError`` (a ValueError) where a text is longer than the model takes, without
        ``truncate=True``; ``RequestError`` where this request alone failed, or ended before its vector was there.
        """
        return self._open(partial(encode_request, prompt, input_ids, options))

    @signatures.async_rerank
    def async_rerank(
        self,
        query: str | Pairs,
        documents: Texts | None = None,
        *,
        top_n: int | None = None,
        **options: Unpack[PoolOptions],
    ) -> Generation[Answer] | Generation[BatchOutput] | Stream:
        """Score how well documents answer a query, with a cross-encoder.

        With ``documents`` the result has the best first, ``top_n`` of them; with a list of pairs ``[query, document]``
        in place of the query it has their order. Await it: a ``BatchOutput`` of dicts with ``score``, ``index`` (of the
        document, or pair) and ``meta_info``. ``options`` are described at ``PoolOptions``; errors are as for
        ``async_encode``, and a ValueError where the model is no cross-encoder.
        """
        return self._open(partial(rerank_request, query, documents, top_n, options))

    async def async_beam_search(
        self,
        prompt: str | TokenIds,
        beam_width: int = 4,
        max_new_tokens: int = 64,
        length_penalty: float = 1.0,
        **sampling: object,
    ) -> BatchOutput:
        """The ``beam_width`` best outputs for one prompt (text or token ids), best first, by beam search.

        ``meta_info["sequence_score"]`` is the sum of the log-probabilities of the output tokens, divided by their
        number to the power of ``length_penalty``. ``sampling``: ``stop_token_ids``, ``ignore_eos``, ``min_new_tokens``,
        ``skip_special_tokens``; with ``logprobs_mode="processed"`` also ``temperature``, ``repetition_penalty``,
        ``logit_bias``, ``allowed_token_ids`` and ``bad_words``. ``lora_path``: as for ``async_generate``.

        Raises:
            TypeError, ValueError: an argument is wrong. RequestTooLargeError: the longest output would not fit.
            Exception: what ``async_generate`` raises.
        """
        frontend = self._anywhere()
        mode = frontend.parts.settings.runner.logprobs_mode
        adapter = cast("str | None", sampling.pop("lora_path", None))
        options = search_options(beam_width, max_new_tokens, length_penalty, sampling, mode=mode)
        with frontend.adapters.held(adapter):
            return await beam_search(partial(self.async_generate, lora_path=adapter), frontend.parts, prompt, options)

    @signatures.async_score
    async def async_score(
        self,
        query: str | TokenIds | None = None,
        items: str | Texts | TokenIds | BatchIds | None = None,
        label_token_ids: TokenIds | BatchIds | None = None,
        **options: Unpack[ScoreOptions],
    ) -> ScoreResult | ScoreResult[list[float] | Exception]:
        """Score items behind a query: the probability of each of ``label_token_ids`` as the token after both.

        The prompt of an item is ``query + item``, as texts or as token ids. The labels are a list for all items, or one
        for each. A classifier gives its own scores, or their softmax, and needs no labels. ``options`` are described at
        ``ScoreOptions``.

        Raises:
            TypeError, ValueError: an argument is wrong.
            Exception: what ``async_generate`` raises.
        """
        request = await score_request(query, items, label_token_ids, options, parts=self._running().parts)
        return await score(request, generate=self.async_generate, encode=self.async_encode)

    def _open(self, make_request: Callable[[], CallRequest]) -> Generation[Answer] | Generation[BatchOutput] | Stream:
        frontend = self._running()
        reader = frontend.open(make_request)
        if reader.is_stream:
            return Stream(reader, home=frontend.loop, is_bound=self._is_bound, owner=self)
        return Generation[Answer](reader, home=frontend.loop, is_bound=self._is_bound, owner=self)

    def abort_request(self, rid: str | None = None, abort_all: bool = False) -> None:
        """End a live request, or all; they finish with reason ``abort`` and the output so far.

        ``rid`` may be that of a call, of one prompt of a batch (``x_2``) or of one sample. An unknown one is no
        error, neither of both is a ValueError. May be called from any thread.
        """
        self._anywhere().abort_request(rid, abort_all)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; it needs no torch. Raises ValueError with ``skip_tokenizer_init``."""
        return info.existing(self._anywhere().parts.tokenizer)

    @property
    def tokenizer_manager(self) -> TokenizerNamespace:
        """``tokenizer`` and ``abort_request``, for programs that look for them here."""
        frontend = self._anywhere()
        return TokenizerNamespace(frontend.parts.tokenizer, frontend.abort_request)

    @property
    def is_alive(self) -> bool:
        """Whether the engine takes or finishes requests."""
        return self.health()["state"] in info.ALIVE

    def stats(self) -> dict[str, int]:
        """Counters, as the scheduler reported them last; may be called from any thread."""
        return self._anywhere().stats()


class AsyncEngine(EngineFace):
    """An LLM inference engine for asyncio. Everything heavy runs in processes of its own.

    ``async with AsyncEngine(model_path=...) as engine`` starts it on the running loop and shuts it down at the end;
    ``await engine.start()`` and ``await engine.shutdown()`` do the same. It may be made anywhere, also before a fork,
    and belongs to the process and to the loop that start it. A call from another loop raises ``WrongLoopError``
    (``Engine`` serves any loop and thread). After its shutdown it can be started again. Without a ``model_path`` it
    runs the small demo model of the package. ``help(EngineArguments)`` describes all arguments.

    Raises:
        TypeError: an argument that does not exist, or a value of the wrong type.
        ValueError: a value outside its range, or a model folder that cannot be served. (Downloads: at the start.)
    """

    _is_bound = True
    _run: EngineRun | None = None  # also where the constructor failed

    def _init(self, prepare: Callable[[], Blueprint], progress: bool | None, model_name: str) -> None:
        self._model_name = model_name
        self._prepare = prepare
        self._progress = progress
        self._choice = threading.Lock()
        self._is_closed = False

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Start the processes and load the model, on the running loop. Does nothing on an engine that runs.

        An engine that was shut down, or whose loop was closed, can be started again, also on another loop.

        Raises:
            EngineStartupError: it could not start; no process or file is left behind.
            EngineClosedError: it was shut down while it started, or the parent of this forked process started it.
            EngineDeadError, EngineStalledError: it was started and has died; shut it down first.
            WrongLoopError: it runs on another loop, or no asyncio loop is running here.
        """
        running_loop()
        run = self._run
        if run is not None and not run.is_forked and (run.is_ended or run.loop.is_closed()):
            await run.end()  # memory of a device is free only when the last process has ended
        await self._joined_run().start(self._start_frontend)

    def _joined_run(self) -> EngineRun:
        """The run of this loop: the present one, or a new one where there is none."""
        with self._choice:
            run = self._run
            if run is None or not run.is_in_use:
                self._run = run = EngineRun()
                self._is_closed = False
            run.join()
        return run

    async def _start_frontend(self) -> Frontend:
        bars = ProgressBars(self._progress)
        try:
            return await start_frontend(self._prepare, bars.show)
        finally:
            bars.close()

    def shutdown(self) -> Coroutine[object, None, None]:
        """End the processes; calls that wait get ``EngineClosedError``. Takes seconds at most; may be called twice.

        It begins at this call: a task that is cancelled before its first step ends the engine too.
        """
        run = self._run if self._run is not None and self._run.is_in_use and not self._run.is_forked else None
        if run is None or run.start_end():
            self._is_closed = True
        return self._shutdown(run)

    async def _shutdown(self, run: EngineRun | None) -> None:
        if run is not None:
            await run.end()
        self._is_closed = True

    if not TYPE_CHECKING:  # type checkers know that there is no ``with``

        def __enter__(self) -> NoReturn:
            raise TypeError("an AsyncEngine is opened by `async with`; for `with` there is Engine")

        __exit__ = __enter__  # without it Python would not call the other

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.shutdown()

    def __del__(self) -> None:
        if self._run is not None and self._run.kill_now():
            warnings.warn("an AsyncEngine was not shut down", ResourceWarning, stacklevel=1, source=self)

    def _running(self) -> Frontend:
        """The started engine, for a caller on its loop."""
        frontend = self._anywhere()
        if self._run is not None:
            callers.refuse_other_loop(self._run.loop)
        return frontend

    def _anywhere(self) -> Frontend:
        """The started engine, for a caller on any thread."""
        run = self._run
        if run is None or run.frontend is None or run.is_ended:
            raise callers.closed() if self._is_closed else callers.not_started()
        callers.refuse_fork(run.pid)
        return run.frontend

    def attach(self, rid: str, from_offset: int = 0) -> Stream:
        """Continue a stream that was left, from character ``from_offset`` of its text.

        It must have been opened with ``resume_ttl``, and left or ended at most that many seconds ago. The stream of
        its previous reader ends. Ids without text of their own may be repeated; ``token_offset`` shows it.

        Raises:
            ValueError: there is no such stream, or its text is shorter.
        """
        frontend = self._running()
        reader = frontend.attachments.attach(rid, from_offset, frontend)
        return Stream(reader, home=frontend.loop, is_bound=self._is_bound, owner=self)

    # ------------------------------------------------------------ sessions

    @signatures.own_arguments
    def open_session(
        self,
        capacity_of_str_len: int = 0,
        session_id: str | None = None,
        streaming: bool = False,
        timeout: float | None = None,
    ) -> SessionOpening:
        """Open a session: await this for its id. Requests with ``session_params`` continue earlier ones of the session.

        ``async with engine.open_session() as session_id:`` closes the session at the end of the block.

        session_id: its id; None: a random one. timeout: seconds without a running request after which the session is
        closed (checked every second). streaming: the session has one request at a time, and each continues the last
        answered one. capacity_of_str_len: no effect; the context length limits a session.

        Raises:
            TypeError, ValueError: an argument is wrong, or a session with this id is open.
            EngineOverloadedError: too many sessions are open. EngineDrainingError, EngineClosedError, EngineDeadError.
        """

        async def opening() -> str:
            return self._running().sessions.open(capacity_of_str_len, session_id, streaming, timeout)

        return SessionOpening(opening(), self.close_session)

    async def close_session(self, session_id: str) -> None:
        """Close a session: forget its history and unpin its pages. Running requests continue.

        Ignores unknown sessions. Raises TypeError or ValueError if ``session_id`` cannot be an id.
        """
        self._running().sessions.close(session_id)

    # ------------------------------------------------------------ control

    async def admit(self) -> None:
        """Wait in a queue, first come first served, until there is room for a call.

        The place is reserved for this task until its next call, for a second at most. Cancelling it leaves the queue.

        Raises:
            EngineDrainingError, EngineClosedError, EngineDeadError: no call will be accepted.
        """
        await self._running().overload.wait()

    async def flush_cache(self) -> Outcome:
        """Empty the prefix cache; does nothing, and returns a false outcome, while requests run or wait."""
        return await self._running().controls.order("flush_cache")

    @signatures.own_arguments
    async def load_lora_adapter(self, lora_name: str, lora_path: str | PurePath, pinned: bool = False) -> AdapterResult:
        """Load a LoRA adapter from a folder written by peft. Requests then use it with ``lora_path=lora_name``.

        pinned: it keeps its slot on the device. If the adapter cannot be used or the name is in use, the result is
        false and has the reason in ``error_message``. ``loaded_adapters`` has all loaded adapters.

        Raises:
            TypeError, ValueError: an argument has the wrong type. EngineClosedError, EngineDeadError.
        """
        return await self._running().adapters.load(lora_name, lora_path, pinned)

    @signatures.own_arguments
    async def unload_lora_adapter(self, lora_name: str, timeout: float = UNLOAD_TIMEOUT_S) -> AdapterResult:
        """Unload a LoRA adapter: refuse new requests for it at once, and wait for its running requests.

        If some still run after ``timeout`` seconds, or if this call is cancelled, the adapter stays loaded. Results and
        errors are those of ``load_lora_adapter``; an unknown name gives a false result.
        """
        return await self._running().adapters.unload(lora_name, timeout)

    async def list_lora_adapters(self) -> AdapterResult:
        """Return the loaded adapters in ``loaded_adapters``: name -> folder."""
        return self._running().adapters.list()

    async def pause_generation(self, mode: PauseMode = "abort") -> Outcome:
        """Compute nothing until ``continue_generation``; new calls wait.

        ``mode``: "abort" ends all requests, "in_place" keeps them.
        """
        return await self._running().controls.pause(mode)

    async def continue_generation(self) -> Outcome:
        """Continue after ``pause_generation``."""
        return await self._running().controls.order("continue")

    async def freeze_gc(self) -> None:
        """Exclude all present objects from garbage collection (``gc.freeze``), here and in the scheduler process."""
        await self._running().controls.freeze_gc()

    async def start_profile(
        self, output_dir: str | os.PathLike[str] | None = None, **options: Unpack[ProfileOptions]
    ) -> None:
        """Begin a trace of the scheduler process by torch's profiler, with a range for each step.

        It goes to a new file in ``output_dir`` (default: the system's folder for temporary files), for
        chrome://tracing or Perfetto. ``options`` are described at ``ProfileOptions``.

        Raises:
            TypeError, ValueError: an argument is wrong.
            RuntimeError: a profile is running already, or the folder cannot be written to.
        """
        await self._running().controls.start_profile(output_dir, options)

    async def stop_profile(self) -> str:
        """End the trace and write it; returns the path of the file. Nothing is computed meanwhile.

        Raises:
            RuntimeError: none was started, or it cannot be written.
        """
        return await self._running().controls.stop_profile()

    @signatures.own_arguments
    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new calls and wait for all requests. After ``timeout`` seconds end them with reason ``shutdown``.

        Returns whether all finished by themselves. New calls raise ``EngineDrainingError`` from now on. Requests that
        are paused, or suspended because of a slow reader, continue. Without a ``timeout`` this waits without limit,
        also for the reader of a large batch, whose last rows begin when its first ones were read.
        """
        return await self._running().drain(timeout)

    # ------------------------------------------------------------ state

    def health(self) -> Health:
        """The state of the engine and of its processes; may be called at any time, from any thread.

        "starting" until ``start()`` has succeeded, also before it was called; "closed" where that failed. An engine
        that has died is "dead" or "stalled" also after its shutdown, until it is started again.
        """
        frontend = None if self._run is None else self._run.frontend
        has_failed = self._run is not None and self._run.has_failed
        if self._run is None or frontend is None:
            return {"state": "closed" if self._is_closed or has_failed else "starting", "processes": []}
        found = info.health(frontend.state, frontend.parts.processes.processes())
        # (A loop may have been closed before the shutdown; and to a fork, the engine of its parent is closed.)
        if (self._is_closed or self._run.is_forked) and frontend.failure is None:
            found["state"] = "closed"
        return found

    def get_all_child_pids(self) -> list[int]:
        """The ids of the engine's processes that are alive."""
        frontend = None if self._run is None else self._run.frontend
        if frontend is None:
            return []
        return info.child_pids(frontend.parts.processes.processes(), frontend.images)

    async def get_server_info(self) -> dict[str, object]:
        """The resolved settings, the device and its implementations, the memory, and the scheduler's state."""
        return await self._running().server_info()

    async def get_model_info(self) -> ModelInfo:
        """The model that is served."""
        return info.model_info(self._running().parts.settings)

    async def wait_failed(self) -> EngineError | None:
        """Wait until the engine dies and return the error; None once it was shut down."""
        return await self._running().wait_failed()
