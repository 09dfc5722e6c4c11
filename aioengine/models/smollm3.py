"""SmolLM3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import smollm3
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class SmolLM3(Decoder):
    """Some layers do not rotate queries and keys."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(smollm3.read(config), options)


PLUGIN = SmolLM3
