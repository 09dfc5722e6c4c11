"""Llama: Llama 1 to 3, and the many models with its architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import llama
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Llama(Decoder):
    """Biases, where there are any, on all projections of attention, or of the MLP."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(llama.read(config), options)


PLUGIN = Llama
