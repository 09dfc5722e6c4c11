"""Starts an engine from its configuration.

It finds the model, resolves every "auto", starts the processes and loads the tokenizer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from msgspec.structs import replace

from aioengine.errors import EngineDeadError, EngineError, EngineStartupError
from aioengine.file_descriptors import FOR_AN_ENGINE, check_cause, hold_standard_descriptors, require_descriptors
from aioengine.frontend.callers import closed
from aioengine.frontend.engine_parts import Blueprint, EngineParts
from aioengine.frontend.frontend import Frontend
from aioengine.frontend.intake.encoder import longest_token
from aioengine.frontend.intake.image_prompts import start_intake
from aioengine.frontend.loaded_adapters import AdapterRules, absolute_folder
from aioengine.frontend.progress import ProgressBars, is_wanted
from aioengine.logs import log, show_logs, warn_caller
from aioengine.media.tokens._base import find_image_model
from aioengine.model_files import model_folder
from aioengine.model_files.adapter_folder import AdapterFolder, read_folder
from aioengine.model_files.checkpoint import check_unchanged
from aioengine.model_files.vocabulary import check_same_vocabulary, end_ids
from aioengine.protocol.messages import Progress, ToFrontend
from aioengine.protocol.orders import roles_of
from aioengine.settings import machine
from aioengine.settings.resolve import resolve
from aioengine.supervision.fleet import Fleet, Processes
from aioengine.supervision.supervisor import Events, Supervisor
from aioengine.supervision.tasks import WorkerThread, require_real_threads
from aioengine.tokenization.chat_template import check_files, checked_template

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aioengine.frontend.calls.observers import Observer
    from aioengine.media.intake.image_intake import ImageIntake
    from aioengine.model_files.model_folder import ModelFacts
    from aioengine.settings.config import EngineConfig, Settings, TextSettings
    from aioengine.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_MAX_EXIT_S: Final = 0.5
"""How long the exit of the program waits for a download, or for the tokenizer to be read."""

_ANNOUNCEMENT: Final = Progress("starting the engine", 0, 1, "")
_QUIET_S: Final = 0.3
"""A longer start shows a progress bar before the processes report progress, because their imports take seconds."""


def start_arguments(config: EngineConfig) -> tuple[Callable[[], Blueprint], bool | None, str]:
    """Return a function that returns the engine's blueprint at its start, ``progress``, and the name of the model.

    Raises:
        ValueError: a local folder cannot be served with these settings. A model to download is checked at the start.
        EngineStartupError: too few file descriptors are free.
    """
    require_descriptors(FOR_AN_ENGINE)  # otherwise the error of a file would not name the limit
    path = config.model.path
    if config.supervision.executor == "ray":
        _check_ray(config)
    prepare = _checked(_with_absolute_paths(config))
    return prepare, config.progress, "demo model" if path is None else repr(path)


def _check_ray(config: EngineConfig) -> None:
    spec = find_spec("ray")
    if spec is None or spec.origin is None:  # a folder of this name, such as Ray's own /tmp/ray, is no package
        raise ValueError("executor='ray' needs the package ray: pip install 'aioengine[ray]'")
    if base_gpu_id := config.device.base_gpu_id:
        raise ValueError(f"base_gpu_id={base_gpu_id} has no effect with executor='ray', because Ray chooses the GPUs")
    if config.supervision.keeps_tensors:
        raise ValueError("enable_weights_cpu_backup=True does not work with executor='ray'")


def _with_absolute_paths(config: EngineConfig) -> EngineConfig:
    """Return ``config`` with absolute paths, because the working directory may change before the start."""
    draft_path = _absolute(config.speculation.draft_model_path, "speculative_draft_model_path")
    config = replace(config, speculation=replace(config.speculation, draft_model_path=draft_path))
    adapters = tuple(replace(adapter, path=str(absolute_folder(adapter.path))) for adapter in config.lora.adapters)
    config = replace(config, lora=replace(config.lora, adapters=adapters))
    model = config.model
    path, tokenizer_path = _absolute(model.path, "model_path"), _absolute(model.tokenizer_path, "tokenizer_path")
    return replace(config, model=replace(model, path=path, tokenizer_path=tokenizer_path))


def _checked(config: EngineConfig) -> Callable[[], Blueprint]:
    """Check local folders, and return a function that returns the blueprint at the start."""
    model = config.model
    if model_folder.needs_download(model.path):
        read_adapters(config)
    elif any(map(model_folder.needs_download, (model.tokenizer_path, config.speculation.draft_model_path))):
        model_folder.find_facts(replace(model, tokenizer_path=None))
    elif config.supervision.executor == "process":  # the devices of a Ray cluster are known at the start
        blueprint = blueprint_of(config)
        return lambda: blueprint
    return partial(blueprint_of, config)


def _absolute(path: str | None, argument: str) -> str | None:
    return path if path is None or model_folder.needs_download(path) else model_folder.locate(path, argument=argument)


def blueprint_of(config: EngineConfig) -> Blueprint:
    """Read everything that the start needs. May block during a download, so do not call it on the loop's thread.

    Raises:
        ValueError: the model does not exist, or cannot be served with these settings.
    """
    facts = model_folder.find_facts(config.model, progress=is_wanted(config.progress))
    folders = read_adapters(config)
    draft = find_draft(config, progress=is_wanted(config.progress))
    if draft is not None:
        check_same_vocabulary(facts, draft)
    places: RayPlaces | None = None
    with ExitStack() as on_failure:
        if config.supervision.executor == "ray":
            from aioengine.supervision.launchers._ray_launcher import RayLauncher
            from aioengine.supervision.launchers._ray_places import RayPlaces

            places = RayPlaces.reserve(config)
            on_failure.callback(places.remove)
            settings = resolve(places.config_of_a_node(config), facts, places.device_facts(), folders, draft)
        else:
            settings = resolve(config, facts, machine.device_facts(), folders, draft)
        adapters = None
        if settings.runner.lora is not None:
            adapters = AdapterRules(facts.linear_layers, settings.runner.lora, config.lora.adapters)
            for folder in folders:
                adapters.check(folder)
        tokenizer_path = settings.text.tokenizer_path
        chat_template = _chat_template(config)
        images = find_image_model(Path(facts.path)) if facts.task in ("generate", "embed") else None
        if tokenizer_path is not None:
            check_files(Path(tokenizer_path))
        on_failure.pop_all()

    num_replicas = config.supervision.num_replicas

    def make_replica(number: int, events: Events) -> Supervisor:
        index = number if places is None else places.index_on_node(number)
        own = replace(settings, runner=replace(settings.runner, replica=index))
        make = partial(Supervisor, own, config.supervision, events=events, roles=roles_of(own))
        if places is None:
            return make(launcher="process")
        return make(launcher=partial(RayLauncher, places, number), on_end=partial(places.leave, number))

    def make_processes(events: Events) -> Processes:
        if num_replicas == 1:
            return make_replica(0, events)
        makers = [partial(make_replica, number) for number in range(num_replicas)]
        return Fleet(makers, events, config.supervision.routing)

    return Blueprint(
        settings=settings,
        queue=config.queue,
        delivery=config.delivery,
        images=None if images is None else images._replace(limits=config.media),
        eos_token_ids=facts.eos_token_ids,
        stream_interval=config.stream_interval,
        load_tokenizer=None if tokenizer_path is None else partial(_load_tokenizer, settings.text, chat_template),
        make_processes=make_processes,
        adapters=adapters,
        warning=facts.warning,
        keeps_tensors=config.supervision.keeps_tensors,
    )


def find_draft(config: EngineConfig, *, progress: bool = False, configs_only: bool = False) -> ModelFacts | None:
    """Return the facts about the draft model; None: there is none. The arguments are as in ``find_facts``."""
    if config.draft_model is None:
        return None
    return model_folder.find_facts(
        config.draft_model, progress=progress, configs_only=configs_only, argument="speculative_draft_model_path"
    )


def read_adapters(config: EngineConfig) -> list[AdapterFolder]:
    """Read the adapter folders of ``lora_paths``, each once. Raise ValueError if one cannot be used."""
    if config.lora.enabled is False:
        return []
    return [
        read_folder(absolute_folder(path)) for path in dict.fromkeys(adapter.path for adapter in config.lora.adapters)
    ]


def _chat_template(config: EngineConfig) -> str | None:
    """Return the text of the configured template. It is checked before the model is loaded."""
    template = config.model.chat_template
    if template is None:
        return None
    if not config.model.tokenizer:
        raise ValueError("chat_template needs a tokenizer, and skip_tokenizer_init=True loads none")
    return checked_template(template)


def _load_tokenizer(settings: TextSettings, chat_template: str | None) -> Tokenizer:
    """Import the tokenizer library and read the tokenizer, on a thread while the processes start."""
    from aioengine.tokenization.tokenizer import Tokenizer

    assert settings.tokenizer_path is not None
    tokenizer = Tokenizer(settings.tokenizer_path, chat_template=chat_template)
    check_unchanged(settings.files)
    return tokenizer


class _Inbox:
    """Stores the messages of the processes until the frontend exists."""

    def __init__(self) -> None:
        self.frontend: Frontend | None = None
        self._messages: list[ToFrontend] = []
        self._failure: EngineError | None = None

    def on_messages(self, messages: list[ToFrontend]) -> None:
        self._messages += messages

    def on_failure(self, error: EngineError) -> None:
        self._failure = error
        if self.frontend is not None:
            self.frontend.fail(error)
        # The program may have cancelled the engine's tasks. ``asyncio.run`` does this at its end.
        is_cancelled = isinstance(error, EngineDeadError) and error.role == "frontend" and error.__cause__ is None
        level = logging.INFO if is_cancelled else logging.ERROR
        log(logger, level, "the engine has ended: %s", str(error).partition(";")[0])

    def connect(self, frontend: Frontend, events: Events) -> None:
        self.frontend = frontend
        frontend.on_messages(self._messages)
        events.on_messages = frontend.on_messages
        if self._failure is not None:
            frontend.fail(self._failure)  # stops its timer for slow readers
            raise self._failure


def _loaded(load: Callable[[], Tokenizer]) -> tuple[Tokenizer, int | None]:
    tokenizer = load()
    return tokenizer, longest_token(tokenizer.decoding_facts())


async def start_frontend(
    prepare: Callable[[], Blueprint], progress: bool | None, observers: list[Observer]
) -> Frontend:
    """Start an engine on the running loop. If the start fails or is cancelled, no process is left running.

    prepare: reads or downloads files, on a thread. progress: whether to show progress bars; None: see ``EngineConfig``.
    observers: get each finished request.

    Raises:
        ValueError, TypeError: the model folder or an argument cannot be served.
        EngineStartupError: a process could not start, or an adapter of ``lora_paths`` cannot be used.
    """
    require_real_threads()
    began_at = time.monotonic()
    inbox, bars = _Inbox(), ProgressBars(progress)
    thread = WorkerThread[Any]("aioengine-start", max_exit_s=_MAX_EXIT_S)
    processes: Processes | None = None
    images: ImageIntake | None = None
    loading: Future[tuple[Tokenizer, int | None]] | None = None
    try:
        require_descriptors(FOR_AN_ENGINE)
        hold_standard_descriptors()
        blueprint: Blueprint = await asyncio.wrap_future(thread.submit(prepare))
        show_logs(blueprint.settings.log_level)

        def load_tokenizer() -> None:
            """Load the tokenizer on the thread. Its library holds the GIL for up to half a second."""
            nonlocal loading
            if blueprint.load_tokenizer is not None:
                loading = thread.submit(partial(_loaded, blueprint.load_tokenizer))

        events = Events(inbox.on_messages, inbox.on_failure, bars.show, load_tokenizer)
        processes = blueprint.make_processes(events)
        if blueprint.images is not None:
            images = start_intake(blueprint.images, is_for_gpu=blueprint.settings.runner.device == "cuda")
        announcing = asyncio.get_running_loop().call_later(_QUIET_S, bars.show, _ANNOUNCEMENT)
        try:
            facts = await processes.start()
        except EngineStartupError:
            if loading is not None:
                await asyncio.wrap_future(loading)  # if the tokenizer is the cause, its ValueError names the file
            raise
        finally:
            announcing.cancel()
        for warning in filter(None, (blueprint.warning, facts.get("warning"))):
            warn_caller(str(warning), stacklevel=2)
        # Awaited only now: if the start fails before, the tokenizer may be ready only after the loop is closed.
        tokenizer, longest = None, None
        if loading is not None:
            tokenizer, longest = await asyncio.wrap_future(loading)
        settings = blueprint.settings
        # The memory may allow fewer running requests, and several replicas allow more.
        max_running = cast("int", facts.get("max_running_requests", settings.scheduler.max_running))
        settings = replace(settings, scheduler=replace(settings.scheduler, max_running=max_running))
        own_end = None if tokenizer is None else tokenizer.eos_token_id
        frontend = Frontend(
            EngineParts(
                blueprint=blueprint,
                settings=settings,
                eos_token_ids=end_ids(blueprint.eos_token_ids, own_end, settings.model.vocab_size),
                facts=facts,
                max_total_tokens=cast("int", facts["max_total_tokens"]),
                processes=processes,
                tokenizer=tokenizer,
                longest_token=longest,
                images=images,
            ),
            observers,
        )
        inbox.connect(frontend, events)
        try:
            await frontend.adapters.load_given()
        except BaseException:
            frontend.fail(closed())  # stops its timer for slow readers
            raise
        _log_start(settings, facts, time.monotonic() - began_at)
    except BaseException as error:
        if images is not None:
            images.close()
        if processes is not None:
            processes.kill_now()
            if not isinstance(error, GeneratorExit):  # the loop was closed, so nothing can be awaited
                await processes.stop(0.0)
        check_cause(error)
        raise
    finally:
        bars.close()
        thread.close()
    return frontend


def _log_start(settings: Settings, facts: Mapping[str, object], took_s: float) -> None:
    """Log model, device, dtype, KV pool and CUDA graphs, as far as known, and the duration of the start."""
    size, pages = facts.get("weights_bytes"), facts.get("num_pages", "unknown number of")
    count = facts.get("num_threads") if facts.get("device") == "cpu" else None
    threads = "" if count is None else f", {count} thread{'s' * (count != 1)}"
    dtype, stored = settings.model.dtype, settings.model.checkpoint_dtype
    change = " (the checkpoint has float32; dtype='float32' keeps it)" if stored == "float32" != dtype else ""
    widened = facts.get("widened_types")
    form = "" if widened is None else f" (converted to {dtype}: {widened})"
    for line in (
        f"model: {settings.model.path}" + (f", {_megabytes(size)} of weights{form}" if size is not None else ""),
        f"device: {facts.get('device_name', settings.runner.device)}{threads}",
        f"dtype: {facts.get('dtype', dtype)}{change}, attention: "
        f"{facts.get('attention_backend', settings.runner.attention_backend)}",
        f"KV pool: {facts.get('max_total_tokens')} tokens in {pages} pages"
        + (f", {_megabytes(facts['kv_pool_bytes'])}" if "kv_pool_bytes" in facts else ""),
        f"CUDA graphs: {facts.get('cuda_graph_sizes') or 'none'}",
        f"ready after {took_s:.1f} s",
    ):
        log(logger, logging.INFO, "%s", line)


def _megabytes(num_bytes: object) -> str:
    return f"{num_bytes / 1e6:,.0f} MB" if isinstance(num_bytes, int) else f"{num_bytes} bytes"
