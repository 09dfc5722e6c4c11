"""Granite 4 with layers of Mamba 2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import granitemoehybrid
from aioengine.models._hybrid import HybridDecoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class GraniteHybrid(HybridDecoder):
    """See ``families.granitemoehybrid``."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(granitemoehybrid.read(config), options)


PLUGIN = GraniteHybrid
