"""The parts of an engine: before its start (``Blueprint``), and after it (``EngineParts``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct

from aioengine.frontend.loaded_adapters import AdapterRules
from aioengine.media.intake.image_intake import ImageIntake
from aioengine.media.tokens._base import ImageModel
from aioengine.settings.config import DeliveryConfig, QueueConfig, Settings
from aioengine.supervision.fleet import Processes
from aioengine.supervision.supervisor import Events

if TYPE_CHECKING:
    from aioengine.tokenization.tokenizer import Tokenizer  # a field of a Struct that is never decoded


class Blueprint(Struct, frozen=True, kw_only=True):
    """The parts of an engine to start.

    load_tokenizer: may block; None: token ids only. images: how images become tokens; None: the model accepts only
    text. warning: shown to the user at the start. keeps_tensors: keep copies of new weights that are given as tensors.
    """

    settings: Settings
    queue: QueueConfig
    eos_token_ids: tuple[int, ...]
    stream_interval: int
    load_tokenizer: Callable[[], Tokenizer] | None
    make_processes: Callable[[Events], Processes]
    delivery: DeliveryConfig = DeliveryConfig()
    adapters: AdapterRules | None = None
    images: ImageModel | None = None
    warning: str = ""
    keeps_tensors: bool = False


class EngineParts(Struct, frozen=True, kw_only=True):
    """The parts of a started engine.

    settings: the settings of ``blueprint``, with ``max_running`` of the started engine. facts: the report of the
    scheduler process when it was ready. images: prepares images of prompts; None: the model reads only text.
    """

    blueprint: Blueprint
    settings: Settings
    eos_token_ids: tuple[int, ...]
    facts: dict[str, object]
    max_total_tokens: int
    processes: Processes
    tokenizer: Tokenizer | None
    longest_token: int | None
    images: ImageIntake | None = None
