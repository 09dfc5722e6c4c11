"""Granite 3, dense."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import granite
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Granite(Decoder):
    """Embeddings, residuals, attention scores and logits have factors."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(granite.read(config), options)


PLUGIN = Granite
