"""ModernBERT."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import modernbert
from aioengine.models._encoder import Encoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class ModernBert(Encoder):
    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(modernbert.PLUGIN(config), options)


PLUGIN = ModernBert
