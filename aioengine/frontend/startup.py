"""From a blueprint to a running engine: the tokenizer loads while the processes start."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from aioengine.config import DeliveryConfig, QueueConfig, Settings
from aioengine.errors import EngineError, EngineStartupError
from aioengine.file_descriptors import FOR_AN_ENGINE, hold_standard_descriptors, require_descriptors
from aioengine.frontend.encoder import longest_token
from aioengine.frontend.frontend import Frontend, Running
from aioengine.frontend.start_report import log_start
from aioengine.green_threads import require_real_threads
from aioengine.logs import show_logs, warn_caller
from aioengine.protocol.messages import Progress
from aioengine.supervision.processes import Events, Processes

if TYPE_CHECKING:
    from aioengine.protocol.messages import ToFrontend
    from aioengine.tokenizer import Tokenizer  # noqa: TC004  # fields of a Struct that is never decoded


_QUIET_S: Final = 0.3
"""A start that takes longer is announced before its processes report what they do: they import for seconds."""


class Blueprint(Struct, frozen=True, kw_only=True):
    """What an engine will be made of. ``load_tokenizer`` may block; None: token ids only."""

    settings: Settings
    queue: QueueConfig
    eos_token_ids: tuple[int, ...]
    stream_interval: int
    load_tokenizer: Callable[[], Tokenizer] | None
    make_processes: Callable[[Events], Processes]
    delivery: DeliveryConfig = DeliveryConfig()


class _Inbox:
    """Takes what the processes tell; what came before there is a frontend waits for it."""

    def __init__(self) -> None:
        self.frontend: Frontend | None = None
        self._messages: list[ToFrontend] = []
        self._failure: EngineError | None = None

    def on_messages(self, messages: list[ToFrontend]) -> None:
        if self.frontend is None:
            self._messages += messages
        else:
            self.frontend.on_messages(messages)

    def on_failure(self, error: EngineError) -> None:
        self._failure = error
        if self.frontend is not None:
            self.frontend.fail(error)

    def connect(self, frontend: Frontend) -> None:
        self.frontend = frontend
        frontend.on_messages(self._messages)
        if self._failure is not None:
            frontend.fail(self._failure)  # it has begun to watch its readers
            raise self._failure


def _loaded(load: Callable[[], Tokenizer]) -> tuple[Tokenizer, int | None]:
    tokenizer = load()
    return tokenizer, longest_token(tokenizer.decoding_facts())


def _ends(blueprint: Blueprint, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The ids that end a text, with that of a token which the model folder's files name by its text alone."""
    own = None if tokenizer is None else tokenizer.eos_token_id
    known = blueprint.eos_token_ids
    is_new = own is not None and own not in known and own < blueprint.settings.model.vocab_size
    return (*known, own) if own is not None and is_new else known


def _retrieve(work: asyncio.Future[tuple[Tokenizer, int | None]]) -> None:
    """An error is looked at here, where the start itself has failed before it could."""
    if not work.cancelled():
        work.exception()


async def _abandon(processes: Processes, error: BaseException) -> None:
    """End processes of which the start failed."""
    processes.kill_now()
    if not isinstance(error, GeneratorExit):  # the loop was closed, and nothing can be awaited
        await processes.stop(0.0)


async def start_frontend(prepare: Callable[[], Blueprint], on_progress: Callable[[Progress], None]) -> Frontend:
    """Start an engine on the running loop. ``prepare`` reads files, and may download them, on a thread.

    Where it fails or is cancelled half-way, nothing is left behind.

    Raises:
        ValueError, TypeError: the model folder or an argument cannot be served.
        EngineStartupError: a process could not start.
    """
    require_real_threads()
    require_descriptors(FOR_AN_ENGINE)
    hold_standard_descriptors()
    began_at = time.monotonic()
    inbox = _Inbox()
    thread = ThreadPoolExecutor(1, thread_name_prefix="aioengine-start")
    loop = asyncio.get_running_loop()
    processes: Processes | None = None
    try:
        blueprint = await loop.run_in_executor(thread, prepare)
        show_logs(blueprint.settings.log_level)
        processes = blueprint.make_processes(Events(inbox.on_messages, inbox.on_failure, on_progress))
        load = blueprint.load_tokenizer
        loading = None if load is None else loop.run_in_executor(thread, _loaded, load)
        if loading is not None:
            loading.add_done_callback(_retrieve)
        patience = loop.call_later(_QUIET_S, on_progress, Progress("starting the engine", 0, 1, ""))
        try:
            facts = await processes.start()
        finally:
            patience.cancel()
        if warning := facts.get("warning"):
            warn_caller(str(warning), stacklevel=2)
        max_total_tokens = facts.get("max_total_tokens")
        if not isinstance(max_total_tokens, int):
            raise EngineStartupError(f"the scheduler process did not tell the size of its KV pool: {facts!r}")
        tokenizer, longest = (None, None) if loading is None else await loading
        frontend = Frontend(
            Running(
                settings=blueprint.settings,
                queue=blueprint.queue,
                delivery=blueprint.delivery,
                eos_token_ids=_ends(blueprint, tokenizer),
                stream_interval=blueprint.stream_interval,
                facts=facts,
                max_total_tokens=max_total_tokens,
                processes=processes,
                tokenizer=tokenizer,
                longest_token=longest,
            )
        )
        inbox.connect(frontend)
        log_start(blueprint.settings, facts, time.monotonic() - began_at)
    except BaseException as error:
        if processes is not None:
            await _abandon(processes, error)
        raise
    finally:
        thread.shutdown(wait=False, cancel_futures=True)
    return frontend
