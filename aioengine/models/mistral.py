"""Mistral, as far as it attends to all positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import mistral
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Mistral(Decoder):
    """Without biases."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(mistral.read(config), options)


PLUGIN = Mistral
