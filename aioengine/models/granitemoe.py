"""GraniteMoE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import granitemoe
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class GraniteMoe(Decoder):
    """Factors of embeddings, scores, residual stream and logits, and experts."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(granitemoe.read(config), options)


PLUGIN = GraniteMoe
