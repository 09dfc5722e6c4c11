"""From a config to a blueprint: find the model, read its files and this machine's facts, answer every "auto"."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from aioengine import machine, model_folder
from aioengine.chat_template import check_files, checked_template
from aioengine.frontend.progress import is_wanted
from aioengine.frontend.startup import Blueprint
from aioengine.resolve import resolve
from aioengine.supervision.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioengine.config import EngineConfig
    from aioengine.supervision.processes import Events, Processes
    from aioengine.tokenizer import Tokenizer


def parts_of(config: EngineConfig) -> tuple[Callable[[], Blueprint], bool | None, str]:
    """What an engine is made of: its blueprint, made when it starts; its progress bars; the name of its model.

    Raises:
        ValueError: a local folder alone tells that it cannot be served as asked. (What needs a download is looked at
            when the engine starts.)
    """
    path = config.model.path
    config = _with_local_model(config)
    return partial(blueprint_of, config), config.progress, "demo model" if path is None else repr(path)


def _with_local_model(config: EngineConfig) -> EngineConfig:
    """``config`` with absolute paths of what is on disk, after a look at the model's folder if it is."""
    model = config.model
    if not model_folder.needs_download(model.path):
        if model_folder.needs_download(model.tokenizer_path):
            model_folder.find_facts(replace(model, tokenizer_path=None))
        else:
            blueprint_of(config)
    paths = {"path": _absolute(model.path), "tokenizer_path": _absolute(model.tokenizer_path)}
    return replace(config, model=replace(model, **paths))


def _absolute(path: str | None) -> str | None:
    """The working directory may be another one, or removed, when the engine starts."""
    return path if path is None or model_folder.needs_download(path) else model_folder.locate(path)


def blueprint_of(config: EngineConfig) -> Blueprint:
    """Read what is needed to start. May block for as long as a download takes: not for the loop's thread.

    Raises:
        ValueError: there is no such model, or it cannot be served as asked.
    """
    facts = model_folder.find_facts(config.model, progress=is_wanted(config.progress))
    settings = resolve(config, facts, machine.device_facts())
    tokenizer_path = settings.text.tokenizer_path
    chat_template = _chat_template(config)
    if tokenizer_path is not None:
        check_files(Path(tokenizer_path))

    def make_processes(events: Events) -> Processes:
        return Supervisor(settings, config.supervision, launcher="process", events=events)

    return Blueprint(
        settings=settings,
        queue=config.queue,
        delivery=config.delivery,
        eos_token_ids=facts.eos_token_ids,
        stream_interval=config.stream_interval,
        load_tokenizer=None if tokenizer_path is None else partial(_load_tokenizer, tokenizer_path, chat_template),
        make_processes=make_processes,
    )


def _chat_template(config: EngineConfig) -> str | None:
    """The text of the template that was asked for: what is wrong with it is known before anything is loaded."""
    given = config.model.chat_template
    if given is None:
        return None
    if not config.model.tokenizer:
        raise ValueError(
            "chat_template needs a tokenizer, and skip_tokenizer_init=True loads none: leave out one of them"
        )
    return checked_template(given)


def _load_tokenizer(path: str, chat_template: str | None) -> Tokenizer:
    """Read it, and import what reads it: on the thread that has time, while the processes start."""
    from aioengine.tokenizer import Tokenizer

    return Tokenizer(path, chat_template=chat_template)
