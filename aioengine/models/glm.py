"""GLM-4 of 2024, and GLM-Edge."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import glm
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Glm(Decoder):
    """Half of each head is rotated."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(glm.read(config), options)


PLUGIN = Glm
