"""AsyncEngine: the engine for one event loop."""

from __future__ import annotations

import asyncio
import os
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NoReturn, Self, Unpack, cast

from aioengine.api import checks, map_items, selfcheck, signatures
from aioengine.api.answers import Answer, BatchOutput
from aioengine.api.args import engine_config
from aioengine.api.foreign_names import no_attribute
from aioengine.api.signatures import EngineArguments
from aioengine.api.stream import Generation, Stream
from aioengine.errors import EngineError
from aioengine.frontend import callers, info
from aioengine.frontend.callers import running_loop
from aioengine.frontend.calls.observers import Observer
from aioengine.frontend.controls import Outcome, PauseMode, ProfileOptions
from aioengine.frontend.engine_parts import Blueprint
from aioengine.frontend.engine_run import EngineRun
from aioengine.frontend.frontend import Frontend
from aioengine.frontend.info import Health, ModelInfo
from aioengine.frontend.intake import requests
from aioengine.frontend.intake.beam_search import beam_search, search_options
from aioengine.frontend.intake.pool_requests import EncodeOptions, Pairs, PoolOptions, encode_request, rerank_request
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
from aioengine.frontend.intake.score import ScoreOptions, ScoreResult, score, score_request
from aioengine.frontend.live_weights import WeightUpdate
from aioengine.frontend.loaded_adapters import UNLOAD_TIMEOUT_S, AdapterResult
from aioengine.frontend.sessions.sessions import SessionOpening
from aioengine.frontend.startup import start_arguments, start_frontend
from aioengine.protocol.weight_messages import WeightCall
from aioengine.settings.config import EngineConfig
from aioengine.supervision.tasks import runs_here

if TYPE_CHECKING:
    from aioengine.tokenization.tokenizer import Tokenizer


