"""Running: the parts of a started engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from aioengine.frontend.loaded_adapters import AdapterRules
from aioengine.media.intake.image_intake import ImageIntake
from aioengine.settings.config import DeliveryConfig, QueueConfig, Settings
from aioengine.supervision.fleet import Processes

if TYPE_CHECKING:
    from aioengine.tokenization.tokenizer import Tokenizer  # noqa: TC004  # a field of a Struct that is never decoded


class Running(Struct, frozen=True, kw_only=True):
    """The parts of a started engine. ``facts``: the report of the scheduler process when it was ready.

    ``images``: prepares images of prompts; None: the model reads only text.
    """

    settings: Settings
    queue: QueueConfig
    delivery: DeliveryConfig
    eos_token_ids: tuple[int, ...]
    stream_interval: int
    facts: dict[str, object]
    max_total_tokens: int
    processes: Processes
    tokenizer: Tokenizer | None
    longest_token: int | None
    adapters: AdapterRules | None = None
    images: ImageIntake | None = None
