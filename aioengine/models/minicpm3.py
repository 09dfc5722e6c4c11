"""MiniCPM3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import minicpm3
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class MiniCPM3(Decoder):
    """Latent attention."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(minicpm3.read(config), options)


PLUGIN = MiniCPM3
