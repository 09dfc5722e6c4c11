"""GLM-4, of April 2025."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import glm4
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Glm4(Decoder):
    """Norms before and behind attention and MLP."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(glm4.read(config), options)


PLUGIN = Glm4