class BaseEngine(ABC):
    """The shared part of both engines: constructors, the six ``async_`` calls, and calls from any thread."""

    _is_bound = False
    """Whether its generations belong to the loop on which it was started."""

    _model_name: str
    _observers: list[Observer]

    @signatures.engine_arguments
    def __init__(self, model_path: str | PurePath | None = None, **arguments: Unpack[EngineArguments]) -> None:
        self._init(*start_arguments(engine_config(model_path, arguments)))

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """Make an engine from an ``EngineConfig``."""
        engine = cls.__new__(cls)
        engine._init(*start_arguments(config))
        return engine

    @classmethod
    def from_blueprint(cls, prepare: Callable[[], Blueprint]) -> Self:
        """Make an engine from prepared parts, as ``aioengine.testing.fake_engine`` does."""
        engine = cls.__new__(cls)
        engine._init(prepare, progress=False, model_name="")
        return engine

    @abstractmethod
    def _init(self, prepare: Callable[[], Blueprint], progress: bool | None, model_name: str) -> None:
        """``prepare`` makes the parts of the engine at its start; ``model_name`` may be empty."""

    @abstractmethod
    def _frontend_here(self) -> Frontend:
        """Return the started frontend; raise an error if this thread or loop may not use it."""

    @abstractmethod
    def _frontend_anywhere(self) -> Frontend:
        """Return the started frontend, on any thread."""

    @abstractmethod
    def health(self) -> Health:
        """Return the state of the engine and of its processes. May be called at any time, from any thread."""

    def __repr__(self) -> str:
        words = type(self).__name__, self._model_name, self.health()["state"]
        return f"<{' '.join(filter(None, words))}>"

    if not TYPE_CHECKING:  # otherwise type checkers would accept every attribute

        def __getattr__(self, name: str) -> NoReturn:
            instead, plain = "", name.removeprefix("async_")
            if f"async_{name}" in dir(type(self)):
                instead = f"; await engine.async_{name}(...), or use Engine for synchronous code"
            elif name != plain and plain in dir(type(self)):
                instead = f"; its name is {plain}"
            raise no_attribute(type(self).__name__, name, instead=instead)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an engine cannot be pickled or copied because it owns processes; create one where you need it")

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
        """Generate text for a prompt (text or token ids) or for a batch (a list of prompts).

        This call submits the request. Await the result to get the whole answer: a dict, or a ``BatchOutput`` for a
        batch and for ``n`` > 1. (Type checkers see a dict for a single prompt with ``n`` > 1.) With ``stream=True``,
        iterate over the chunks. ``sampling_params`` is a ``SamplingParams`` or a dict of its fields; a batch takes one
        for all prompts or a list with one per prompt. ``GenerateOptions`` describes the ``options``.

        Raises:
            TypeError, ValueError: an argument is wrong.
            EngineOverloadedError, EngineDrainingError, EngineClosedError, EngineDeadError: the engine accepts no
                requests.
            WrongLoopError: the ``AsyncEngine`` was started on another event loop.

        Awaiting raises ``RequestTooLargeError`` if the prompt does not fit, ``RequestError`` if only this request
        failed, and ``EngineDeadError`` if the engine died.
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
        """Answer a conversation, using the model's chat template. A list of conversations is a batch.

        A conversation is a list of dicts with ``role`` and ``content``. ``content`` is text, or a list of parts
        (``{"type": "text", "text": ...}``). If the template does not support parts, it gets their joined text.

        ``ChatOptions`` describes the ``options``: ``tools``, another template, template variables, and the options of
        ``async_generate``. Results and errors are those of ``async_generate``. Awaiting also raises ValueError if the
        template refuses the messages or if the model has no template.
        """
        return self._open(partial(requests.chat_request, messages, sampling_params, stream=stream, options=options))

    @signatures.async_encode
    def async_encode(
        self, prompt: Prompt | None = None, *, input_ids: Ids | None = None, **options: Unpack[EncodeOptions]
    ) -> Generation[Answer] | Generation[BatchOutput] | Stream:
        """Embed a text (or token ids) or a batch (a list of texts).

        Await the result: a dict with ``embedding`` (a numpy array [D], fp32) and ``meta_info``, or a ``BatchOutput`` of
        these dicts; ``outs["embedding"]`` is the list of all embeddings. An embedding model pools as its files specify.
        A generative model returns the normalized hidden state of the last token. ``EncodeOptions`` describes the
        ``options``.

        Errors are those of ``async_generate``. Awaiting raises ``RequestTooLargeError`` (a ValueError) if a text is too
        long for the model and ``truncate`` is not set, and ``RequestError`` also if the request was aborted.
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

        Await the result: a ``BatchOutput`` of dicts with ``score``, ``index`` and ``meta_info``. With a query and
        ``documents``, it has the ``top_n`` best documents (default: all), best first. If ``query`` is a list of pairs
        ``[query, document]``, it has one score per pair, in their order. ``PoolOptions`` describes the ``options``.
        Errors are those of ``async_encode``, also ValueError if the model is not a cross-encoder.
        """
        return self._open(partial(rerank_request, query, documents, top_n, options))

    async def async_beam_search(
        self,
        /,
        prompt: str | TokenIds,
        beam_width: int = 4,
        max_new_tokens: int = 64,
        length_penalty: float = 1.0,
        **sampling: object,
    ) -> BatchOutput:
        """Return the ``beam_width`` best outputs for one prompt (text or token ids), best first, by beam search.

        ``meta_info["sequence_score"]`` is the sum of the logprobs of the output tokens, divided by
        ``num_tokens ** length_penalty``. ``sampling`` takes ``stop_token_ids``, ``ignore_eos``, ``min_new_tokens``,
        ``skip_special_tokens`` and ``lora_path``. With ``logprobs_mode="processed"`` it also takes ``temperature``,
        ``repetition_penalty``, ``logit_bias``, ``allowed_token_ids`` and ``bad_words``.

        Raises:
            TypeError, ValueError: an argument is wrong.
            RequestTooLargeError: the longest output would not fit.
            Exception: the errors of ``async_generate``.
        """
        frontend = self._frontend_anywhere()
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
        """Return, for each item, the probabilities of ``label_token_ids`` as the token after ``query + item``.

        Query and items are texts or token ids. ``label_token_ids`` is one list for all items or one list per item. A
        classifier needs no labels: it returns its own scores or their softmax. ``ScoreOptions`` describes the
        ``options``.

        Raises:
            TypeError, ValueError: an argument is wrong.
            Exception: the errors of ``async_generate``.
        """
        parts = self._frontend_here().parts
        request = await asyncio.to_thread(score_request, query, items, label_token_ids, options, parts=parts)
        return await score(request, generate=self.async_generate, encode=self.async_encode)

    def _open(self, make_request: Callable[[], CallRequest]) -> Generation[Answer] | Generation[BatchOutput] | Stream:
        frontend = self._frontend_here()
        reader = frontend.open(make_request)
        if reader.call.is_stream:
            return Stream(reader, home=frontend.loop, is_bound=self._is_bound, owner=self)
        return Generation[Answer](reader, home=frontend.loop, is_bound=self._is_bound, owner=self)

    def abort_request(self, rid: str | None = None, abort_all: bool = False) -> None:
        """End one request, or all. An aborted request finishes with reason ``abort`` and its output so far.

        ``rid`` is the id of a call, of one prompt of a batch (``x_2``) or of one sample. Unknown ids are ignored.
        Raises ValueError without ``rid`` and ``abort_all``. May be called from any thread.
        """
        self._frontend_anywhere().abort_request(rid, abort_all)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, which does not need torch. Raises ValueError with ``skip_tokenizer_init``."""
        tokenizer = self._frontend_anywhere().parts.tokenizer
        if tokenizer is None:
            raise ValueError("this engine has no tokenizer (skip_tokenizer_init)")
        return tokenizer

    @property
    def tokenizer_manager(self) -> Self:
        """The engine, for programs written for other engines: they read ``tokenizer_manager.tokenizer``."""
        self._frontend_anywhere()
        return self

    @property
    def is_alive(self) -> bool:
        """Whether the engine accepts requests or still finishes some."""
        return self.health()["state"] in ("running", "draining", "recovering")

    @property
    def is_paused(self) -> bool:
        """Whether ``pause_generation`` was called, and ``continue_generation`` was not."""
        return self._frontend_anywhere().controls.is_paused

    def stats(self) -> dict[str, int]:
        """Return the last counters that the scheduler reported. May be called from any thread."""
        return self._frontend_anywhere().stats()

    def add_observer(self, observer: Observer) -> None:
        """Call ``observer`` with each ``FinishedRequest`` of later calls. May be called before the start.

        It runs on the engine's loop, so it must not block, in a copy of the context of the call. The loop logs its
        exceptions. Prompts of a failed or left call that were not tokenized yet are not reported.
        """
        self._observers.append(observer)


