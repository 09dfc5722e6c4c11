"""OLMoE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import olmoe
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Olmoe(Decoder):
    """Norms over all heads of queries and keys together, and experts."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(olmoe.read(config), options)


PLUGIN = Olmoe
