"""GLM-4.7-Flash."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import glm4_moe_lite
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Glm4MoeLite(Decoder):
    """Latent attention and experts."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(glm4_moe_lite.read(config), options)


PLUGIN = Glm4MoeLite
