"""Phi-3, Phi-3.5 and Phi-4."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import phi3
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Phi3(Decoder):
    """Fused layers in the checkpoint."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(phi3.read(config), options)


PLUGIN = Phi3
