"""OLMo 3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import olmo3
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Olmo3(Decoder):
    """An OLMo 2 with windows in three of four layers."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(olmo3.read(config), options)


PLUGIN = Olmo3
