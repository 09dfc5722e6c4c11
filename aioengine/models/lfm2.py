"""LFM2, dense."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import lfm2
from aioengine.models._hybrid import HybridDecoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Lfm2(HybridDecoder):
    """See ``families.lfm2``."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(lfm2.read(config), options)


PLUGIN = Lfm2