class AsyncEngine(BaseEngine):
    """An LLM inference engine for asyncio. The model runs in separate processes.

    ``async with AsyncEngine(model_path=...) as engine`` starts it on the running loop and shuts it down at the end of
    the block; so do ``await engine.start()`` and ``await engine.shutdown()``. You can create it anywhere, also before a
    fork, and start it again after a shutdown. It belongs to the process and the loop that start it: calls from another
    loop raise ``WrongLoopError``. ``EngineArguments`` describes all arguments; the default is the small demo model.

    Methods raise TypeError or ValueError if an argument is wrong, ``EngineClosedError`` after the shutdown, and
    ``EngineDeadError`` if the engine has died.

    Raises:
        TypeError: an argument does not exist, or a value has the wrong type.
        ValueError: a value is out of range, or the model folder cannot be served. (For downloads, ``start`` raises it.)
        EngineStartupError: too few file descriptors are free.
    """

    _is_bound = True
    _run: EngineRun | None = None  # set here because ``__del__`` runs even if the constructor fails

    def _init(self, prepare: Callable[[], Blueprint], progress: bool | None, model_name: str) -> None:
        self._model_name = model_name
        self._observers: list[Observer] = []
        self._prepare = prepare
        self._progress = progress
        self._start_lock = threading.Lock()
        self._is_closed = False

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Start the processes and load the model, on the running loop. Does nothing if the engine is running.

        After a shutdown, or if its loop was closed, the engine can be started again, also on another loop.

        Raises:
            EngineStartupError: it could not start. No process or file is left behind.
            EngineClosedError: it was shut down during the start, or this process is a fork of the one that started it.
            EngineDeadError, EngineStalledError: it has died; shut it down first.
            WrongLoopError: it runs on another loop, or no asyncio loop is running here.
        """
        running_loop()
        run = self._run
        if run is not None and not run.is_forked and (run.is_shutting_down or run.loop.is_closed()):
            await run.shutdown()  # the memory of the GPU is free only after the last process has ended
        with self._start_lock:  # another thread may start it at the same time
            run = self._run
            if run is None or not run.is_in_use:
                self._run = run = EngineRun()
                self._is_closed = False
            run.announce_start()
        await run.start(partial(start_frontend, self._prepare, self._progress, self._observers))

    def shutdown(self) -> Coroutine[object, None, None]:
        """End the processes within seconds. Waiting calls raise ``EngineClosedError``. May be called twice.

        The shutdown begins with this call, not with the first step of the coroutine: if a task for it is cancelled
        before it runs, the engine still ends.
        """
        run = self._run if self._run is not None and self._run.is_in_use and not self._run.is_forked else None
        if run is None or run.begin_shutdown():
            self._is_closed = True
        return self._shutdown(run)

    async def _shutdown(self, run: EngineRun | None) -> None:
        if run is not None:
            await run.shutdown()
        self._is_closed = True

    if not TYPE_CHECKING:  # type checkers report ``with`` themselves

        def __enter__(self) -> NoReturn:
            raise TypeError("an AsyncEngine needs `async with`; for `with`, use Engine")

        __exit__ = __enter__  # Python calls __enter__ only if __exit__ exists

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.shutdown()

    def __del__(self) -> None:
        if self._run is not None and self._run.kill_now():
            warnings.warn(
                "an AsyncEngine was not shut down; use `async with`", ResourceWarning, stacklevel=1, source=self
            )

    def _frontend_here(self) -> Frontend:
        """Return the started frontend; raise ``WrongLoopError`` on another loop."""
        frontend = self._frontend_anywhere()
        if not runs_here(frontend.loop):
            raise callers.wrong_loop()
        return frontend

    def _frontend_anywhere(self) -> Frontend:
        """Return the started frontend, on any thread."""
        run = self._run
        if run is None or run.frontend is None or run.is_shutting_down:
            raise callers.closed() if self._is_closed else callers.not_started()
        if os.getpid() != run.pid:
            raise callers.forked(run.pid)
        return run.frontend

    def attach(self, rid: str, from_offset: int = 0) -> Stream:
        """Continue a stream from character ``from_offset`` of its text, after its reader left.

        The stream must have been opened with ``resume_ttl``, and left or finished at most that many seconds ago. If it
        still has a reader, that reader's stream ends. Token ids that add no text may be repeated; ``token_offset``
        shows this.

        Raises:
            ValueError: there is no such stream, or its text is shorter than ``from_offset``.
        """
        frontend = self._frontend_here()
        reader = frontend.attachments.attach(rid, from_offset, frontend)
        return Stream(reader, home=frontend.loop, is_bound=self._is_bound, owner=self)

    map = map_items.map
    selfcheck = selfcheck.selfcheck

    # ------------------------------------------------------------ sessions

    @signatures.own_arguments
    def open_session(
        self,
        capacity_of_str_len: int = 0,
        session_id: str | None = None,
        streaming: bool = False,
        timeout: float | None = None,
    ) -> SessionOpening:
        """Open a session; await this to get its id. Requests with ``session_params`` continue earlier ones in it.

        ``async with engine.open_session() as session_id:`` closes the session at the end of the block.

        session_id: the id to use (default: a random one). timeout: close the session after this many seconds without a
        running request (checked every second). streaming: the session has one request at a time, and each request
        continues the last answered one. capacity_of_str_len: no effect, because the context length limits a session.

        Raises:
            TypeError, ValueError: an argument is wrong, or a session with this id is open.
            EngineOverloadedError: too many sessions are open. EngineDrainingError, EngineClosedError, EngineDeadError.
        """

        async def opening() -> str:
            return self._frontend_here().sessions.open(capacity_of_str_len, session_id, streaming, timeout)

        return SessionOpening(opening(), self.close_session)

    async def close_session(self, session_id: str) -> None:
        """Close a session: forget its history and unpin its pages. Running requests continue.

        Ignores unknown sessions. Raises TypeError or ValueError if ``session_id`` cannot be an id.
        """
        self._frontend_here().sessions.close(session_id)

    # ------------------------------------------------------------ control

    async def admit(self) -> None:
        """Wait in a first-come-first-served queue until the engine has capacity for a call.

        The capacity is reserved for the next call of this task, for one second at most. Cancelling the wait leaves the
        queue.

        Raises:
            EngineDrainingError, EngineClosedError, EngineDeadError: no call will be accepted.
        """
        await self._frontend_here().caller_queue.wait()

    async def flush_cache(self) -> Outcome:
        """Empty the prefix cache. If requests run or wait, do nothing and return a false outcome."""
        return await self._frontend_here().controls.call("flush_cache")

    async def freeze_gc(self) -> None:
        """Exclude all present objects from garbage collection (``gc.freeze``), here and in the scheduler process."""
        await self._frontend_here().controls.freeze_gc()

    async def start_profile(
        self, output_dir: str | os.PathLike[str] | None = None, **options: Unpack[ProfileOptions]
    ) -> None:
        """Start torch's profiler in the scheduler process, with a range for each step.

        ``stop_profile`` writes the trace to a new file in ``output_dir`` (default: the system's folder for temporary
        files), for chrome://tracing or Perfetto. ``ProfileOptions`` describes the ``options``.

        Raises:
            TypeError, ValueError: an argument is wrong.
            RuntimeError: a profile is running already, or the folder is not writable.
        """
        requests.check_names(options, ("output_dir",), ProfileOptions.__annotations__)
        await self._frontend_here().controls.start_profile(output_dir, options)

    async def stop_profile(self) -> str:
        """End the trace, write it and return the path of the file. The engine computes nothing during this call.

        Raises:
            RuntimeError: no profile is running, or the file cannot be written.
        """
        return await self._frontend_here().controls.stop_profile()

    @signatures.own_arguments
    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new calls and wait for all requests. After ``timeout`` seconds, end them with reason ``shutdown``.

        Returns whether all requests finished by themselves. From now on, new calls raise ``EngineDrainingError``.
        Paused and suspended requests continue. (The last rows of a large streamed batch start only when its first rows
        have been read.)
        """
        return await self._frontend_here().drain(timeout)

    # ------------------------------------------------------------ adapters

    @signatures.own_arguments
    async def load_lora_adapter(self, lora_name: str, lora_path: str | PurePath, pinned: bool = False) -> AdapterResult:
        """Load a LoRA adapter from a folder written by peft. Requests then use it with ``lora_path=lora_name``.

        pinned: keep the adapter in its slot on the device. If the adapter cannot be used or the name is in use, the
        result is false and has the reason in ``error_message``. ``loaded_adapters`` has all loaded adapters.
        """
        return await self._frontend_here().adapters.load(lora_name, lora_path, pinned)

    @signatures.own_arguments
    async def load_lora_adapter_from_tensors(
        self,
        lora_name: str,
        tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
        config_dict: Mapping[str, Any],
        load_format: str | None = None,
        *,
        pinned: bool = False,
    ) -> AdapterResult:
        """Load a LoRA adapter from torch tensors, as ``load_lora_adapter`` does from a folder.

        The engine keeps a copy of the tensors in host memory until ``unload_lora_adapter``, also for processes that are
        replaced later. The tensors may change again after this call.

        tensors: with the names in adapter_model.safetensors, such as ``peft.get_peft_model_state_dict(model)``.
        config_dict: the content of adapter_config.json, such as ``peft_config.to_dict()``. load_format: None or "auto".
        """
        return await self._frontend_here().adapters.load_tensors(lora_name, tensors, config_dict, load_format, pinned)

    @signatures.own_arguments
    async def unload_lora_adapter(self, lora_name: str, timeout: float = UNLOAD_TIMEOUT_S) -> AdapterResult:
        """Unload a LoRA adapter: refuse new requests for it immediately, and wait for its running requests.

        If some still run after ``timeout`` seconds, or if this call is cancelled, the adapter stays loaded. It has the
        results and errors of ``load_lora_adapter``; an unknown name gives a false result.
        """
        return await self._frontend_here().adapters.unload(lora_name, timeout)

    async def list_lora_adapters(self) -> AdapterResult:
        """Return the loaded adapters in ``loaded_adapters``: name -> folder, or "tensors" (see ``AdapterResult``)."""
        return self._frontend_here().adapters.list()

    # ------------------------------------------------------------ weights, pauses and memory

    async def pause_generation(self, mode: PauseMode = "abort") -> Outcome:
        """Stop computing until ``continue_generation``; new calls wait.

        ``mode``: "abort" ends all requests. "in_place" keeps them and their KV. "retract" keeps them; their KV is
        computed again when they continue.
        """
        return await self._frontend_here().controls.pause(mode)

    async def continue_generation(self) -> Outcome:
        """Continue after ``pause_generation``."""
        return await self._frontend_here().controls.unpause()

    @signatures.own_arguments
    async def update_weights_from_disk(
        self,
        model_path: str | PurePath,
        load_format: str | None = None,
        *,
        flush_cache: bool = True,
        weight_version: str | None = None,
    ) -> WeightUpdate:
        """Replace all weights by another checkpoint of the same model, without a restart.

        The result is true if it succeeded. Otherwise nothing has changed, and ``message`` says why: names, shapes,
        types and numbers of all tensors are checked before the first one is replaced, on all replicas.

        The weights change between two steps. Running requests keep their tokens, and their KV is computed again with
        the new weights; after ``pause_generation("in_place")`` they keep their KV, too. Cached prefixes of the old
        weights are not used any more. ``meta_info["weight_version"]`` of each chunk is the version of its last token,
        and ``meta_info["weight_versions"]`` of a finished request lists all versions: ``(version, start, stop)`` for
        its output tokens from ``start`` to ``stop``. If a process is replaced later, it loads these weights, so the
        files must stay unchanged.

        load_format: "auto" (default), "safetensors" or "gguf"; the files decide. flush_cache: has no effect, because
        old prefixes are never used with new weights. weight_version: the name of the new weights (default: the number
        of updates).
        """
        checks.switch("flush_cache", flush_cache)
        return await self._frontend_here().weights.from_disk(model_path, load_format, weight_version)

    @signatures.own_arguments
    async def update_weights_from_tensor(
        self,
        named_tensors: Iterable[tuple[str, Any]] | Mapping[str, Any],
        load_format: str | None = None,
        flush_cache: bool = True,
        *,
        weight_version: str | None = None,
    ) -> WeightUpdate:
        """Replace some or all weights by torch tensors with names and shapes of the checkpoint.

        As ``update_weights_from_disk``, but any part of the tensors is enough. All are checked before the first one is
        replaced, and the tensors may change again after this call. Tensors on a CPU are copied to memory that the
        processes share, in a thread. Tensors on the GPU of the engine are read where they are, if it is the only GPU of
        the engine.

        Between ``begin_weight_update`` and ``end_weight_update``, tensors may come in several calls. If the process
        that computes is lost later, these weights are lost, and open requests end with ``RequestError``;
        ``enable_weights_cpu_backup=True`` of the constructor keeps a copy, with which they continue.

        load_format: None or "auto". flush_cache: has no effect, as in ``update_weights_from_disk``.
        """
        checks.switch("flush_cache", flush_cache)
        return await self._frontend_here().weights.from_tensors(named_tensors, load_format, weight_version)

    @signatures.own_arguments
    async def begin_weight_update(self, selector: str = "all") -> Outcome:
        """Compute no more steps until ``end_weight_update``. Any number of calls replaces all weights in between.

        ``update_weights_from_disk`` ends the update, too. The result is false if an update is open already. selector:
        "all" or "target".
        """
        return await self._frontend_here().weights.begin(selector)

    @signatures.own_arguments
    async def end_weight_update(self, *, weight_version: str | None = None) -> Outcome:
        """Continue with the new weights.

        The result is false if no update is open, or if tensors are missing: then the update stays open, and the message
        names them. After the loss of a process, the update is not open any more, and the old weights compute.
        """
        return await self._frontend_here().weights.end(weight_version)

    @signatures.own_arguments
    async def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any] | None:
        """Return the first ``truncate_size`` rows of a tensor as lists of numbers; None: the name is unknown.

        A tensor without dimensions has one row. With several replicas, return the list of their results.

        Raises:
            ValueError: the tensor is quantized, or divided among ranks.
        """
        rows: list[Any] | None = await self._frontend_here().weights.get(name, truncate_size)
        return rows

    @signatures.own_arguments
    async def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = "weight_update_group",
        backend: str = "nccl",
    ) -> Outcome:
        """Join a process group that the training program opens, in which it has rank 0.

        Rank ``r`` of the engine joins with rank ``rank_offset + r``; with several replicas, the ranks of the next one
        follow. No step runs until all have joined. backend: "nccl", or "gloo" for tensors on a CPU. The result is false
        if the program cannot be reached within five minutes.
        """
        return await self._frontend_here().weights.join(
            master_address, master_port, rank_offset, world_size, group_name, backend
        )

    @signatures.own_arguments
    async def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> Outcome:
        """Leave a group of ``init_weights_update_group``. The result is false if the engine is in no such group."""
        return await self._frontend_here().weights.leave(group_name)

    @signatures.own_arguments
    async def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[Any],
        shapes: Sequence[Sequence[int]],
        group_name: str = "weight_update_group",
        flush_cache: bool = True,
        load_format: str | None = None,
        *,
        weight_version: str | None = None,
    ) -> WeightUpdate:
        """Replace some or all weights by tensors that rank 0 of the group broadcasts, in the order of ``names``.

        As ``update_weights_from_tensor``; no step runs meanwhile. dtypes: of torch, or their names.
        """
        checks.switch("flush_cache", flush_cache)
        return await self._frontend_here().weights.from_group(
            names, dtypes, shapes, group_name, load_format, weight_version
        )

    @signatures.own_arguments
    async def release_memory_occupation(self, tags: Sequence[str] | str | None = None) -> None:
        """Free memory for another program until ``resume_memory_occupation``. Requests wait until then.

        The engine needs ``enable_memory_saver=True``. No request may be running: finish them, or call
        ``pause_generation("retract")`` before. tags: "kv_cache" (the prefix cache is emptied, too), "weights" (they are
        loaded again later) and "cuda_graph"; None: all of them. On a GPU, the KV cache comes back at the same
        addresses. Releasing weights also frees the CUDA graphs, which are captured again when all memory is resumed.

        Raises:
            RuntimeError: this memory is released already, or cannot be released; the message says why.
        """
        await self._frontend_here().weights.change_memory(tags, WeightCall.RELEASE_MEMORY)

    @signatures.own_arguments
    async def resume_memory_occupation(self, tags: Sequence[str] | str | None = None) -> None:
        """Allocate released memory again. tags: as of ``release_memory_occupation``.

        Raises:
            RuntimeError: this memory is not released.
        """
        await self._frontend_here().weights.change_memory(tags, WeightCall.RESUME_MEMORY)

    # ------------------------------------------------------------ state

    def health(self) -> Health:
        """Return the state of the engine and of its processes. May be called at any time, from any thread.

        The state is "starting" until ``start()`` succeeds, and "closed" if it failed. If the engine died, the state
        stays "dead" or "stalled" until it is started again, also after a shutdown.
        """
        run = self._run
        if run is None or run.frontend is None:
            has_ended = self._is_closed or (run is not None and run.has_failed)
            return {"state": "closed" if has_ended else "starting", "processes": []}
        # The loop may have been closed before the shutdown. In a fork, the engine of the parent counts as closed.
        is_closed = (self._is_closed or run.is_forked) and run.frontend.failure is None
        return info.health("closed" if is_closed else run.frontend.state, run.frontend.parts.processes.process_states())

    def get_all_child_pids(self) -> list[int]:
        """Return the process ids of the engine's live processes."""
        frontend = None if self._run is None else self._run.frontend
        if frontend is None:
            return []
        return info.child_pids(frontend.parts.processes.process_states(), frontend.images)

    async def get_server_info(self) -> dict[str, object]:
        """Return the settings, the device, the chosen implementations, the memory and the scheduler's state."""
        return await self._frontend_here().server_info()

    async def get_model_info(self) -> ModelInfo:
        """Return facts about the served model."""
        frontend = self._frontend_here()
        return info.model_info(frontend.parts.settings, frontend.weights.loaded)

    async def wait_failed(self) -> EngineError | None:
        """Wait until the engine dies, and return the error. Return None if it is shut down."""
        return await self._frontend_here().wait_failed()
