"""From a config to a blueprint: find the model, read its files and this machine's facts, answer every "auto"."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from aioengine import machine, model_folder
from aioengine.chat_template import checked_template
from aioengine.frontend.progress import is_wanted
from aioengine.frontend.startup import Blueprint
from aioengine.resolve import resolve
from aioengine.supervision.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioengine.config import EngineConfig
    from aioengine.frontend.frontend import Processes
    from aioengine.supervision.supervisor import Events
    from aioengine.tokenizer import Tokenizer


def parts_of(config: EngineConfig) -> tuple[Callable[[], Blueprint], bool | None, str]:
    """What an engine is made of: its blueprint, made when it starts; its progress bars; the name of its model."""
    path = config.model.path
    return partial(blueprint_of, config), config.progress, "demo model" if path is None else repr(path)


def blueprint_of(config: EngineConfig) -> Blueprint:
    """Read what is needed to start. May block for as long as a download takes: not for the loop's thread.

    Raises:
        ValueError: there is no such model, or it cannot be served as asked.
    """
    facts = model_folder.find_facts(config.model, progress=is_wanted(config.progress))
    settings = resolve(config, facts, machine.device_facts())
    tokenizer_path = settings.text.tokenizer_path
    chat_template = _chat_template(config)

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
